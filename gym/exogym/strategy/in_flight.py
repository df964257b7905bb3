"""An exchange that travels while the rank goes on (Kale et al., 2502.12996; Douillard et al., 2501.18512)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from exogym.comm.background import Background

T, W = TypeVar("T"), TypeVar("W")


class InFlight(Generic[T, W]):
    """What a rank has sent, and what comes of it.

    snapshot: its weights when the round ended [numel]. steps, trained: how far it was then.
    exchange: the collectives. They run in `background`, as `arrived` does after them, and may change nothing that the
    rank needs meanwhile.
    """

    def __init__(
        self,
        snapshot: Tensor,
        steps: int,
        trained: list[W],
        exchange: Callable[[], T],
        arrived: Callable[[T], None],
        background: Background,
    ):
        self.snapshot, self.steps, self.trained = snapshot, steps, trained
        self.has_failed, self.seconds = False, 0.0  # that it travelled
        self._exchange, self._arrived, self._background = exchange, arrived, background
        self._outcome: T | None = None
        self._was_waited_for = False
        background.put(self._run)

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self._outcome = self._exchange()
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
            return self._exchange()
        self._was_waited_for = True
        self._background.wait()
        outcome, self._outcome = self._outcome, None
        return outcome

    def change(self, common: Tensor) -> Tensor:
        """What the exchange adds to the weights that this rank has by now [numel]. Uses up the snapshot."""
        return torch.sub(common, self.snapshot, out=self.snapshot)
