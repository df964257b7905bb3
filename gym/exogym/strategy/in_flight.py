"""An exchange that travels while the rank goes on (Kale et al., 2502.12996; Douillard et al., 2501.18512)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from exogym.comm.comm import Background
from exogym.flat import Weights
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, Outcome, Trained
from exogym.strategy.communication_module import Draft
from exogym.strategy.strategy import StepResult


class OverlappingStrategy(CommunicateOptimizeStrategy):
    """After `begin_exchange` a rank goes on with the next round; `exchange` then waits for what was begun.

    What a rank has trained meanwhile is added to the weights that all agree on.
    """

    def _start(self, flat: Any) -> None:
        super()._start(flat)
        self._flight: InFlight | None = None
        self._background: Background | None = None

    def close(self) -> None:
        self._room = None
        if self._background:
            self._background.close()

    def local_step(self, weight: float, samples: int) -> StepResult:
        if self._flight:
            self._flight.snapshot()  # before the weights change
        return super().local_step(weight, samples)

    def begin_exchange(self, arrived: Callable[[Outcome], None]) -> None:
        room, trained, modules = self._room, list(self._trained), self._prepare_modules()
        buffers = self.parameters.read_buffers()  # which a forward pass may change, and mostly nothing else
        self._room = None
        self._background = self._background or self.comm.background()

        def read() -> Weights:
            for module in modules:
                module.begin()
            weights: Weights = self._read(room, buffers=buffers)
            return weights

        def exchange(snapshot: Weights) -> Outcome:
            return self._exchange(Draft(self.parameters, snapshot), trained, stopping=False)

        self._flight = InFlight(
            read,
            self.steps,
            trained,
            exchange,
            arrived,
            self._background,
            # An accelerator's queue is for one thread.
            reads_at_once=self.passes_change_weights or not self.parameters.is_on_cpu,
        )

    @property
    def exchange_has_failed(self) -> bool:
        return self._flight is not None and self._flight.has_failed

    def exchange(self, stopping: bool) -> Outcome:
        return self._flight.outcome() if self._flight else super().exchange(stopping)

    def apply(self, exchanged: Outcome, local: StepResult) -> StepResult:
        travelled = self._flight.seconds if self._flight else None
        return replace(super().apply(exchanged, local), seconds_travelling=travelled)

    def _take_on(self, exchanged: Outcome) -> tuple[int, list[Trained]]:
        flight, self._flight = self._flight, None
        if flight is None:
            return super()._take_on(exchanged)
        if exchanged.skipped:  # nothing of this rank counted, and what it has trained since is no better
            exchanged.draft.write()
        else:
            self.parameters.move(self._common, since=flight.snapshot())
        self._room = flight.snapshot()
        return flight.steps, flight.trained

    def load_agreed_state(self, state: dict[str, Any]) -> None:
        if self._flight:
            self._flight.snapshot()  # nothing of it is read any more
        super().load_agreed_state(state)
        self._flight = None


class InFlight:
    """One exchange that runs in the background, and its outcome.

    read: gives the rank's weights as they are when the round ends. steps, trained: how far it is then.
    exchange: the collectives, given those weights. They run in `background`, as `arrived` does after them, and may
    change nothing that the rank needs meanwhile.
    """

    def __init__(
        self,
        read: Callable[[], Weights],
        steps: int,
        trained: list[Trained],
        exchange: Callable[[Weights], Outcome],
        arrived: Callable[[Outcome], None],
        background: Background,
        *,
        reads_at_once: bool,
    ):
        """Begin. Unless reads_at_once, weights are read in the background, while the rank computes without changing
        them.
        """
        self._read, self._reading = read, threading.Lock()
        self._snapshot: Weights | None = None
        self.steps, self.trained = steps, trained
        self.has_failed, self.seconds = False, 0.0  # that the exchange took
        self._exchange, self._arrived, self._background = exchange, arrived, background
        self._outcome: Outcome | None = None
        self._was_waited_for = False
        if reads_at_once:
            self.snapshot()
        background.put(self._run)

    def snapshot(self) -> Weights:
        """Return the rank's weights when the round ended. Must be called first before they change."""
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

    def outcome(self) -> Outcome:
        """Wait for the exchange and return its outcome; the next time, make it again here from the same weights.

        Afterwards nothing runs in the background. Raises PeerLost.
        """
        if self._was_waited_for:
            return self._exchange(self.snapshot())
        self._was_waited_for = True
        self._background.wait()
        outcome, self._outcome = self._outcome, None
        assert outcome is not None, "the background has run all, or has raised"
        return outcome
