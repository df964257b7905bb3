"""Starts a run's launcher, and follows its events until it ends: the command that the user typed only looks on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from distributed.hosts.host_process import environment
from distributed.hosts.paths import PROJECT
from distributed.run_dir.folder import is_running
from distributed.run_dir.log import new_events
from distributed.run_dir.run_view import PREPARING, RunView
from whisper_tuner.errors import ExitStatus, RunError
from whisper_tuner.interrupts import noted
from whisper_tuner.text import duration, harmless, size

LINE_EVERY_S = 10.0  # between plain lines about one host: often enough to see it live, few enough to read


def finishing(ranks: int) -> str:
    """Say what a run still does that is to stop: one rank alone has no exchange to wait for."""
    waited_for = " (an exchange that is on its way is waited for)" if ranks > 1 else ""
    return f"finishing the step, then saving{waited_for}"


class Screen(Protocol):
    def print(self, line: str) -> None: ...

    def update(self, view: RunView) -> None:
        """Show what the run is at; called several times a second."""


class PlainScreen:
    """Prints to what is not a terminal: every line once, and now and then one about each host."""

    def __init__(self) -> None:
        self._printed: dict[str, tuple[float, int]] = {}  # host: when, after which step
        self._progress, self._progress_at = "", time.monotonic()

    def print(self, line: str) -> None:
        print(harmless(line), flush=True)

    def update(self, view: RunView) -> None:
        now = time.monotonic()
        if view.progress not in ("", self._progress) and now - self._progress_at >= LINE_EVERY_S:
            self._progress, self._progress_at = view.progress, now
            self.print(view.progress)
        for host in view.hosts.values():
            when, step = self._printed.get(host.name, (-LINE_EVERY_S, 0))
            if host.state.startswith(PREPARING) and now - when >= LINE_EVERY_S:
                self._printed[host.name] = now, step
                self.print(f"{host.name}: {host.state}")
            elif host.state == "training" and host.step != step and now - when >= LINE_EVERY_S:
                self._printed[host.name] = now, host.step
                loss = f", loss {host.loss:.3f}" if host.loss is not None else ""  # a rank of a pipeline has none
                speed = f", {host.speed:.1f} clips/s" if host.speed else ""
                at_round = f", round {host.round}" if host.round else ""  # some strategies have none
                left = f", {duration(host.remaining)} left" if host.remaining else ""
                self.print(
                    f"{host.name}: epoch {host.epoch}, step {host.step}/{host.total_steps}"
                    f"{loss}{speed}{at_round}, sent {size(host.sent)}{left}"
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


Starter = Callable[[], subprocess.Popen | Attached]


def start_launcher(run_dir: Path, *, resume: bool = False, report: str = "") -> subprocess.Popen:
    """Start it in a session of its own, so that neither Ctrl-C nor a closed terminal reaches it directly.

    report: the module that writes a report of the run at its end, or "".
    """
    options = [*(["--resume"] if resume else []), *([f"--report={report}"] if report else [])]
    with (run_dir / "launcher.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "distributed.launcher.main", str(run_dir), *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=PROJECT,
            env={**os.environ, **environment(PROJECT)},
            start_new_session=True,
        )


def follow(run_dir: Path, launch: Starter, screen: Screen, *, position: int = 0) -> ExitStatus:
    """Show a run until it ends, its events from byte `position` on. `launch()` starts its launcher, or finds it.

    Ctrl-C and SIGTERM are passed on to the launcher: once to stop in order, twice to stop now. As SIGTERM, because a
    launcher that was started in the background has SIGINT ignored until it is ready.

    Raises RunError for a run that has failed, or whose launcher vanishes without a last word.
    """
    view, passed_on, gone = RunView(), 0, False
    with noted(signal.SIGINT, signal.SIGTERM) as interrupts:
        launcher = launch()  # whatever comes from here on is passed on to it
        while not gone:
            gone = launcher.poll() is not None
            events, position = new_events(run_dir / "events.jsonl", position)
            for event in events:
                view.take(event)
            for line in view.lines:
                screen.print(line)
            view.lines.clear()
            screen.update(view)
            if passed_on < len(interrupts) and not gone:  # one in each turn: two at once would arrive as one
                passed_on += 1
                launcher.send_signal(signal.SIGTERM)
                last = passed_on > 1 or view.phase == "evaluate"  # there is nothing to finish and save then
                screen.print("stopping now" if last else f"{finishing(len(view.hosts))}; Ctrl-C again to stop now")
            time.sleep(0.2)
    if view.end is None and interrupts:
        screen.print(f"stopped at once; see what it has: multimac runs show {run_dir}")
        return ExitStatus.INTERRUPTED
    if view.end is None:
        raise RunError(
            f"the launcher ended without saying why (status {launcher.returncode})",
            remedy=f"See what it has and how to go on: multimac runs show {run_dir}. "
            f"Its output: {run_dir / 'launcher.log'}",
        )
    status = view.end.status
    if status not in (ExitStatus.OK, ExitStatus.INTERRUPTED):
        error = RunError(view.end.message, remedy=f"Everything that the hosts printed: {run_dir / 'launcher.log'}")
        error.exit_status = status
        raise error
    if view.end.message:
        screen.print(view.end.message)
    return status
