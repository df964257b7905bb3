"""What ranks tell of their work: steps and rounds, what is left out, and the loss on data that are not trained on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from exogym import device as devices
from exogym.comm.comm import Comm
from exogym.errors import NotFinite
from exogym.logger.event import Events, Mean, plain
from exogym.membership import VALIDATION
from exogym.micro_batches import Forward, StepWork
from exogym.samplers.batches import BatchSource
from exogym.samplers.elastic import sampler_of
from exogym.settings import LoopSettings
from exogym.state.node_state import NodeState
from exogym.state.state_sync import common_weights
from exogym.strategy.strategy import StepResult

MOST_SKIPPED = 5  # steps in a row without a finite loss or gradient, before the run ends
NAMED = 8  # clips at most in a message


class Progress:
    """Emits events with the rank, and with the epoch and step that this rank has reached."""

    def __init__(self, events: Events, comm: Comm, state: NodeState):
        self._events, self._comm, self._state = events, comm, state
        self.epoch = 0  # of the last step
        self._skipped = self._in_a_row = 0  # steps without a finite loss or gradient

    def emit(self, kind: str, **values: Any) -> None:
        where = {"rank": self._comm.rank, "epoch": self.epoch, "step": self._state.now.step}
        self._events({"type": kind, **where, **values})

    def start(self, device: torch.device, settings: LoopSettings) -> None:
        state, strategy = self._state, self._state.strategy
        known = {f.name: plain(getattr(settings, f.name)) for f in fields(settings) if f.name != "strategy"}
        self._events(
            {
                "type": "start",
                "rank": self._comm.rank,
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
        self, result: StepResult, work: StepWork, *, seconds: float, waiting: float, device: torch.device
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

    def resumed(self, **how: bool) -> None:
        """Tell where this rank goes on. A `commit` of more `agreements` than these is void: its clips come again."""
        now, agreements = self._state.now, self._state.strategy.agreements
        self.epoch = now.epoch
        self.emit("resume", round=now.rounds, agreements=agreements, **how)

    def planned(self) -> None:
        self.emit("plan", total_steps=self._state.total_steps, hosts=self._comm.world_size)

    def check_finite(self, result: StepResult, work: StepWork) -> None:
        """Tell of a step that is left out. Raises NotFinite once there were too many in a row."""
        if not work.not_finite and not result.skipped:
            self._in_a_row = 0 if work.loss.weight else self._in_a_row
            return
        what, *clips = work.not_finite or [result.skipped, *work.ids]
        names = f" ({', '.join(clips[:NAMED])}{' ...' if len(clips) > NAMED else ''})" if clips else ""
        nothing_counted = bool(result.skipped) or not work.loss.weight
        self._skipped += 1
        self._in_a_row = self._in_a_row + 1 if nothing_counted else 0
        told = f"{what} at step {self._state.now.step} of rank {self._comm.rank}{names}"
        if self._in_a_row >= MOST_SKIPPED:
            remedy = "a smaller learning rate or max_norm may help, or other clips"
            raise NotFinite(f"{told}, as in the {MOST_SKIPPED - 1} steps before; {remedy}")
        self.emit("warning", what=f"{told}: left out", skipped=self._skipped)


Score = Callable[[Any], tuple[float, float]]
"""Of a batch: (sum, weight) of a figure that is to be low, as word errors and words."""


class Validation:
    """Measures the loss on validation data; does nothing without them.

    score: by whose mean over all batches, in place of the loss, the best validation is found.
    """

    def __init__(
        self,
        source: BatchSource | None,
        model: nn.Module,
        forward: Forward,
        comm: Comm,
        state: NodeState,
        progress: Progress,
        *,
        keep_best: bool = False,
        score: Score | None = None,
    ):
        self._sampler = None if source is None else sampler_of(source, comm.members)
        self._model, self.forward = model, forward
        self._comm, self._state, self._progress = comm, state, progress
        self._keep_best, self._score = keep_best, score

    def follow(self) -> None:
        """Share the data among the present members."""
        if self._sampler:
            self._sampler.follow(self._comm.members)

    def run(self) -> None:
        """Validate, and tell the loss.

        Where ranks differ it is that of the mean of their weights, and `local_loss` is the mean of their own losses.
        """
        if not self._sampler:
            return
        began, state, parameters = time.monotonic(), self._state, self._state.strategy.parameters
        found, told, mean = self._agreed(self._sums), {}, None
        if state.strategy.differs:
            own = parameters.read()
            if (mean := common_weights(self._comm, state, own)) is not None:
                told["local_loss"] = found.loss
                found = self._loss_of(mean, own)
        figures, best = [found.loss], [state.now.best_loss]
        if self._score:  # of two that are alike, the one with the lower loss
            figures, best = [found.score, found.loss], [state.now.best_score, state.now.best_loss]
        is_first = None in best or (self._keep_best and state.best_weights is None)
        is_best = None not in figures and (is_first or figures < best)
        kept = None
        if is_best and self._keep_best:  # the weights that were validated, the same on all ranks to the last bit
            kept = mean
            if kept is None:  # machines may round differently
                own = parameters.read()
                common = common_weights(self._comm, state, own)
                kept = own if common is None else common
        state.validated(found.loss, found.score, is_best=is_best, weights=kept)
        if self._score:
            told["seconds"] = time.monotonic() - began
        told |= {name: value for name in ("accuracy", "score") if (value := getattr(found, name)) is not None}
        self._progress.emit("validation", loss=found.loss, **told)

    def _agreed(self, sums: Callable[[], Tensor]) -> Found:
        return Found(
            *(Mean(total, weight).value() for total, weight in self._comm.commit_together(VALIDATION, sums).tolist())
        )

    def _loss_of(self, mean: Tensor, own: Tensor) -> Found:
        """Validate weights `mean` [numel]; the model then has its `own` again."""
        strategy = self._state.strategy

        def sums() -> Tensor:
            """Put the model's own weights back before ranks that have lost one meet anew."""
            try:
                strategy.parameters.write(mean)
                return self._sums()
            finally:
                strategy.parameters.write(own)

        return self._agreed(sums)

    def _sums(self) -> Tensor:
        """Return the sums over all ranks: losses, accuracies and scores, and the weights of each [3, 2] float64."""
        assert self._sampler is not None
        self.follow()
        mean, right, scores = Mean(), Mean(), Mean()
        with modes_kept(self._model), torch.no_grad():
            self._model.eval()
            for batches in self._sampler.epoch(0):
                self._comm.alive()
                for batch in batches:
                    loss, weight, _ = self.forward(batch)
                    if weight > 0 and isfinite(value := loss.item()):
                        mean.add(value * weight, weight)
                        if (accuracy := self.forward.accuracy) is not None:
                            right.add(accuracy * weight, weight)
                    if self._score:
                        scores.add(*self._score(batch))
        sums = torch.tensor([[each.total, each.weight] for each in (mean, right, scores)], dtype=torch.float64)
        self._comm.all_reduce_(sums)
        return sums


class Found(NamedTuple):
    """Holds the figures of a validation by all ranks; None where nothing tells one."""

    loss: float | None
    accuracy: float | None
    score: float | None


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Put each module back into train or eval mode as it was."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
