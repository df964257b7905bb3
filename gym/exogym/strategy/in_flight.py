"""An exchange that travels while the rank goes on (Kale et al., 2502.12996; Douillard et al., 2501.18512)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from exogym.comm.comm import Background

T, W = TypeVar("T"), TypeVar("W")


class InFlight(Generic[T, W]):
    """One exchange that runs in the background, and its outcome.

    read: gives the rank's weights as they are when the round ends [numel]. steps, trained: how far it is then.
    exchange: the collectives, given those weights. They run in `background`, as `arrived` does after them, and may
    change nothing that the rank needs meanwhile.
    """

    def __init__(
        self,
        read: Callable[[], Tensor],
        steps: int,
        trained: list[W],
        exchange: Callable[[Tensor], T],
        arrived: Callable[[T], None],
        background: Background,
        *,
        reads_at_once: bool,
    ):
        """Begin. Unless reads_at_once, weights are read in the background, while the rank computes without changing
        them.
        """
        self._read, self._snapshot, self._reading = read, None, threading.Lock()
        self.steps, self.trained = steps, trained
        self.has_failed, self.seconds = False, 0.0  # that the exchange took
        self._exchange, self._arrived, self._background = exchange, arrived, background
        self._outcome: T | None = None
        self._was_waited_for = False
        if reads_at_once:
            self.snapshot()
        background.put(self._run)

    def snapshot(self) -> Tensor:
        """Return the rank's weights when the round ended [numel]. Must be called first before they change."""
        with self._reading:
            if self._snapshot is None:
                self._snapshot = self._read()
        return self._snapshot

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self._outcome = self._exchange(self.snapshot())
            self._arrived(self._outcome)
        except BaseException:
            self.has_failed = True
            raise
        self.seconds = time.perf_counter() - started

    def outcome(self) -> T:
        """Wait for the exchange and return its outcome; the next time, make it again here from the same weights.

        Afterwards nothing runs in the background. Raises PeerLost.
        """
        if self._was_waited_for:
            return self._exchange(self.snapshot())
        self._was_waited_for = True
        self._background.wait()
        outcome, self._outcome = self._outcome, None
        return outcome
