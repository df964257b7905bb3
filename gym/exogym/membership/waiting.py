"""A member's side of reachability: for how long it has waited for others, and who of them does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

# Over a slow link that is full an answer may be so late, as signs of life may be.
UNREACHED_S = 6.0


class Wait:
    """For how long a rank has been waiting for others. The thread that trains writes it, another one reads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.Lock()
        self._generation = 0
        self._since: float | None = None

    def begins(self, generation: int) -> None:
        """Or goes on, in another generation: only what comes of it ends a wait."""
        with self._lock:
            self._generation = generation
            if self._since is None:
                self._since = self._clock()

    def ends(self) -> None:
        with self._lock:
            self._since = None

    @contextmanager
    def of(self, generation: int) -> Iterator[None]:
        """Until the others have done their part; an exception says that they have not."""
        self.begins(generation)
        yield
        self.ends()

    def read(self) -> tuple[int, float]:
        """The generation, and the seconds: 0 for one that does not wait."""
        with self._lock:
            return self._generation, 0.0 if self._since is None else self._clock() - self._since


class Unanswered:
    """For how long peers have been asked in vain.

    Adds up turns and asks no clock: if this process was asleep, it was not the others who were silent.
    """

    def __init__(self) -> None:
        self._seconds: dict[object, float] = {}

    def turn(self, asked: Iterable, passed: float) -> None:
        """These are being asked, and were in the last `passed` seconds if they were at the last turn."""
        before = self._seconds
        self._seconds = {peer: before[peer] + passed if peer in before else 0.0 for peer in asked}

    def answered(self, peer: object) -> None:
        if peer in self._seconds:
            self._seconds[peer] = 0.0

    def unreached(self) -> set:
        return {peer for peer, seconds in self._seconds.items() if seconds >= UNREACHED_S}
