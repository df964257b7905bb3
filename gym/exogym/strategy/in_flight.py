"""An exchange that travels while the rank goes on (Kale et al., 2502.12996; Douillard et al., 2501.18512)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from exogym.comm.background import Background

T, W = TypeVar("T"), TypeVar("W")


class InFlight(Generic[T, W]):
    """What a rank has sent, and what comes of it.

    read: gives its weights as they are when the round ends [numel]. steps, trained: how far it is then.
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
        """reads_at_once: else in the background, while the rank computes what does not change them yet."""
        self._read, self._snapshot, self._reading = read, None, threading.Lock()
        self.steps, self.trained = steps, trained
        self.has_failed, self.seconds = False, 0.0  # that it travelled
        self._exchange, self._arrived, self._background = exchange, arrived, background
        self._outcome: T | None = None
        self._was_waited_for = False
        if reads_at_once:
            self.snapshot()
        background.put(self._run)

    def snapshot(self) -> Tensor:
        """The rank's weights when the round ended [numel]. Asked for before they change: who asks first reads them."""
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
        """Waits for it. Where ranks have to repeat the exchange: that of another one, made here from the snapshot.

        Afterwards nothing runs in the background. Raises PeerLost.
        """
        if self._was_waited_for:
            return self._exchange(self.snapshot())
        self._was_waited_for = True
        self._background.wait()
        outcome, self._outcome = self._outcome, None
        return outcome
