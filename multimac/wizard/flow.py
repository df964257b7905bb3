"""The wizard from the banner to the finished run. Until the last answer it writes only into a scratch folder."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from whisper_tuner.config import KINDS as SECTION_KINDS
from whisper_tuner.errors import ConfigError, ExitStatus
from whisper_tuner.interrupts import as_ctrl_c
from whisper_tuner.paths import shown
from whisper_tuner.text import size

from .answers import load_answers, save_answers
from .draft import Draft
from .hosts import ask_hosts
from .ini_text import existing, read_text
from .machine import this_machine
from .method import ask_language, ask_method, ask_settings
from .model import ask_model
from .questions import FromFile, OnTerminal, Option, Questions
from .save import save
from .strategy import ask_strategy

NOW, LATER = "now", "later"
LEAVE = "leave"


def wizard(config: Path, answers: Path | None = None, save_answers_to: Path | None = None) -> ExitStatus:
    """Raises TunerError; KeyboardInterrupt before the run leaves everything as it was."""
    console = Console(highlight=False)
    questions = _questions(answers)
    if save_answers_to and not save_answers_to.absolute().parent.is_dir():
        raise ConfigError(f"--save-answers {save_answers_to}: there is no such folder")
    if save_answers_to and save_answers_to.is_dir():
        raise ConfigError(f"--save-answers {save_answers_to} is a folder", remedy="Name a file in it.")
    with as_ctrl_c(signal.SIGHUP, signal.SIGTERM), tempfile.TemporaryDirectory(prefix="multimac-wizard-") as scratch:
        try:
            draft, start = ask(questions, config.absolute(), Path(scratch), console)
        except KeyboardInterrupt:
            with contextlib.suppress(OSError):  # the terminal may be gone
                console.print("Stopped: nothing was written.")
            return ExitStatus.INTERRUPTED
        for line in save(draft):
            console.print(f"written: {escape(line)}", soft_wrap=True)
    if save_answers_to:
        save_answers(save_answers_to, questions.taken)
        console.print(f"written: {escape(str(save_answers_to))}", soft_wrap=True)
    if start == LATER:
        console.print(f"Start it with: {_command(draft)}", soft_wrap=True)
        return ExitStatus.OK
    return _run(draft, console)


def ask(questions: Questions, config: Path, scratch: Path, console: Console) -> tuple[Draft, str]:
    """Every question, to the last one."""
    draft = Draft(config_path=config, config_text=read_text(config))
    _banner(console)
    draft.model = ask_model(questions, draft.config)
    from .data import ask_data  # numpy and soundfile, while the first question is read

    draft.data = ask_data(questions, draft.config, console)
    draft.language = ask_language(questions, draft)
    draft.method = ask_method(questions, draft.model)
    draft.settings = ask_settings(questions, draft, console)
    group = ask_hosts(questions, draft, scratch, console)
    if group:
        ask_strategy(questions, draft, group, scratch, console)
    _ask_name(questions, draft)
    _show(draft, console)
    options = [
        Option(value=NOW, title="save this and start training"),
        Option(value=LATER, title="only save it"),
        Option(value=LEAVE, title="quit and change nothing"),
    ]
    start = questions.select("start", "Ready?", options, NOW)
    if start == LEAVE:
        raise KeyboardInterrupt
    questions.finish()
    return draft, start


def _questions(answers: Path | None) -> Questions:
    if answers is not None:
        return FromFile(answers, load_answers(answers))
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "the wizard asks questions, so it needs a terminal",
            remedy="Run it in a terminal, or answer from a file: python wizard.py --answers FILE",
        )
    return OnTerminal()


def _banner(console: Console) -> None:
    here = this_machine()
    lines = [
        "Fine-tune Whisper on your own speech",
        f"{here.name}: {here.cores} cores, {size(here.memory)} of memory, trains on {here.device}",
        "Enter accepts the suggestion; Esc or Ctrl-C quits and changes nothing.",
    ]
    console.print(Panel("\n".join(map(escape, lines)), expand=False))


def _ask_name(questions: Questions, draft: Draft) -> None:
    """Ask for the name of the new sections; existing ones are replaced only if the user says so."""
    while True:
        default = _free_name(draft)
        draft.name = questions.text("name", "Name for this profile:", default, _check_name)
        taken = [f"[{header}]" for header in existing(draft.config_text, draft.sections())]
        if not taken:
            return
        if questions.confirm("overwrite", f"{', '.join(taken)} would be replaced. Replace them?", False):
            return
        if not questions.interactive:
            raise ConfigError(
                f"name = {draft.name}: {', '.join(taken)} would be replaced",
                remedy="Choose another name, or answer overwrite = yes.",
            )


def _check_name(text: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", text):
        raise ValueError("letters, digits, '-', '_' and '.' only")


def _free_name(draft: Draft) -> str:
    known = {name for kind in SECTION_KINDS for name in draft.config.names(kind)}
    stem = re.sub(r"[^\w.-]+", "-", f"{draft.data.title}-{draft.method}", flags=re.ASCII).strip("-._") or "mine"
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    return next(name for name in names if name not in known and f"{name}-hosts" not in known)


def _show(draft: Draft, console: Console) -> None:
    """The resolved settings that are not the defaults, and where each comes from."""
    job = draft.job()
    table = Table(title=f"{draft.run_name}", header_style="bold")
    for column in ("setting", "value", "from"):
        table.add_column(column, overflow="fold")
    for part in (job.profile, job.distribution):
        for key in part.__dataclass_fields__:
            if key in job.origin and not (part is job.distribution and not draft.group):
                table.add_row(key, escape(_value(getattr(part, key), draft)), escape(_origin(job.origin[key])))
    if draft.group:
        addresses = ", ".join(host.address for host in draft.group.hosts.all)
        table.add_row("machines", escape(addresses), escape(draft.group.path.name))
    console.print(table)
    console.print("Everything else has its default; `python cli_typer.py config show` lists all settings.")
    header = ", ".join(f"[{header}]" for header, _ in draft.sections())
    console.print(f"To be added to {draft.config_path.name}: {escape(header)}", soft_wrap=True)


def _value(value: object, draft: Draft) -> str:
    folder = draft.config_path.parent
    path = Path(str(value))
    if path.is_absolute() and path.is_relative_to(folder):
        return path.relative_to(folder).as_posix()
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _origin(place: str) -> str:
    """'config.ini:12 [dataset:demo]' -> '[dataset:demo]': the lines of new sections are not fixed yet."""
    return place[place.index("[") :] if "[" in place else place


def _command(draft: Draft) -> str:
    command = "distributed-train" if draft.group else "finetune"
    return f"python cli_typer.py {command} {draft.run_name}{_config(draft)}"


def _config(draft: Draft) -> str:
    return "" if draft.config_path == Path("config.ini").absolute() else f" --config {draft.config_path}"


def _run(draft: Draft, console: Console) -> ExitStatus:
    """Make the same call as the command line, then show what came of it."""
    from multimac.commands.train import distributed_train, finetune

    runs = draft.job().profile.runs_dir
    before = set(runs.glob("*"))
    if draft.group:
        status = distributed_train(draft.config_path, draft.run_name, draft.group.path)
    else:
        status = finetune(draft.config_path, draft.run_name)
    new = sorted(set(runs.glob("*")) - before)
    if new:
        _tell(draft, new[-1], console)
    return status


def _tell(draft: Draft, run: Path, console: Console) -> None:
    final = shown(run) / "final"
    lines = []
    if (run / "wer.json").exists():
        wer = json.loads((run / "wer.json").read_text())
        lines.append(f"WER {wer['before']['wer']:.1f} before, {wer['after']['wer']:.1f} after")
    if not (run / "final").is_dir():
        return
    language = f" --language {draft.language}" if draft.language else ""
    lines += [
        f"Model: {final}",
        "",
        "Next:",
        f"  python cli_typer.py transcribe FILE --model {final}{language}",
        f"  python cli_typer.py evaluate {final} --profile {draft.name}{_config(draft)}",
        f"  {_command(draft)}   (the same again)",
    ]
    console.print("\n".join(lines), markup=False, soft_wrap=True)
