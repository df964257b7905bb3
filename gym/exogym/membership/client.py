"""A member's side: what the coordinator has told it, how long it has waited for others, and who does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from exogym.errors import PeerLost
from exogym.membership import Generation

# Over a slow link that is full an answer may be so late, as signs of life may be.
UNREACHED_S = 6.0


class CoordinatorClient:
    """Keeps what the coordinator has told a member. A thread that listens calls `put`, the one that trains all else."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._generation: Generation | None = None
        self._commits: dict[tuple[int, int], bool] = {}
        self._round_ends: dict[tuple[int, int], bool] = {}
        self._told: dict[str, str] = {}  # of the newest generation's store, by key
        self._excluded = False

    def put(self, message: dict[str, Any]) -> None:
        with self._news:
            if message["type"] == "generation":
                self._generation, self._excluded = Generation.of(message), False
                self._told = {}
            elif message["type"] == "excluded":
                self._excluded = True
            elif message["type"] == "told":
                if self._generation and self._generation.number == message["generation"]:
                    self._told[message["key"]] = message["value"]
            elif message["type"] == "commit":
                self._commits = {(message["generation"], message["vote"]): message["regroup"]}
            elif message["type"] == "round_end":
                self._round_ends = {(message["generation"], message["round"]): message["stop"]}
            self._news.notify_all()

    def is_superseded(self, number: int) -> bool:
        """Say whether there is a later generation than `number`."""
        return self._generation is not None and self._generation.number > number

    def is_left_behind(self, number: int) -> bool:
        """Say whether the others have begun another round than the one of generation `number`."""
        newest = self._generation
        return self._excluded or (newest is not None and newest.number > number and not newest.continues_round)

    def next_generation(self, after: int) -> Generation:
        """Wait for a generation that is later than number `after`, and return the newest."""
        with self._news:
            self._news.wait_for(lambda: self.is_superseded(after) and not self._excluded)
            assert self._generation is not None
            return self._generation

    def wait_for_told(self, number: int, key: str, seconds: float) -> str:
        """Return what another member of generation `number` has set. Raises PeerLost if that is over, or late."""
        with self._news:
            self._news.wait_for(lambda: self.is_superseded(number) or key in self._told, seconds)
            if self.is_superseded(number) or key not in self._told:
                raise PeerLost(f"not all members of generation {number} came within {seconds:g} s")
            return self._told[key]

    def wait_for_commit(self, number: int, vote: int) -> bool | None:
        """Return whether members are to regroup after a vote that counts; None if the generation is over first."""
        with self._news:
            self._news.wait_for(lambda: (number, vote) in self._commits or self.is_superseded(number))
            return self._commits.get((number, vote))

    def wait_for_round_end(self, number: int, round_number: int) -> bool | None:
        """Return whether a round is cut short; None if the generation is over."""
        asked = (number, round_number)
        with self._news:
            self._news.wait_for(lambda: asked in self._round_ends or self.is_superseded(number))
            return self._round_ends.get(asked)


class Wait:
    """Measures how long a rank has been waiting for others. The thread that trains writes it, another one reads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.Lock()
        self._generation = 0
        self._since: float | None = None

    def begins(self, generation: int) -> None:
        """Begin to wait, or go on in another generation: only what comes of it ends a wait."""
        with self._lock:
            self._generation = generation
            if self._since is None:
                self._since = self._clock()

    def ends(self) -> None:
        with self._lock:
            self._since = None

    @contextmanager
    def of(self, generation: int) -> Iterator[None]:
        """Wait until the others have done their part; an exception says that they have not."""
        self.begins(generation)
        yield
        self.ends()

    def read(self) -> tuple[int, float]:
        """Return the generation, and the seconds: 0 for a rank that does not wait."""
        with self._lock:
            return self._generation, 0.0 if self._since is None else self._clock() - self._since


class Unanswered:
    """Adds up how long peers have been asked in vain.

    It adds up turns and asks no clock: if this process was asleep, it was not the others who were silent.
    """

    def __init__(self) -> None:
        self._seconds: dict[Any, float] = {}

    def turn(self, asked: Iterable[Any], passed: float) -> None:
        """These are being asked, and were in the last `passed` seconds if they were at the last turn."""
        before = self._seconds
        self._seconds = {peer: before[peer] + passed if peer in before else 0.0 for peer in asked}

    def answered(self, peer: object) -> None:
        if peer in self._seconds:
            self._seconds[peer] = 0.0

    def unreached(self) -> set[Any]:
        return {peer for peer, seconds in self._seconds.items() if seconds >= UNREACHED_S}
