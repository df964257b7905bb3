"""How far a run has come, how long it goes on, and which of two states is the newer one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from exogym.errors import SettingError
from exogym.samplers.elastic import Sampler
from exogym.strategy.optim import Schedule


@dataclass(frozen=True)
class Position:
    """How far ranks have come together, and what is due next. `in_epoch` counts steps since the last reshard.

    validation_waits: the work was just resharded, so data of the validation may still be on their way. shared_at,
    compared_at: the steps at which it was last resharded, and at which speeds were last compared (see shares.py).
    best_loss, best_at: of the validation with the lowest loss so far. not_better: validations since that one.
    """

    step: int = 0
    epoch: int = 0
    in_epoch: int = 0
    rounds: int = 0
    val_loss: float | None = None
    validated_at: int = 0
    validation_due: bool = False
    validation_waits: bool = False
    shared_at: int = 0
    compared_at: int = 0
    best_loss: float | None = None
    best_at: int = 0
    not_better: int = 0

    @property
    def place(self) -> tuple[int, int, int]:
        return self.step, self.epoch, self.in_epoch


@dataclass(frozen=True)
class RunLength:
    """A run goes on for so many epochs or optimizer steps, whichever ends first."""

    epochs: int | None
    max_steps: int | None

    def total_steps(self, steps_per_epoch: int) -> int:
        if steps_per_epoch < 1:
            raise SettingError("there is nothing to train on: an epoch has no steps")
        by_epochs = None if self.epochs is None else self.epochs * steps_per_epoch
        total = min(limit for limit in (by_epochs, self.max_steps) if limit is not None)
        if total < 1:
            raise SettingError(f"nothing to do: epochs = {self.epochs}, max_steps = {self.max_steps}")
        return total

    def steps_left(self, now: Position, sampler: Sampler) -> int:
        """Return the steps after `now`, as the work is shared at present."""
        limits = [math.inf if self.max_steps is None else self.max_steps - now.step]
        if self.epochs is not None:
            limits.append(sum(map(sampler.steps_in, range(now.epoch, self.epochs))) - now.in_epoch)
        return int(max(0, min(limits)))

    def next_epoch(self, epoch: int, sampler: Sampler) -> int:
        """Return the first one from `epoch` on that has steps: all of it may be done while an earlier one is not."""
        while sampler.steps_in(epoch) == 0 and (self.epochs is None or epoch < self.epochs):
            epoch += 1
        return epoch

    def extend(self, schedule: Schedule, planned: RunLength, now: Position, sampler: Sampler) -> None:
        """Let the learning rate go on from `now` as if the run had been `planned` for this length."""
        # What a step of an epoch of which nothing is done yet is worth on the curve.
        whole = max(1, sampler.steps_in((self.epochs or now.epoch + 2) - 1))
        limits = [planned.max_steps or math.inf, (planned.epochs or math.inf) * whole]
        pace = schedule.planned_steps / min(limits)
        schedule.extend(now.step, planned.steps_left(now, sampler), self.steps_left(now, sampler), pace)


class Version(NamedTuple):
    """Orders the states of a run: `count` grows with every change that ranks make together, `term` with every time that
    they begin from a checkpoint.

    So what was done after going back to a checkpoint is newer than what had been done before, although it may count
    less; and two states of one version have the same fingerprint, except where machines round differently.
    """

    term: int
    count: int


NOT_BEGUN = Version(-1, -1)


class Offer(NamedTuple):
    """A checkpoint that a rank could begin from. number: twice its agreements, plus 1 if it lies inside a round."""

    version: Version
    fingerprint: int
    number: int

    @property
    def state(self) -> tuple[Version, int]:
        """The part that ranks must share to go on from it together."""
        return self.version, self.fingerprint
