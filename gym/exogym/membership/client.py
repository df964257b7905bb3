"""A member's end of what the coordinator says."""

from __future__ import annotations

import threading
from typing import Any

from exogym.membership.messages import Generation


class Mailbox:
    """What the roster has told one member; filled by a thread that listens, read by the one that trains."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._generation: Generation | None = None
        self._commits: dict[tuple[int, int], bool] = {}
        self._out = False

    def put(self, message: dict[str, Any]) -> None:
        with self._news:
            if message["type"] == "generation":
                self._generation, self._out = Generation.of(message), False
            elif message["type"] == "out":
                self._out = True
            elif message["type"] == "commit":
                self._commits = {(message["generation"], message["vote"]): message["regroup"]}
            self._news.notify_all()

    def superseded(self, number: int) -> bool:
        """Whether there is a later generation than `number`."""
        return self._generation is not None and self._generation.number > number

    def is_called_anew(self, number: int) -> bool:
        """Whether the newest generation is later than `number` and begins a round, or one is to be waited for."""
        return self._out or (self.superseded(number) and not self._generation.amid_round)

    def next_generation(self, after: int) -> Generation:
        """The newest one, once it is later than number `after`."""
        with self._news:
            self._news.wait_for(lambda: self.superseded(after) and not self._out)
            return self._generation

    def wait_for_commit(self, number: int, vote: int) -> bool | None:
        """True or False: it counts, and members are to regroup or not. None: it does not, the generation is over."""
        with self._news:
            self._news.wait_for(lambda: (number, vote) in self._commits or self.superseded(number))
            return self._commits.get((number, vote))
