"""Tells the user, who may not look at the run, of its end, of a host that stays away, and of a problem.

`notify` of config.ini says how: by a notification of the desktop, or by a command of the user's own. All of it happens
in a thread on the user's machine: the run waits for none of it.
"""

from __future__ import annotations

import html
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distributed.checkup.programs import is_macos
from distributed.run_dir.events import event_of
from distributed.run_dir.log import EventLog
from whisper_tuner.errors import ExitStatus
from whisper_tuner.text import harmless

DESKTOP = "desktop"
END, LOST, PROBLEM = "end", "lost", "problem"
AWAY_S = 60.0  # of a host or a pause, before it is told: lids are closed and opened, routers start anew
SOON_S = 15.0  # what is due within so long is told along: hosts are lost together
LIMIT_S = 20.0  # for what tells it
KILLED_S = 3.0  # until a command that took longer is gone
LONGEST = 300  # characters
DISPLAY = ["on run argv", "display notification (item 2 of argv) with title (item 1 of argv)", "end run"]
OSASCRIPT = ["/usr/bin/osascript", *(part for line in DISPLAY for part in ("-e", line))]
RELATED = {"evaluation", "lost", "back", "away", "paused", "generation", "end"}


@dataclass(frozen=True)
class Message:
    kind: str
    text: str


class Watch:
    """Decides what of a run's events is told, and when."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[float, Message]] = {}  # when it is told, if it has not passed by then
        self._rates: dict[str, str] = {}  # of each test set

    def take(self, written: dict, now: float) -> Message | None:
        """Note an event; return what is to be told of it at once."""
        event = event_of({"time": now, **written})
        if event is None or event.type not in RELATED:
            return None
        host, line = event.host or "", event.line
        if event.type == "evaluation":
            self._rates[event.kept] = line.splitlines()[-1]
        elif event.type in ("lost", "paused"):
            message = Message(LOST if event.type == "lost" else PROBLEM, line)
            if event.given_up:
                self._open.pop(host, None)
                return message
            self._open.setdefault(host, (now + AWAY_S, message))
        elif event.type == "end":
            self._open.clear()
            if event.status not in (ExitStatus.OK, ExitStatus.INTERRUPTED):
                return Message(PROBLEM, f"has failed: {event.message}")
            ended = "has ended" if event.status == ExitStatus.OK else "was stopped"
            return Message(END, ", ".join([ended, *self._rates.values()]))
        else:  # a host is back, or goes because it was asked to; or the pause, which is about no host, is over
            self._open.pop(host, None)
        return None

    @property
    def next_s(self) -> float | None:
        """The moment at which something is due."""
        return min((due for due, _ in self._open.values()), default=None)

    def due(self, now: float) -> Message | None:
        """Return what is due now, in one message."""
        if self.next_s is None or now < self.next_s:
            return None
        names = [name for name, (due, _) in self._open.items() if due <= now + SOON_S]
        messages = [self._open.pop(name)[1] for name in names]
        kinds = {message.kind for message in messages}
        return Message(LOST if LOST in kinds else PROBLEM, "; ".join(_first_line(each.text) for each in messages))


class Notifier:
    """Writes events as an EventLog does, and tells the user of some. What fails of that is one warning in the run."""

    def __init__(self, log: EventLog, how: str, run: str):
        self._log, self._how, self._run = log, how, run
        self._events: queue.SimpleQueue[dict | Message | None] = queue.SimpleQueue()
        self._failed = missing(how)
        self._has_warned = self._was_full = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def __call__(self, event: dict) -> None:
        self._log(event)
        if event["type"] in RELATED:
            self._events.put(event)
        if self._log.was_full and not self._was_full:
            self._events.put(Message(PROBLEM, "the disk of the run's folder is full, or takes nothing"))
        self._was_full = self._log.was_full
        self._warn()

    def close(self) -> None:
        """Wait until the end has been told, and what was on its way before it."""
        self._events.put(None)
        self._thread.join(2 * LIMIT_S + KILLED_S)
        self._warn()

    def _warn(self) -> None:
        if self._failed and not self._has_warned:
            self._has_warned = True
            self._log({"type": "warning", "what": f"notify: {self._failed}"})

    def _work(self) -> None:
        for message in self._messages():
            text = harmless(f"{self._run}: {_first_line(message.text)}")[:LONGEST]
            self._failed = tell(self._how, message.kind, self._run, text) or self._failed

    def _messages(self) -> Iterator[Message]:
        watch = Watch()
        while True:
            now = time.monotonic()
            left = None if watch.next_s is None else max(0.0, watch.next_s - now)
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                message = watch.due(time.monotonic())
            else:
                if event is None:
                    return
                message = event if isinstance(event, Message) else watch.take(event, time.monotonic())
            if message:
                yield message


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0]


def missing(how: str) -> str:
    """Say what is not there to tell it by, before it is needed; "" if all is."""
    program = command_of(how, "")[0]
    return "" if shutil.which(program) else f"{program} is not on this machine"


def command_of(how: str, text: str) -> Sequence[str]:
    """Return the command: the text is an argument of it, and no part of a script."""
    if how != DESKTOP:
        return ["/bin/sh", "-c", f'{how} "$@"', "multimac", text]
    if is_macos():
        return [*OSASCRIPT, "multimac", text]
    return ["notify-send", "--app-name=multimac", "--", "multimac", html.escape(text, quote=False)]  # it takes markup


def tell(how: str, kind: str, run: str, text: str) -> str:
    """Run the command to its end; what it prints goes to launcher.log. Returns how it failed, without naming it."""
    about = {"MULTIMAC_EVENT": kind, "MULTIMAC_RUN": run, "MULTIMAC_MESSAGE": text}
    try:
        process = subprocess.Popen(
            command_of(how, text), stdin=subprocess.DEVNULL, env={**os.environ, **about}, start_new_session=True
        )
    except (OSError, ValueError) as error:
        return f"it could not be started: {getattr(error, 'strerror', None) or error}"
    try:
        status = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"it took over {LIMIT_S:.0f} s"
    return f"it ended with status {status}; see launcher.log" if status else ""
