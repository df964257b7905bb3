"""One worker as the launcher sees it: its process, which may be one after another, and the way to its host."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from distributed.control.channel import LAUNCHER_GONE
from distributed.control.endpoint import Endpoint
from distributed.control.relay import END_UNSEEN
from distributed.ssh.machine import Process
from whisper_tuner.errors import HostError

TAIL_LINES = 20


class Post(Protocol):
    """How to get a worker for one host."""

    name: str
    rank: int

    def start(self, *, again: bool, may_replace: Callable[[bool], bool]) -> Process:
        """Connect, start, hand over the spec. Raises HostError, DataError.

        again: in place of one that was lost. Once its host is reached that one may be heard again; whether it is to be
        replaced says `may_replace(is it there)`.
        """

    def send(self, files: Sequence[str], wanted: Callable[[], bool]) -> Iterator[tuple[int, list[str]]]:
        """Bring files of the run to the host, a few at a time, in this order and as long as they are wanted.

        Yields how many are done with each time, and which of these cannot be sent. Raises HostError, RunError.
        """

    def fetch(self, folder: str) -> None:
        """Copy a folder of the run's folder there to the one here. Raises HostError."""


@dataclass
class Worker:
    """One host's worker, and what became of the ones before it."""

    post: Post
    process: Process | None = None
    life: int = 0  # of the process: lines of an earlier one are not listened to
    attempt: int = 0  # the start that is going on; 0 if none is
    unheard_s: float = 0.0
    exchanging: bool = False  # weights with others, so that its link may be full
    silent_for: float = 0.0  # seconds after which it was lost
    replaced_from: float = 0.0  # when a silent one may be killed
    last_moved: float = field(default_factory=time.monotonic)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    error: dict | None = None
    status: int | None = None
    listens: Endpoint | None = None  # where the others can try whether they reach it
    hello: dict | None = None  # what it said of itself: pid, system, hash of the code that it loaded
    ready: bool = False
    fresh: bool = True  # the roster has not been told of this process
    silent: bool = False  # lost for that; there again once it hears as well, which after an outage can take TCP longer
    told: int = 0  # lines that were written to it
    deaf_until: int | None = None  # of these, how many a silent one that is heard again has to have heard
    heard_until: float = 0.0  # when the time for that is over
    failures: int = 0
    next_try: float = 0.0
    tries: int = 0
    tried_at: float = 0.0
    given_up: bool = False
    steps: int = 0
    lost_for: str = ""  # why, the last time
    unreached: str = ""  # why, the last time
    delivering: threading.Lock = field(default_factory=threading.Lock)
    telling: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        return self.post.name

    @property
    def alive(self) -> bool:
        """Whether there is a process that was heard lately."""
        return self.process is not None and self.status is None and not self.silent

    def tell(self, line: str) -> None:
        """Write a line to it, from any thread; nothing if it is gone."""
        with self.telling:
            if self.process and self.status is None:
                with contextlib.suppress(HostError):
                    self.told += 1
                    self.process.write(f"{line}\n".encode())

    def describe_failure(self) -> str:
        if self.silent:
            return f"nothing heard for {self.silent_for:.0f} s: asleep, or its network is gone"
        if self.error:
            return str(self.error.get("message"))
        if self.status == 255:
            reason = "the SSH connection was lost"
        elif self.status < 0 or self.status >= 128:
            number = -self.status if self.status < 0 else self.status - 128
            reason = f"the worker was killed by {f'signal {number}' if number else 'a signal'}"
            if number in (0, 9):
                reason += " (most often by a system that has run out of memory)"
        elif self.status == LAUNCHER_GONE:
            return "it had lost the master, and ended by itself"
        elif self.status == END_UNSEEN:
            reason = "the worker ended, for a reason that nobody saw"
        else:
            reason = f"the worker ended with status {self.status}"
        last = "\n".join(f"  {self.name}: {line}" for line in self.tail)
        return f"{reason}; its last lines:\n{last}" if last else f"{reason}, and printed nothing"
