"""The wizard from the banner to the finished run.

Until the last answer it writes only into a scratch folder, and clips that must be cut into one that the user names.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.panel import Panel
from rich.table import Table

from multimac.commands.options import CONFIG, Config, command
from multimac.view.terminal import Console
from whisper_tuner.config import KINDS as SECTION_KINDS
from whisper_tuner.config import ConfigFile
from whisper_tuner.errors import ConfigError, ExitStatus
from whisper_tuner.files import shown
from whisper_tuner.interrupts import as_ctrl_c

from .data import ask_data
from .draft import Draft, numbered, read_text
from .hosts import ask_hosts, ask_strategy
from .model import ask_language, ask_method, ask_model, ask_settings, this_machine
from .questions import Back, Option, Questions, write_answers

NOW, LATER, LEAVE = "now", "later", "leave"


@command("wizard")
def wizard(
    answers: Annotated[Path | None, typer.Option(help="Take the answers from this file (JSON or INI).")] = None,
    save_answers: Annotated[Path | None, typer.Option(help="Write the answers to this file, for --answers.")] = None,
    config: Config = CONFIG,
) -> ExitStatus:
    """Ask what to train and where, save it as a profile, and start it."""
    console = Console()
    if answers is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
        remedy = "Run it in a terminal, or answer from a file: python wizard.py --answers FILE"
        raise ConfigError("the wizard asks questions, so it needs a terminal", remedy=remedy)
    questions = Questions(answers, console)
    if save_answers and save_answers.is_dir():
        raise ConfigError(f"--save-answers {save_answers} is a folder", remedy="Name a file in it.")
    if save_answers and not save_answers.absolute().parent.is_dir():
        raise ConfigError(f"--save-answers {save_answers}: there is no such folder")
    with as_ctrl_c(signal.SIGHUP, signal.SIGTERM), tempfile.TemporaryDirectory(prefix="multimac-wizard-") as scratch:
        try:
            draft, start = _ask_all(questions, config.absolute(), Path(scratch), console)
        except KeyboardInterrupt:  # all is as it was, but for clips that were cut
            with contextlib.suppress(OSError):  # the terminal may be gone
                but = f" but the clips in {', '.join(map(str, map(shown, questions.cut)))}" if questions.cut else ""
                console.print(f"Stopped: nothing was written{but}.", markup=False, soft_wrap=True)
            return ExitStatus.INTERRUPTED
        for line in draft.save():
            console.print(f"written: {line}", markup=False, soft_wrap=True)
    if save_answers:
        write_answers(save_answers, questions.taken)
        console.print(f"written: {save_answers}", soft_wrap=True)
    if start == NOW:
        return _run(draft, console)
    console.print(f"Start it with: {_command(draft)}", markup=False, soft_wrap=True)
    return ExitStatus.OK


def _ask_all(questions: Questions, config: Path, scratch: Path, console: Console) -> tuple[Draft, str]:
    """Begin with the first question each time the user goes back; what has been answered is not asked again."""
    while True:
        try:
            return _ask(questions, config, scratch, console)
        except Back:
            questions.go_back()


def _ask(questions: Questions, config: Path, scratch: Path, console: Console) -> tuple[Draft, str]:
    """Ask every question, to the last one. Raises Back."""
    text = questions.once("config", config, lambda: read_text(config))
    keys = "Enter accepts the suggestion; Shift-Tab goes back to the question before.\n"
    keys += "Esc or Ctrl-C quits and changes nothing."
    banner = f"Fine-tune Whisper on your own speech\n{this_machine()}\n{keys}"
    console.print(Panel(banner, expand=False))
    model = ask_model(questions, ConfigFile(config, text), console)
    data = ask_data(questions, ConfigFile(config, text), console)
    draft = Draft(config_path=config, config_text=text, model=model, data=data)
    draft.language = ask_language(questions, draft, console)
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


def _ask_name(questions: Questions, draft: Draft) -> None:
    """Ask for the name of the new sections; existing ones are replaced only if the user says so."""

    def check(text: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", text):
            raise ValueError("letters, digits, '-', '_' and '.' only")

    known = {name for kind in SECTION_KINDS for name in draft.config.names(kind)}
    train = draft.data.manifests["train"]
    place = (train if train.is_dir() else train.parent).resolve()  # it may be ../recordings
    stem = re.sub(r"[^\w.-]+", "-", f"{draft.data.section or place.name}-{draft.method}", flags=re.ASCII).strip("-._")
    free = next(name for name in numbered(stem) if not known & {name, f"{name}-hosts"})
    while True:
        draft.name = questions.text("name", "Name for this profile:", free, check)
        headers = [header for header, _ in draft.sections()]
        taken = ", ".join(f"[{header}]" for header in headers if draft.config.has(*header.split(":", 1)))
        if not taken or questions.confirm("overwrite", f"{taken} would be replaced. Go ahead?", False):
            return
        if not questions.interactive:
            what = f"name = {draft.name}: {taken} would be replaced"
            raise ConfigError(what, remedy="Choose another name, or answer overwrite = yes.")


def _show(draft: Draft, console: Console) -> None:
    """Show the settings that are not the defaults, as config.ini will have them, and where each comes from."""
    draft.job()  # says what is wrong with them
    table = Table(title=draft.run_name, header_style="bold")
    for column in ("setting", "value", "from"):
        table.add_column(column, overflow="fold")
    config = draft.extended_config()
    sections = [config.profile_values(draft.name)]
    sections += [config.section("distributed", draft.run_name)] if draft.group else []
    for section in sections:
        for key, value in section.values.items():
            origin = section.origin[key].partition("[")[2]  # without the line, which is not fixed yet
            table.add_row(key, value, f"[{origin}")
    if draft.group:
        addresses = ", ".join(host.address for host in draft.group.hosts.all)
        table.add_row("machines", addresses, draft.group.path.name)
    console.print(table)
    console.print("Everything else has its default; `multimac config show` lists all settings.")
    headers = ", ".join(f"[{header}]" for header, _ in draft.sections())
    console.print(f"To be written to {draft.config_path.name}: {headers}", markup=False, soft_wrap=True)


def _command(draft: Draft) -> str:
    command = "distributed-train" if draft.group else "finetune"
    config = "" if draft.config_path == Path("config.ini").absolute() else f" --config {draft.config_path}"
    return f"multimac {command} {draft.run_name}{config}"


def _run(draft: Draft, console: Console) -> ExitStatus:
    """Make the same call as the command line, then show what came of it."""
    from multimac.commands.train import distributed_train, finetune

    runs = draft.job().profile.runs_dir
    before = set(runs.glob("*"))
    if draft.group:
        status = distributed_train(draft.run_name, draft.group.path, config=draft.config_path)
    else:
        status = finetune(draft.run_name, config=draft.config_path)
    if any((run / "final").is_dir() for run in set(runs.glob("*")) - before):
        console.print(f"  {_command(draft)}   (the same again)", markup=False, soft_wrap=True)
    return status
