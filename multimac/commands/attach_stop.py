"""A run and its terminal: started and followed, left alone with `--detach`, then `multimac runs attach | stop`."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from rich.live import Live
from rich.table import Table
from typer import Option

from distributed.launcher import follow as follower
from distributed.launcher.follow import Attached, PlainScreen, Starter, finishing, start_launcher
from distributed.run_dir.find import find_run
from distributed.run_dir.folder import is_running, launcher_pid
from distributed.run_dir.log import read_events
from distributed.run_dir.run_view import RunView
from distributed.run_dir.summary import read_run
from multimac.view.models import folders_of
from multimac.view.progress import can_move
from multimac.view.run_tables import print_next
from multimac.view.terminal import Console
from whisper_tuner.errors import ExitStatus, RunError
from whisper_tuner.interrupts import noted
from whisper_tuner.text import duration, size

from .options import CONFIG, Config, Run, RunsDir, command


def start(console: Console, run_dir: Path, *, resume: bool = False, detach: bool = False) -> ExitStatus:
    """Start the launcher, and follow it from there; `detach`: only until others can tell that it is running."""
    _, position = read_events(run_dir / "events.jsonl")  # what a run had told before it is resumed
    launch = partial(start_launcher, run_dir, resume=resume, report="multimac.report")
    if not detach:
        return _followed(console, run_dir, launch, position=position)
    with noted(signal.SIGINT, signal.SIGTERM) as interrupts:
        launcher = launch()
        while launcher_pid(run_dir) is None:
            if interrupts:
                launcher.send_signal(signal.SIGTERM)
                return ExitStatus.INTERRUPTED
            if launcher.poll() is not None:  # its last words, or that there are none
                return _followed(console, run_dir, lambda: launcher, position=position)
            time.sleep(0.05)
    console.print(f"running without this terminal; to follow it: multimac runs attach {run_dir.name}", soft_wrap=True)
    console.print(f"to stop it: multimac runs stop {run_dir.name}", soft_wrap=True)
    return ExitStatus.OK


@command("runs attach")
def runs_attach(run: Run = "last", runs_dir: RunsDir = None, config: Config = CONFIG) -> ExitStatus:
    """Follow a running run from its first line to its end; Ctrl-C stops the run, as in its own terminal."""
    run_dir, launcher = _going_on(folders_of(config, runs_dir), run)
    return _followed(Console(), run_dir, lambda: launcher)


def _followed(console: Console, run_dir: Path, launch: Starter, *, position: int = 0) -> ExitStatus:
    """Follow a run to its end; then say what can be done with the model."""
    status = follow(run_dir, launch, console, position=position)
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
    run_dir, launcher = _going_on(folders_of(config, runs_dir), run)
    console = Console()
    for _ in range(2 if now else 1):
        launcher.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    stopped = read_run(run_dir)
    evaluating = stopped.message == "evaluate"  # there is nothing to finish and save then
    console.print("stopping now" if now or evaluating else finishing(len(stopped.hosts)))
    while is_running(run_dir):
        time.sleep(0.2)
    console.print(f"stopped; see what it has: multimac runs show {run_dir.name}", soft_wrap=True)
    return ExitStatus.OK


def _going_on(folders: Sequence[Path], name: str) -> tuple[Path, Attached]:
    run_dir = find_run(name, folders).absolute()
    pid = launcher_pid(run_dir)
    if pid is None:
        raise RunError(f"run {run_dir.name} is not running", remedy=f"See it with: multimac runs show {run_dir.name}")
    return run_dir, Attached(run_dir, pid)


def follow(run_dir: Path, launch: Starter, console: Console, *, position: int = 0) -> ExitStatus:
    """Show a run, as launcher.follow.follow: in a live table on a terminal, in plain lines elsewhere."""
    if not can_move(console):
        return follower.follow(run_dir, launch, PlainScreen(), position=position)
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        return follower.follow(run_dir, launch, _Live(live), position=position)


class _Live:
    def __init__(self, live: Live):
        self._live = live

    def print(self, line: str) -> None:
        self._live.console.print(line, soft_wrap=True)

    def update(self, view: RunView) -> None:
        self._live.update(table(view))


def table(view: RunView) -> Table:
    rows = Table(expand=False, header_style="bold", box=None, padding=(0, 1, 0, 0))
    has_rounds = any(host.round for host in view.hosts.values())
    for name in ("host", "epoch", "step", "loss", "clips/s", *(["round"] if has_rounds else []), "sent", "left", ""):
        rows.add_column(name, justify="left" if name in ("host", "") else "right")
    for host in view.hosts.values():
        rows.add_row(
            host.name.removesuffix(".local"),
            str(host.epoch or ""),
            f"{host.step}/{host.total_steps}" if host.total_steps else "",
            f"{host.loss:.3f}" if host.loss is not None else "",
            f"{host.speed:.1f}" if host.speed else "",
            *([str(host.round or "")] if has_rounds else []),
            size(host.sent) if host.sent else "",
            duration(host.remaining),
            host.device if host.state == "training" else host.state,
        )
    if view.progress:
        rows.caption = view.progress
    return rows
