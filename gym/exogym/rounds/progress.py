"""What a rank tells of its work, and how fast it is."""

from __future__ import annotations

from dataclasses import fields
from math import isfinite
from typing import Any

import torch

from exogym import device as devices
from exogym.comm.comm import Comm
from exogym.errors import NotFinite
from exogym.logger.event import Events, plain
from exogym.micro_batches import StepWork
from exogym.settings import LoopSettings
from exogym.state.node_state import NodeState
from exogym.strategy.strategy import StepResult

MOST_SKIPPED = 5  # steps in a row without a finite loss or gradient, before the run ends
NAMED = 8  # clips at most in a message


class Progress:
    """Emits events with the rank, and with the epoch and step that this rank has reached."""

    def __init__(self, events: Events, comm: Comm, state: NodeState):
        self._events, self._comm, self._state = events, comm, state
        self.epoch = 0  # of the last step

    @property
    def rank(self) -> int:
        return self._comm.rank

    @property
    def step(self) -> int:
        return self._state.now.step

    def emit(self, kind: str, **values: Any) -> None:
        self._events({"type": kind, "rank": self.rank, "epoch": self.epoch, "step": self.step, **values})

    def start(self, device: torch.device, settings: LoopSettings) -> None:
        state, strategy = self._state, self._state.strategy
        known = {f.name: plain(getattr(settings, f.name)) for f in fields(settings) if f.name != "strategy"}
        self._events(
            {
                "type": "start",
                "rank": self.rank,
                "steps_per_epoch": state.sampler.steps_per_epoch,
                "total_steps": state.total_steps,
                "trainable": strategy.parameters.num_parameters,
                "device": str(device),
                "num_nodes": self._comm.world_size,
                "steps_in_round": getattr(strategy.config, "steps_in_round", 1),
                "strategy": {"name": type(strategy).__name__, **(plain(strategy.config) or {})},
                "settings": known,
            }
        )

    def step_made(
        self,
        result: StepResult,
        work: StepWork,
        *,
        seconds: float,
        waiting: float,
        device: torch.device,
    ) -> None:
        """Tell of a step. waiting: seconds for its batches, before these `seconds`."""
        norm = result.grad_norm
        spent = {}
        if result.agreed and result.round is None:  # a round tells its own
            spent = {"seconds_communicating": result.seconds_communicating}
        self.emit(
            "step",
            loss=work.loss.value(),
            lr=result.lr,
            tokens=work.loss.weight,
            samples=work.samples,
            seconds=seconds,
            seconds_waiting=waiting,
            grad_norm=norm if norm is not None and isfinite(norm) else None,
            bytes=result.bytes,
            memory=devices.memory_in_use(device),
            seconds_exchanging=result.seconds_communicating,
            **spent,
        )

    def round_ended(self, result: StepResult) -> None:
        if not result.stop and result.round is None:
            return
        travelled = {} if result.seconds_travelling is None else {"seconds_travelling": result.seconds_travelling}
        self.emit(
            "stop" if result.stop else "round",
            round=result.round,
            digest=result.digest,
            bytes=result.bytes,
            seconds=result.seconds_communicating,
            **({} if result.stop else travelled),
        )

    def planned(self) -> None:
        self.emit("plan", total_steps=self._state.total_steps, hosts=self._comm.world_size)


class NonFiniteGuard:
    """Tells of steps without a finite loss or gradient, and counts them."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._skipped = self._in_a_row = 0

    def check(self, result: StepResult, work: StepWork) -> None:
        """Tell of a step that is left out. Raises NotFinite once there were too many in a row."""
        if not work.not_finite and not result.skipped:
            self._in_a_row = 0 if work.loss.weight else self._in_a_row
            return
        what, *clips = work.not_finite or [result.skipped, *work.ids]
        names = f" ({', '.join(clips[:NAMED])}{' ...' if len(clips) > NAMED else ''})" if clips else ""
        nothing_counted = bool(result.skipped) or not work.loss.weight
        self._skipped += 1
        self._in_a_row = self._in_a_row + 1 if nothing_counted else 0
        told = f"{what} at step {self._progress.step} of rank {self._progress.rank}{names}"
        if self._in_a_row >= MOST_SKIPPED:
            remedy = "a smaller learning rate or max_norm may help, or other clips"
            raise NotFinite(f"{told}, as in the {MOST_SKIPPED - 1} steps before; {remedy}")
        self._progress.emit("warning", what=f"{told}: left out", skipped=self._skipped)
