"""A run and its terminal: started and followed, left alone with `--detach`, then `multimac runs attach | stop`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

from rich.console import Group
from rich.live import Live
from typer import Option

from distributed.hosts.paths import PROJECT
from distributed.launcher import follow as follower
from distributed.launcher.follow import Attached, PlainScreen, Starter, finishing, start_launcher
from distributed.run_dir.find import find_run
from distributed.run_dir.folder import as_typed, is_running, launcher_pid
from distributed.run_dir.log import read_events
from distributed.run_dir.run_view import RunView
from distributed.run_dir.summary import read_run
from multimac.view.keys import is_in_front, keys
from multimac.view.models import folders_of
from multimac.view.progress import can_move
from multimac.view.run_screen import BETWEEN_HINTS, screen
from multimac.view.run_tables import print_next
from multimac.view.terminal import Console
from whisper_tuner.errors import ExitStatus, RunError
from whisper_tuner.interrupts import noted

from .options import CONFIG, Config, Run, RunsDir, command
from .watch import can_open

LEAVE = "d: leave it running"
STOP = "Ctrl-C: stop the run"


class Left(Exception):
    """The user looks at the run no longer; it goes on."""


def start(
    console: Console, run_dir: Path, *, resume: bool = False, watch: bool = False, detach: bool = False
) -> ExitStatus:
    """Start the launcher, and follow it from there; `detach`: only until others can tell that it is running."""
    if page := open_page(run_dir) if watch else "":
        console.print(page, soft_wrap=True)
    _, position = read_events(run_dir / "events.jsonl")  # what a run had told before it is resumed
    launch = partial(start_launcher, run_dir, resume=resume, report="multimac.report")
    if not detach:
        return _followed(console, run_dir, launch, position=position, page=page)
    with noted(signal.SIGINT, signal.SIGTERM) as interrupts:
        launcher = launch()
        while launcher_pid(run_dir) is None:
            if interrupts:
                launcher.send_signal(signal.SIGTERM)
                return ExitStatus.INTERRUPTED
            if launcher.poll() is not None:  # its last words, or that there are none
                return _followed(console, run_dir, lambda: launcher, position=position)
            time.sleep(0.05)
    return _left(console, run_dir)


def _left(console: Console, run_dir: Path) -> ExitStatus:
    name = as_typed(run_dir)
    console.print(f"running without this terminal; to follow it: multimac runs attach {name}", soft_wrap=True)
    console.print(f"to stop it: multimac runs stop {name}", soft_wrap=True)
    return ExitStatus.OK


@command("runs attach")
def runs_attach(run: Run = "last", runs_dir: RunsDir = None, config: Config = CONFIG) -> ExitStatus:
    """Follow a running run from its first line to its end; Ctrl-C stops the run, as in its own terminal.

    The key d, or closing the terminal, leaves it running.
    """
    run_dir, launcher = going_on(folders_of(config, runs_dir), run)
    return _followed(Console(), run_dir, lambda: launcher)


def _followed(console: Console, run_dir: Path, launch: Starter, *, position: int = 0, page: str = "") -> ExitStatus:
    """Follow a run to its end; then say what can be done with the model."""
    try:
        status = follow(run_dir, launch, console, position=position, page=page)
    except Left:
        return _left(console, run_dir)
    if status == ExitStatus.OK and (run := read_run(run_dir)).model:
        print_next(console, run)
    return status


@command("runs stop")
def runs_stop(
    run: Run = "last",
    now: Annotated[bool, Option("--now", help="Stop at once, without finishing the step or saving.")] = False,
    runs_dir: RunsDir = None,
    config: Config = CONFIG,
) -> ExitStatus:
    """Let a run finish its step, save and stop; it can be resumed."""
    run_dir, launcher = going_on(folders_of(config, runs_dir), run)
    console = Console()
    for _ in range(2 if now else 1):
        launcher.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    stopped = read_run(run_dir)
    evaluating = stopped.message == "evaluate"  # there is nothing to finish and save then
    console.print("stopping now" if now or evaluating else finishing(len(stopped.hosts)))
    while is_running(run_dir):
        time.sleep(0.2)
    console.print(f"stopped; see what it has: multimac runs show {as_typed(run_dir)}", soft_wrap=True)
    return ExitStatus.OK


def going_on(folders: Sequence[Path], name: str) -> tuple[Path, Attached]:
    """Return a run's folder and its launcher. Raises RunError if it is not running."""
    run_dir = find_run(name, folders).absolute()
    pid = launcher_pid(run_dir)
    if pid is None:
        remedy = f"See it with: multimac runs show {as_typed(run_dir)}"
        raise RunError(f"run {run_dir.name} is not running", remedy=remedy)
    return run_dir, Attached(run_dir, pid)


def follow(run_dir: Path, launch: Starter, console: Console, *, position: int = 0, page: str = "") -> ExitStatus:
    """Show a run, as launcher.follow.follow: on one screen of a terminal, in plain lines elsewhere."""
    if not can_move(console):
        return follower.follow(run_dir, launch, PlainScreen(), position=position)
    with noted(signal.SIGTSTP) as stops, FullScreen(console, run_dir, stops, page) as shown:
        return follower.follow(run_dir, launch, shown, position=position)


class FullScreen:
    """Shows a run in place of what the terminal has shown, which is there again afterwards.

    All lines of the run are then printed below it. stops: a Ctrl-Z adds to it, and puts this process to rest.
    page: what is told of the live page, if it has been opened.
    """

    def __init__(self, console: Console, run_dir: Path, stops: list[int], page: str = ""):
        self._console, self._run_dir, self._stops = console, run_dir, stops
        self._lines: list[str] = []
        self._page = page
        self._shown: object = None  # what the terminal shows now
        self._terminal: ExitStack | None = None

    def __enter__(self) -> FullScreen:
        self._enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        for line in self._lines:
            self._console.print(line, soft_wrap=True)

    def _enter(self) -> None:
        with ExitStack() as stack:
            self._pressed = stack.enter_context(keys())
            self._live = stack.enter_context(Live(console=self._console, screen=True, auto_refresh=False))
            self._hint = self._hints()
            self._terminal, self._shown = stack.pop_all(), None

    def _leave(self) -> None:
        if self._terminal:
            self._terminal.close()
            self._terminal = None

    def _hints(self) -> str:
        by_key = [self._page or "w: live page", LEAVE] if self._pressed else [self._page] if self._page else []
        return BETWEEN_HINTS.join([*by_key, STOP])

    def print(self, line: str) -> None:
        self._lines.append(line)

    def update(self, view: RunView) -> None:
        if self._stops:
            self._stops.clear()
            self._leave()
            noting = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTSTP)  # which does nothing where no shell could wake this process
            signal.signal(signal.SIGTSTP, noting)
        if self._terminal is None:
            if not is_in_front():  # the shell has sent it on in the background
                return
            self._enter()
        key = self._pressed() if self._pressed else ""
        if key in ("d", "D"):
            raise Left
        if key in ("w", "W") and not self._page:
            self._page = open_page(self._run_dir)
            self._hint = self._hints()
        rows = screen(
            view, self._lines, name=self._run_dir.name, console=self._console, hint=self._hint, now=time.time()
        )
        if self._shown != (shown := (self._console.size, rows)):  # a new size too needs all of it anew
            self._shown = shown
            self._live.update(Group(*rows), refresh=True)


def open_page(run_dir: Path) -> str:
    """Open the run's live page in the browser, by a process of its own: it goes on when this one ends.

    Returns what to tell of it. Where no browser can be opened, `multimac watch` says how to reach the page.
    """
    if not can_open():
        return f"no browser here; for the page: multimac watch {as_typed(run_dir)}"
    subprocess.Popen(
        [sys.executable, str(PROJECT / "cli_typer.py"), "watch", str(run_dir), "--until-unwatched"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return "the live page opens in your browser"
