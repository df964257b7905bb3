"""A run and its terminal: started and followed, left alone with `--detach`, then `multimac runs attach | stop`."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from distributed.launcher.follow import FINISHING, Attached, Starter, start_launcher
from distributed.run_dir.find import find_run
from distributed.run_dir.folder import is_running, launcher_pid
from distributed.run_dir.log import read_events
from distributed.run_dir.summary import read_run
from multimac.view.console import follow
from multimac.view.run_tables import next_commands
from multimac.view.terminal import Console
from whisper_tuner.errors import ExitStatus, RunError
from whisper_tuner.interrupts import noted


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


def runs_attach(folders: Sequence[Path], name: str) -> ExitStatus:
    """Follow a run from its first line to its end; Ctrl-C stops it, as in its own terminal."""
    run_dir, launcher = _going_on(folders, name)
    return _followed(Console(highlight=False, markup=False), run_dir, lambda: launcher)


def _followed(console: Console, run_dir: Path, launch: Starter, *, position: int = 0) -> ExitStatus:
    """To its end; then what can be done with the model."""
    status = follow(run_dir, launch, console, position=position)
    if status == ExitStatus.OK and (run := read_run(run_dir)).model:
        console.print("\n".join(["", "Next:", *(f"  {line}" for line in next_commands(run))]), soft_wrap=True)
    return status


def runs_stop(folders: Sequence[Path], name: str, *, now: bool) -> ExitStatus:
    """Ask for an orderly stop and wait for it; `now`: kill all workers at once, and go on later from a checkpoint."""
    run_dir, launcher = _going_on(folders, name)
    console = Console(highlight=False, markup=False)
    for _ in range(2 if now else 1):
        launcher.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    evaluating = read_run(run_dir).message == "evaluate"  # there is nothing to finish and save then
    console.print("stopping now" if now or evaluating else FINISHING)
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
