"""The wizard from the banner to the finished run.

Until the last answer it writes only into a scratch folder, and clips that must be cut into one that the user names.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.panel import Panel
from rich.table import Table

from distributed.checkup import this_machine
from distributed.hosts.discovery import ANNOUNCED, Candidate, find
from distributed.hosts.paths import CHECKS, PROJECT, STORE
from distributed.plan.hosts_file import HOSTS_FILE, load_hosts
from distributed.run_dir.summary import REPORT
from multimac.commands.options import CONFIG, Config, Detach, Watching, command
from multimac.view.terminal import Console
from whisper_tuner.config import KINDS as SECTION_KINDS
from whisper_tuner.config import ConfigFile
from whisper_tuner.data.formats.rows import KIND_OF
from whisper_tuner.errors import ConfigError, ExitStatus, ModelError
from whisper_tuner.fact_store import CACHE, FactStore
from whisper_tuner.files import check_writable, like, shown
from whisper_tuner.interrupts import as_ctrl_c
from whisper_tuner.languages import language_code
from whisper_tuner.text import counted

from .data import ask_data, ask_split, spoken, typed_path
from .draft import Draft, numbered, read_text
from .duration import show_time, suit_rate
from .hosts import ALONE, HOSTS, ask_hosts, ask_strategy
from .model import (
    BUNDLED,
    ask_language,
    ask_method,
    ask_model,
    ask_settings,
    suggested_model,
)
from .questions import Back, Option, Questions, write_answers

NOW, LATER, LEAVE, CHANGE, MACHINES = "now", "later", "leave", "change", "machines"
NAMELESS = {*KIND_OF, "all", "data", "manifest", "metadata"}  # lists that say less than the folder they are in
ANSWERS = "answers of the wizard"  # a kind of facts, by config.ini
READY = [
    Option(value=NOW, title="save this and start training"),
    Option(value=MACHINES, title="train on several machines: asks which"),
    Option(value=CHANGE, title="change something else: asks all other questions"),
    Option(value=LATER, title="only save it"),
    Option(value=LEAVE, title="quit and change nothing"),
]


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
    store, kept = FactStore(PROJECT / STORE / CACHE), {str(config.absolute()): ""}
    earlier = store.known(ANSWERS, kept) if answers is None else {}
    questions = Questions(answers, console, earlier=earlier.get(str(config.absolute())))
    if save_answers and save_answers.is_dir():
        raise ConfigError(f"--save-answers {save_answers} is a folder", remedy="Name a file in it.")
    if save_answers and not save_answers.absolute().parent.is_dir():
        raise ConfigError(f"--save-answers {save_answers}: there is no such folder")
    keys = "Enter accepts the suggestion; Shift-Tab goes back to the question before.\n"
    keys += "At a question, Esc or Ctrl-C quits and changes nothing."
    console.print(Panel(f"Fine-tune Whisper on your own speech\n{this_machine.described()}\n{keys}", expand=False))
    with as_ctrl_c(signal.SIGHUP, signal.SIGTERM), tempfile.TemporaryDirectory(prefix="multimac-wizard-") as scratch:
        try:
            draft, start = _ask_all(questions, config.absolute(), Path(scratch), console)
        except KeyboardInterrupt:  # all is as it was, but for clips that were cut
            if questions.interactive:
                questions.taken.pop("start", None)
                store.keep(ANSWERS, kept, dict.fromkeys(kept, questions.taken))
            with contextlib.suppress(OSError):  # the terminal may be gone
                again = " Your answers are suggested the next time." if questions.interactive else ""
                console.print(f"Stopped: nothing was written{_but_clips(questions)}.{again}", markup=False)
            return ExitStatus.INTERRUPTED
        if questions.interactive:
            store.keep(ANSWERS, kept, dict.fromkeys(kept, questions.taken))  # until all is written
        _save(draft, console)
        store.keep(ANSWERS, kept, {name: {} for name in kept})
    if save_answers:
        write_answers(save_answers, questions.taken)
        console.print(f"written: {save_answers}", soft_wrap=True)
    if start == NOW:
        return _run(draft, console)
    console.print(f"Start it with: {_command(draft)}", markup=False, soft_wrap=True)
    return ExitStatus.OK


@command("train")
def train(
    recordings: Annotated[str, typer.Argument(metavar="FOLDER_OR_FILE", help="Recordings with their texts.")],
    language: Annotated[str, typer.Option(help="Language of the speech, such as fr.")] = "",
    model: Annotated[str, typer.Option(help="A folder, or a hub id. [default: what suits machine and speech]")] = "",
    hosts: Annotated[Path | None, typer.Option("--hosts", help="Hosts file: train on all its machines.")] = None,
    audio_column: Annotated[str, typer.Option(help="Column of the audio's names; without a header, its number.")] = "",
    text_column: Annotated[str, typer.Option(help="Column of the text; without a header, its number.")] = "",
    watch: Watching = False,
    detach: Detach = False,
    config: Config = CONFIG,
) -> ExitStatus:
    """Train on recordings with the settings that the wizard suggests, and save these as a profile.

    Ctrl-C stops the run, which can be resumed; a run goes on when its terminal closes.
    """
    console = Console()
    path, is_set = typed_path(recordings), ConfigFile(config, read_text(config)).has("dataset", recordings)
    if not (is_set or path.exists()):
        remedy = "Name a folder with recordings and texts, or a table that names them: docs/data.md has all layouts."
        raise ConfigError(f"{recordings}: there is no such file or folder{like(path)}", remedy=remedy)
    check_writable(config.absolute().parent, "Name a config.ini in another folder: --config FILE")
    if language:
        language_code(language)
    if hosts:
        load_hosts(hosts)  # what is wrong is told before all else
    given = {"data": recordings, "audio_column": audio_column, "text_column": text_column, "language": language}
    given |= {"model": model, "where": HOSTS if hosts else ALONE}
    questions = Questions(console=console, answers={key: value for key, value in given.items() if value}, place="--")
    with as_ctrl_c(signal.SIGHUP, signal.SIGTERM), tempfile.TemporaryDirectory(prefix="multimac-train-") as scratch:
        try:
            file = hosts and hosts.absolute()
            draft, _ = _ask(questions, config.absolute(), Path(scratch), console, hosts_file=file)
        except KeyboardInterrupt:
            console.print(f"Stopped: nothing was written{_but_clips(questions)}.", markup=False)
            return ExitStatus.INTERRUPTED
        _save(draft, console)
    return _run(draft, console, watch=watch, detach=detach)


def _but_clips(questions: Questions) -> str:
    return f" but the clips in {', '.join(str(shown(folder)) for folder in questions.cut)}" if questions.cut else ""


def _save(draft: Draft, console: Console) -> None:
    for line in draft.save():
        console.print(f"written: {line}", markup=False, soft_wrap=True)
    if draft.data.is_doubtful and not _was_checked(draft):
        what = "The recordings have not been listened to or compared. This does it, and shows the rows to look at"
        console.print(f"{what}: {_check(draft)}", style="yellow", markup=False, soft_wrap=True)


def _ask_all(questions: Questions, config: Path, scratch: Path, console: Console) -> tuple[Draft, str]:
    """Begin with the first question each time the user goes back; what has been answered is not asked again."""
    while True:
        try:
            return _ask(questions, config, scratch, console)
        except Back:
            questions.go_back()


def _ask(
    questions: Questions, config: Path, scratch: Path, console: Console, *, hosts_file: Path | None = None
) -> tuple[Draft, str]:
    """Ask for recordings and language, and suggest the rest; or ask every question, to the last one. Raises Back."""
    text = questions.once("config", config, lambda: read_text(config))
    before, suggestions = ConfigFile(config, text), Questions(answers={})
    near: list[Candidate] = questions.once("near", None, _look_around) if questions.interactive else []
    given = "model" in questions.answers  # then what is wrong with it is told before all is read
    model = ask_model(questions, before, None, console) if given else None
    data = ask_data(questions, before, console)
    speech_s, language = sum(sample.duration_s for sample in data.samples["train"]), spoken(questions, data)
    if model is None:
        look = partial(suggested_model, before, speech_s, language, console, near=data.source)
        model = questions.once("suggest", (round(speech_s), language), look)
    is_bundled = model and model.base_model == str(BUNDLED)
    if model is None or (not given and is_bundled and not data.source.is_relative_to(BUNDLED.parent)):
        if questions.asks_nobody:
            raise ModelError("no model for this speech", remedy="Name one that is on this disk with --model FOLDER.")
        model = ask_model(questions, before, model, console, near=data.source)
    draft = Draft(config_path=config, config_text=text, model=model, data=data)
    start = CHANGE
    if questions.interactive and "model" not in questions.earlier:  # then they had changed something
        draft.data = ask_split(suggestions, data, console)
        draft.language = ask_language(questions, draft, console)
        draft.method = ask_method(suggestions, draft.model)
        draft.settings = ask_settings(suggestions, draft, console)
        _ask_name(suggestions, draft)
        _show(draft, console)
        suit_rate(draft, show_time(questions, draft, scratch, console), console)
        start = questions.select("start", "Ready?", [_with_count(option, near) for option in READY], NOW)
        if start not in (MACHINES, CHANGE):
            return _decided(draft, start)
    if start == CHANGE:
        draft.data = ask_split(questions, data, console)
        if "model" not in questions.taken:
            draft.model = ask_model(questions, before, model, console, near=data.source)
        if not (questions.interactive and draft.language):
            draft.language = ask_language(questions, draft, console)
        draft.method = ask_method(questions, draft.model)
        if any(questions.taken[key] != questions.earlier.get(key) for key in ("model", "method")):
            questions.earlier.pop("learning_rate", None)  # it was meant for another model
        draft.settings = ask_settings(questions, draft, console)
    if hosts_file is None and not Path(HOSTS_FILE).exists():  # else the one of an earlier run
        hosts_file = next(filter(Path.is_file, reversed(before.paths("hosts_config"))), None)
    if group := ask_hosts(questions, draft, scratch, console, hosts_file, several=start == MACHINES):
        ask_strategy(questions, draft, group, scratch, console)
    _ask_name(questions, draft)
    _show(draft, console)
    if questions.interactive or questions.asks_nobody:
        measured = show_time(questions, draft, scratch, console)
        if questions.asks_nobody and "learning_rate" not in questions.answers:
            suit_rate(draft, measured, console)
    decided = [option for option in READY if option.value not in (MACHINES, CHANGE)]
    start = questions.select("start", "Ready?", decided, NOW)
    questions.finish()
    return _decided(draft, start)


def _look_around() -> list[Candidate]:
    """Look for other machines while questions are answered; they are in the list once they have been found."""
    near: list[Candidate] = []

    def look() -> None:
        with contextlib.suppress(Exception):  # the questions go on without it
            near.extend(one for one in find() if one.told_by == ANNOUNCED)

    threading.Thread(target=look, daemon=True).start()
    return near


def _with_count(option: Option, near: Sequence[Candidate]) -> Option:
    found = f"train on several machines: {counted(len(near), 'other machine')} found"
    return replace(option, title=found) if option.value == MACHINES and near else option


def _decided(draft: Draft, start: str) -> tuple[Draft, str]:
    if start == LEAVE:
        raise KeyboardInterrupt
    return draft, start


def _ask_name(questions: Questions, draft: Draft) -> None:
    """Ask for the name of the new sections; existing ones are replaced only if the user says so."""

    def check(text: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", text):
            raise ValueError("letters, digits, '-', '_' and '.' only")

    known = {name for kind in SECTION_KINDS for name in draft.config.names(kind)}

    def is_free(name: str) -> bool:
        draft.name = name
        return not known & {name, f"{name}-hosts"} or all(
            _holds(draft.config, *section) for section in draft.sections()
        )

    source = draft.data.source.resolve()  # it may be ../recordings
    told = source.name if source.is_dir() else source.stem
    named = draft.data.section or (source.parent.name if told.lower() in NAMELESS else told)
    named = named.removesuffix(f"-{draft.method}")
    stem = re.sub(r"[^\w.-]+", "-", f"{named}-{draft.method}", flags=re.ASCII).strip("-._")
    free = next(filter(is_free, numbered(stem)))
    while True:
        draft.name = questions.text("name", "Name for this profile:", free, check)
        sections = [(header, keys) for header, keys in draft.sections() if not _holds(draft.config, header, keys)]
        taken = ", ".join(f"[{header}]" for header, _ in sections if draft.config.has(*header.split(":", 1)))
        if not taken or questions.confirm("overwrite", f"{taken} would be replaced. Go ahead?", False):
            return
        if not questions.interactive:
            what = f"name = {draft.name}: {taken} would be replaced"
            raise ConfigError(what, remedy="Choose another name, or answer overwrite = yes.")


def _holds(config: ConfigFile, header: str, keys: Mapping[str, str]) -> bool:
    """Tell whether a section is there already, with just these keys."""
    kind, name = header.split(":", 1)
    return config.has(kind, name) and config.section(kind, name).values == keys


def _show(draft: Draft, console: Console) -> None:
    """Show the settings that are not the defaults, as config.ini will have them, and where others come from."""
    draft.job()  # says what is wrong with them
    table = Table(box=None, show_header=False, padding=(0, 0, 0, 2), pad_edge=False)
    for style in ("bold", "", "dim"):
        table.add_column(style=style, overflow="fold")
    config, headers = draft.extended_config(), [f"[{header}]" for header, _ in draft.sections()]
    sections = [config.profile_values(draft.name)]
    sections += [config.section("distributed", draft.run_name)] if draft.group else []
    for section in sections:
        for key, value in section.values.items():
            origin = "[" + section.origin[key].partition("[")[2]  # without the line, which is not fixed yet
            table.add_row(key, value, "" if origin in headers else f"from {origin}")
    if draft.group:
        addresses = ", ".join(host.address for host in draft.group.hosts.all)
        table.add_row("machines", addresses, f"from {draft.group.path.name}")
    console.print(f"To be written to {draft.config_path.name} as {' and '.join(headers)}:", markup=False)
    console.print(table)
    console.print(f"Everything else has its default. Once saved: multimac config show {draft.run_name}", markup=False)


def _command(draft: Draft) -> str:
    command = "distributed-train" if draft.group else "finetune"
    return f"multimac {command} {draft.run_name}{_config(draft)}"


def _check(draft: Draft) -> str:
    return f"multimac data check {draft.name}{_config(draft)}"


def _was_checked(draft: Draft) -> bool:
    """Tell whether `data check` has made its report since the lists of clips were written."""
    page = PROJECT / STORE / CHECKS / draft.name / REPORT
    lists = (draft.data.manifests | draft.data.split).values()
    return page.exists() and all(path.exists() and path.stat().st_mtime < page.stat().st_mtime for path in lists)


def _config(draft: Draft) -> str:
    return "" if draft.config_path == Path("config.ini").absolute() else f" --config {draft.config_path}"


def _run(draft: Draft, console: Console, *, watch: bool = False, detach: bool = False) -> ExitStatus:
    """Make the same call as the command line, then show what came of it."""
    from multimac.commands.train import distributed_train, finetune

    runs = draft.job().profile.runs_dir
    before = set(runs.glob("*"))
    if draft.group:
        status = distributed_train(
            draft.run_name, draft.group.path, watch=watch, detach=detach, config=draft.config_path
        )
    else:
        status = finetune(draft.run_name, watch=watch, detach=detach, config=draft.config_path)
    if status == ExitStatus.OK and any((run / "final").is_dir() for run in set(runs.glob("*")) - before):
        console.print(f"  {_command(draft)}   (the same from the beginning)", markup=False, soft_wrap=True)
        if draft.data.is_doubtful and not _was_checked(draft):
            console.print(f"  {_check(draft)}   (rows to look at)", markup=False, soft_wrap=True)
    return status
