"""Follows a run through its events until it ends: the command that the user typed only looks on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Protocol

from distributed.run_dir.folder import is_running
from distributed.run_dir.log import read_events
from distributed.run_dir.run_view import RunView
from whisper_tuner.errors import ExitStatus, RunError
from whisper_tuner.interrupts import as_ctrl_c
from whisper_tuner.text import duration, size

LINE_EVERY_S = 10.0  # between plain lines about one host: often enough to see it live, few enough to read


class Screen(Protocol):
    def print(self, line: str) -> None: ...

    def update(self, view: RunView) -> None:
        """Show what the run is at; called several times a second."""


class PlainScreen:
    """For what is not a terminal: every line once, and now and then one about each host."""

    def __init__(self) -> None:
        self._printed: dict[str, tuple[float, int]] = {}  # host: when, after which step

    def print(self, line: str) -> None:
        print(line, flush=True)

    def update(self, view: RunView) -> None:
        now = time.monotonic()
        for host in view.hosts.values():
            when, step = self._printed.get(host.name, (-LINE_EVERY_S, 0))
            if host.state == "training" and host.step != step and now - when >= LINE_EVERY_S:
                self._printed[host.name] = now, host.step
                loss = f"{host.loss:.3f}" if host.loss is not None else "-"
                left = f", {duration(host.remaining)} left" if host.remaining else ""
                self.print(
                    f"{host.name}: epoch {host.epoch}, step {host.step}/{host.total_steps}, loss {loss}, "
                    f"{host.speed or 0:.1f} clips/s, round {host.round}, sent {size(host.sent)}{left}"
                )


class Attached:
    """A launcher that another command started, as far as following it goes."""

    returncode = "unknown"

    def __init__(self, run_dir: Path, pid: int):
        self._run_dir, self._pid = run_dir, pid

    def poll(self) -> int | None:
        return None if is_running(self._run_dir) else 0

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)


@as_ctrl_c(signal.SIGTERM)
def follow(run_dir: Path, launcher: subprocess.Popen | Attached, screen: Screen, *, position: int = 0) -> ExitStatus:
    """Show a run until it ends, its events from byte `position` on.

    Ctrl-C and SIGTERM are passed on to the launcher: once to stop in order, twice to stop now. As SIGTERM, because a
    launcher that was started in the background has SIGINT ignored until it is ready.

    Raises RunError if the launcher vanishes without a last word.
    """
    view, interrupts, gone = RunView(), 0, False
    while not gone:
        try:
            gone = launcher.poll() is not None
            events, position = read_events(run_dir / "events.jsonl", position)
            for event in events:
                view.take(event)
            for line in view.lines:
                screen.print(line)
            view.lines.clear()
            screen.update(view)
            if gone and view.end is None and interrupts:
                screen.print(f"stopped at once; what it has: multimac runs show {run_dir.name}")
                return ExitStatus.INTERRUPTED
            if gone and view.end is None:
                raise RunError(
                    f"the launcher ended without a word (status {launcher.returncode})",
                    remedy=f"What it has, and how to go on: multimac runs show {run_dir.name}. "
                    f"What it printed: {run_dir / 'launcher.log'}",
                )
            time.sleep(0.2)
        except KeyboardInterrupt:
            gone = False  # the last words may not have been read yet
            interrupts += 1
            launcher.send_signal(signal.SIGTERM)
            last = interrupts > 1 or view.phase == "evaluate"  # there is nothing to finish and save then
            screen.print("stopping now" if last else "finishing the step, then saving; Ctrl-C again to stop now")
    status = ExitStatus(view.end["status"])
    if status not in (ExitStatus.OK, ExitStatus.INTERRUPTED):
        error = RunError(view.end["message"], remedy=f"Everything that the hosts printed: {run_dir / 'launcher.log'}")
        error.exit_status = status
        raise error
    if view.end["message"]:
        screen.print(view.end["message"])
    return status
