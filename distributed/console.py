"""What the user sees of a run: events.jsonl as a live table on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from whisper_tuner.errors import ExitStatus, RunError
from whisper_tuner.interrupts import as_ctrl_c
from whisper_tuner.runs import is_running, read_events

LINE_EVERY_S = 10.0  # between plain lines about one host
RECENT_STEPS = 10
APART = (
    "cannot reach each other, though this machine reaches them: perhaps a firewall, or a Wi-Fi that keeps clients apart"
)


@dataclass
class HostView:
    """The latest of one host."""

    name: str
    state: str = "starting"
    step: int = 0
    total_steps: int = 0
    epoch: int = 0
    loss: float | None = None
    round: int = 0
    sent: int = 0
    memory: int = 0
    device: str = ""
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    printed_at: float = 0.0
    printed_step: int = 0

    def take(self, event: dict) -> None:
        kind = event["type"]
        if kind == "phase":
            self.state = {"load": "loading"}.get(event["phase"], event["phase"])
        elif kind == "start":
            self.state, self.total_steps, self.device = "training", event["total_steps"], event["device"]
        elif kind == "step":
            self.step, self.epoch = event["step"], event["epoch"] + 1
            self.loss = self.loss if event.get("loss") is None else event["loss"]
            self.sent += event.get("bytes") or 0
            self.memory = event.get("memory") or 0
            self.recent.append((event["seconds"], event["samples"]))
        elif kind == "round":
            self.round = event["round"]
        elif kind == "plan":
            self.total_steps = event["total_steps"]
        elif kind == "lost":
            self.state, self.recent = "given up" if event["given_up"] else "lost", deque(maxlen=RECENT_STEPS)
        elif kind == "back":
            self.state = "waiting"
        elif kind == "resume":
            self.step, self.round, self.epoch = event["step"], event["round"], event["epoch"] + 1
            self.printed_step = self.step
        elif kind == "done":
            self.state = "done"
        elif kind == "error":
            self.state = "failed"

    @property
    def speed(self) -> float | None:
        """Clips per second over the last steps."""
        seconds = sum(spent for spent, _ in self.recent)
        return sum(samples for _, samples in self.recent) / seconds if seconds else None

    @property
    def remaining(self) -> float | None:
        """Seconds to the end of training."""
        if not self.recent or self.state != "training":
            return None
        return (self.total_steps - self.step) * sum(spent for spent, _ in self.recent) / len(self.recent)


class RunView:
    """Follows one run; `lines` collects what is to be said once, above the table."""

    def __init__(self) -> None:
        self.hosts: dict[str, HostView] = {}
        self.lines: list[str] = []
        self.phase = "starting"
        self.progress = ""
        self.end: dict | None = None
        self._generation = 0
        self._resumed = False
        self._validated = 0

    def take(self, event: dict) -> None:
        kind, host = event["type"], event.get("host")
        if host is not None:
            self.hosts.setdefault(host, HostView(host)).take(event)
        if kind == "phase" and host is None:
            self.phase, self.end = event["phase"], None  # an end was that of an earlier attempt
            for name in event.get("hosts") or ():
                self.hosts.setdefault(name, HostView(name))
                self._resumed, self._validated = False, 0  # a launcher has just started
        elif kind == "lost":
            forever = " and not tried again" if event["given_up"] else ""
            self.lines.append(f"{host} is lost{forever}: {event['reason']}")
        elif kind == "generation":
            self._take_generation(event["number"], event["hosts"])
        elif kind == "paused":
            there = ", ".join(event["hosts"]) or "none"
            for name in event["hosts"]:
                self.hosts.setdefault(name, HostView(name)).state = "paused"
            self.lines.append(f"paused until {event['min_hosts']} hosts are there (min_hosts); now: {there}")
        elif kind == "orphaned":
            self.lines.append(f"waiting for {', '.join(event['hosts'])}, who may have the newest state")
        elif kind == "apart":
            self._take_apart(event["pairs"], event["hosts"])
        elif kind == "reached":
            self.lines.append(f"{named(event['pairs'])} reach each other again")
        elif kind == "validation" and event["step"] > self._validated:
            self._validated = event["step"]
            self.lines.append(f"step {event['step']}: validation loss {event['loss']:.3f}")
        elif kind == "problem":
            self.lines.append(f"{host or 'data'}: skipped: {event['what']}")
        elif kind == "warning":
            self.lines.append(f"{host}: {event['what']}")
        elif kind == "resume":
            self._take_resume(host, event)
        elif kind == "model":
            self.lines.append(f"model: {event['path']}")
        elif kind == "evaluating":
            self.progress = f"evaluating {event['model']}: {event['done']}/{event['total']} clips"
        elif kind == "evaluation":
            self.lines.append(f"WER {event['when']}: {event['wer']:.1f}")
        elif kind == "end":
            self.end = event

    def _take_generation(self, number: int, hosts: list[str]) -> None:
        for name in hosts:
            view = self.hosts.setdefault(name, HostView(name))
            view.state = "training" if view.total_steps else view.state
        self._generation = number
        if number > 1:
            self.lines.append(f"training goes on with {', '.join(hosts)}")

    def _take_apart(self, pairs: list[list[str]], waiting: list[str]) -> None:
        for name in waiting:
            self.hosts.setdefault(name, HostView(name)).state = "not reached"
        left_out = f"; left out until then: {', '.join(waiting)}" if waiting else ""
        self.lines.append(f"{named(pairs)} {APART}{left_out}")

    def _take_resume(self, host: str, event: dict) -> None:
        step, anew = event["step"], event.get("anew") and event["step"]
        if self._generation > 1:
            self.lines.append(f"{host} joins after step {step}{'; its inner optimizer starts anew' if anew else ''}")
            return
        if not self._resumed:
            self._resumed = True
            self.lines.append(f"goes on after step {step}" if step else "begins anew: no checkpoint")
        if anew:
            self.lines.append(f"{host}: its inner optimizer starts anew")

    def table(self) -> Table:
        table = Table(expand=False, header_style="bold", box=None, padding=(0, 1, 0, 0))
        for name in ("host", "epoch", "step", "loss", "clips/s", "round", "sent", "left", ""):
            table.add_column(name, justify="left" if name in ("host", "") else "right")
        for view in self.hosts.values():
            table.add_row(
                view.name.removesuffix(".local"),
                str(view.epoch or ""),
                f"{view.step}/{view.total_steps}" if view.total_steps else "",
                f"{view.loss:.3f}" if view.loss is not None else "",
                f"{view.speed:.1f}" if view.speed else "",
                str(view.round or ""),
                size(view.sent) if view.sent else "",
                duration(view.remaining),
                view.device if view.state == "training" else view.state,
            )
        if self.progress:
            table.caption = self.progress
        return table


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
def follow(run_dir: Path, launcher: subprocess.Popen | Attached, console: Console, *, position: int = 0) -> ExitStatus:
    """Show a run until it ends, its events from byte `position` on.

    Ctrl-C and SIGTERM are passed on to the launcher: once to stop in order, twice to stop now. As SIGTERM, because a
    launcher that was started in the background has SIGINT ignored until it is ready.

    Raises RunError if the launcher vanishes without a last word.
    """
    view, interrupts, gone = RunView(), 0, False
    live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
    if live:
        live.start()
    try:
        while not gone:
            try:
                gone = launcher.poll() is not None
                events, position = read_events(run_dir / "events.jsonl", position)
                for event in events:
                    view.take(event)
                _show(view, console, live)
                if gone and view.end is None and interrupts:
                    console.print(f"stopped at once; what it has: multimac runs show {run_dir.name}", soft_wrap=True)
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
                word = "stopping now" if last else "finishing the step, then saving; Ctrl-C again to stop now"
                console.print(word)
    finally:
        if live:
            live.stop()
    status = ExitStatus(view.end["status"])
    if status not in (ExitStatus.OK, ExitStatus.INTERRUPTED):
        error = RunError(view.end["message"], remedy=f"Everything that the hosts printed: {run_dir / 'launcher.log'}")
        error.exit_status = status
        raise error
    if view.end["message"]:
        console.print(view.end["message"], soft_wrap=True)
    return status


def _show(view: RunView, console: Console, live: Live | None) -> None:
    for line in view.lines:
        console.print(line, soft_wrap=True)
    view.lines.clear()
    if live:
        live.update(view.table())
        return
    now = time.monotonic()
    for host in view.hosts.values():
        if host.state == "training" and host.step > host.printed_step and now - host.printed_at >= LINE_EVERY_S:
            host.printed_at, host.printed_step = now, host.step
            loss = f"{host.loss:.3f}" if host.loss is not None else "-"
            left = f", {duration(host.remaining)} left" if host.remaining else ""
            console.print(
                f"{host.name}: epoch {host.epoch}, step {host.step}/{host.total_steps}, loss {loss}, "
                f"{host.speed or 0:.1f} clips/s, round {host.round}, sent {size(host.sent)}{left}",
                soft_wrap=True,
            )


def named(pairs: list[list[str]]) -> str:
    return ", ".join(f"{one} and {other}" for one, other in pairs)


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit in ("B", "kB") else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
