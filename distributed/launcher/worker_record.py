"""One worker as the launcher sees it: its process, which may be one after another, and the way to its host."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field

from distributed.control.channel import LAUNCHER_GONE
from distributed.control.endpoint import Endpoint
from whisper_tuner.errors import HostError

from .audio_push import AudioPush
from .liveness import Liveness
from .spawner import Spawner, WorkerProcess

TAIL_LINES = 20


@dataclass
class Worker:
    """One host's worker. Only the thread of the worker group reads and writes it."""

    spawner: Spawner
    liveness: Liveness = field(default_factory=Liveness)
    had_process: bool = False
    process: WorkerProcess | None = None
    audio: AudioPush | None = None  # of this process
    beats: int = 0  # heartbeats that were sent to this process
    first_beat: int = 0  # of those that one which is heard again may acknowledge
    silent_for: float | None = None  # seconds after which it was lost, if that was why
    is_busy_link: bool = False  # it exchanges weights with others
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    error: dict | None = None
    status: int | None = None
    listens: Endpoint | None = None  # where the others can try whether they reach it
    hello: dict | None = None  # what it said of itself: pid, system, hash of the code that it loaded
    is_known: bool = False  # the coordinator has been told of this process
    lost_for: str = ""  # why, the last time
    unreached: str = ""  # why its host could not be reached, the last time

    @property
    def name(self) -> str:
        return self.spawner.name

    def begin(self, process: WorkerProcess, audio: AudioPush) -> None:
        """Another process: nothing of the one before holds."""
        self.process, self.audio, self.had_process = process, audio, True
        self.beats = self.first_beat = 0
        self.is_busy_link = self.is_known = False
        self.error = self.status = self.listens = self.hello = None
        self.unreached = ""
        self.tail.clear()

    def tell(self, line: str) -> None:
        """Write a line to it; nothing if it is gone."""
        if self.process:
            with contextlib.suppress(HostError):  # what has to arrive is kept, and repeated over the next connection
                self.process.write(f"{line}\n".encode())

    def beat(self) -> None:
        self.beats += 1
        self.tell(f"beat {self.beats}")

    def describe_failure(self) -> str:
        """Why it has ended."""
        if self.error:
            return str(self.error.get("message"))
        if self.status is None:
            reason = "the worker ended, for a reason that nobody saw"
        elif self.status < 0 or self.status >= 128:
            number = -self.status if self.status < 0 else self.status - 128
            reason = f"the worker was killed by {f'signal {number}' if number else 'a signal'}"
            if number in (0, 9):
                reason += " (most often by a system that has run out of memory)"
        elif self.status == LAUNCHER_GONE:
            return "it had lost the master, and ended by itself"
        else:
            reason = f"the worker ended with status {self.status}"
        last = "\n".join(f"  {self.name}: {line}" for line in self.tail)
        return f"{reason}; its last lines:\n{last}" if last else f"{reason}, and printed nothing"
