"""One rank's state in memory: how far its run has come, what all ranks have in common, and what is its own."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from exogym.device import random_state, set_random_state
from exogym.errors import SettingError
from exogym.flat import OtherBuffers
from exogym.logger.event import Mean
from exogym.samplers.elastic import Sampler
from exogym.state.checkpoint import fingerprint
from exogym.strategy.optim import Schedule
from exogym.strategy.strategy import Strategy


@dataclass(frozen=True)
class Position:
    """How far ranks have come together, and what is due next. `in_epoch` counts steps since the last reshard.

    validation_waits: the work was just resharded, so data of the validation may still be on their way. shared_at,
    compared_at: the steps at which it was last resharded, and at which speeds were last compared (see shares.py).
    best_loss, best_score, best_at: of the best validation so far, by its score where there is one, else by its loss.
    not_better: validations since that one.
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
    best_score: float | None = None


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
    """Orders the states of a run: `changes` grows with each that ranks make together, `term` with each time that they
    begin from a checkpoint.

    So what was done after going back to a checkpoint is newer than what had been done before, although it may count
    less; and two states of one version have the same fingerprint, except where machines round differently.
    """

    term: int
    changes: int


NOT_BEGUN = Version(-1, -1)


class RoundEnd(NamedTuple):
    """The end of a round whose exchange still runs. trained, buffers: as NodeState had them there."""

    position: Position
    trained: dict[int, list[str]]
    buffers: dict[str, torch.Tensor]


class NodeState:
    """The state that a rank brings when ranks meet, and its changes.

    `now` is where this rank is, `agreed` where all were when they last agreed. What ranks have in common changes only
    inside `changing`, so that another thread can copy it inside `unchanging` at any other moment.
    The model's integer buffers are each rank's own while it trains. Those of the last agreement are handed to others
    with the rest, and are not compared.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        sampler: Sampler,
        length: RunLength,
        device: torch.device,
        *,
        patience: int = 0,
    ):
        """patience: validations in a row that may be no better than the best one; 0: any number."""
        self.strategy, self.sampler = strategy, sampler
        self._buffers = OtherBuffers(model)
        self._agreed_buffers = self._buffers.read()
        self.now = self.agreed = Position()
        self.samples = 0
        self.trained: dict[int, list[str]] = {}  # ids of this rank's samples since the last round's end, by epoch
        self.in_flight: RoundEnd | None = None
        self.loss = Mean()
        self.is_mid_round = False  # it was resumed in the middle of a round
        self.has_synced = False  # it has a state together with others
        self.has_own = False  # besides, what is its own, from a checkpoint
        # Another rank's source may have more steps than this one's, which has none.
        least = 1 if sampler.may_be_lengthened else 0
        self.total_steps = length.total_steps(max(sampler.steps_per_epoch, least))
        self._length, self._device, self._patience = length, device, patience
        self.best_weights: torch.Tensor | None = None  # [numel], of the validation at best_at, where they are kept
        self._version, self._next_term = Version(0, 0), 0
        self._is_given = False  # the state in its memory came from another rank
        self._readable = threading.Condition()
        self._changing = False

    # Changes of what ranks have in common. All ranks make the same ones in the same order.

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Waits for who is reading. An exception inside leaves a state that nobody may read."""
        with self._readable:
            self._changing = True
        yield
        with self._readable:
            self._changing = False
            self._readable.notify_all()

    @contextmanager
    def unchanging(self, patience_s: float) -> Iterator[bool]:
        """Keep the state as it is, for another thread: True; or False if it was changing all the time."""
        with self._readable:
            yield self._readable.wait_for(lambda: not self._changing, patience_s)

    def begin(self, term: int, *, is_given: bool) -> None:
        """Take note of a state that this rank has come to, which counts once all ranks have."""
        self._next_term, self._is_given = term, self._is_given or is_given

    def begun(self) -> None:
        """Let the state that all ranks have come to count."""
        with self.changing():
            self._version = Version(self._next_term, self._version.changes)
            self.has_synced = True
            if self.strategy.sharded:
                self.strategy.sharded.keep_own()

    def begin_exchange(self, now: Position) -> None:
        """End the round here while its exchange runs: what this rank trains from now on is of the next one."""
        self.in_flight = RoundEnd(now, self.trained, self._buffers.read())
        self.now, self.trained = now, {}

    def about_round(self, end: Position) -> dict[str, Any]:
        """Return what this rank says, when it votes, of its round that ends there."""
        trained = self.in_flight.trained if self.in_flight else self.trained
        return {"samples": trained, "position": (end.step, end.epoch, end.in_epoch)}

    def mark_done(self, end: Position, members: tuple[str, ...]) -> None:
        """Count what `members` have trained until this end of their round. To be called inside a change."""
        since, flight = self.agreed, self.in_flight
        self.sampler.mark_done((since.epoch, since.in_epoch), (end.epoch, end.in_epoch), members)
        end = replace(end, validation_waits=False)
        if flight is None:
            self._agree(end)
            self.trained = {}
            return
        now = replace(self.now, rounds=end.rounds, validation_waits=False)
        self._agree(end, now=now, buffers=flight.buffers)
        self.in_flight = None

    def reshard(self, members: tuple[str, ...], weights: list[float] | None) -> None:
        """Share what is left of the work among `members`."""
        with self.changing():
            sampler, waits = self.sampler, members != self.sampler.members
            sampler.reshard(members, weights)
            epoch, step = self._length.next_epoch(sampler.first_epoch, sampler), self.now.step
            now = replace(self.now, epoch=epoch, in_epoch=0, shared_at=step, compared_at=step, validation_waits=waits)
            self._agree(now)
            left = self._length.steps_left(now, sampler)
            self.total_steps = step + left
            self.strategy.schedule.stretch(step, left)

    def compared(self) -> None:
        """Take note that ranks have compared their speeds, at the agreed point."""
        at = self.agreed.step
        agreed, now = replace(self.agreed, compared_at=at), replace(self.now, compared_at=at)
        with self.changing():
            self._agree(agreed, now=now, buffers=self._agreed_buffers)

    def validated(
        self, loss: float | None, score: float | None, *, is_best: bool, weights: torch.Tensor | None = None
    ) -> None:
        """weights: the common ones [numel], on the CPU, if they are to be kept as the best."""
        now = replace(self.now, val_loss=loss, validated_at=self.now.step, validation_due=False)
        with self.changing():
            if is_best:
                self.best_weights = weights
                self._agree(replace(now, best_loss=loss, best_score=score, best_at=now.step, not_better=0))
            else:
                self._agree(replace(now, not_better=now.not_better + 1))

    def take_weights(self, flat: torch.Tensor) -> None:
        """Take on the agreed weights [numel], where ranks had drifted apart."""
        with self.changing():
            self.strategy.load_weights(flat)
            self._agree(self.agreed, now=self.now)

    def _agree(
        self, agreed: Position, now: Position | None = None, buffers: dict[str, torch.Tensor] | None = None
    ) -> None:
        """now, buffers: where this rank is, if it is ahead, and what the model's buffers were at the agreed point."""
        self.agreed, self.now = agreed, now or agreed
        self._agreed_buffers = self._buffers.read() if buffers is None else buffers
        self._version = Version(self._version.term, self._version.changes + 1)

    def lengthened(self) -> None:
        """Plan anew, before the beginning, as the sampler has more steps than it had."""
        self.total_steps = self._length.total_steps(self.sampler.steps_per_epoch)
        self.strategy.schedule.plan(self.total_steps)

    # Where the work stands.

    @property
    def work_is_left(self) -> bool:
        return self.now.step < self.total_steps and not self.ends_early

    @property
    def ends_early(self) -> bool:
        """Validation has not been better for as long as training may go on so."""
        return 0 < self._patience <= self.agreed.not_better

    @property
    def is_ahead(self) -> bool:
        """Say whether this rank has made steps of the next round while the last one's exchange ran."""
        return self.now.step > self.agreed.step

    def position_at(self, step: int, val_interval: int | None) -> Position:
        """Return where all ranks come to with this step of the present round."""
        at = self.agreed
        while at.step < step:
            at = self.after_one_step(val_interval, at)
        return at

    def after_one_step(self, val_interval: int | None, now: Position | None = None) -> Position:
        """Return where this rank will be once its next step is made, from where it is or from `now`."""
        now = now or self.now
        after = replace(now, step=now.step + 1, in_epoch=now.in_epoch + 1)
        is_last = after.in_epoch == self.sampler.steps_in(now.epoch)
        due = after.step % val_interval == 0 if val_interval else is_last
        if is_last:
            after = replace(after, epoch=self._length.next_epoch(now.epoch + 1, self.sampler), in_epoch=0)
        return replace(after, validation_due=now.validation_due or due)

    # What ranks that meet compare, and hand over: state_sync.py.

    def fixed_fingerprints(self) -> list[int]:
        """Return numbers that must be the same on all ranks, in the order of MUST_MATCH."""
        parameters, length = self.strategy.parameters, self._length
        data = repr((self.sampler.fingerprint(), length.epochs, length.max_steps, self._patience)).encode()
        data_hash = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)
        if self.strategy.divides_model:
            return [0, 0, data_hash]
        return [parameters.layout(), parameters.frozen_digest(), data_hash]

    def version(self) -> Version:
        """NOT_BEGUN if its process has just started."""
        return self._version if self.has_synced or self._is_given else NOT_BEGUN

    def fingerprint_of(self, agreed: dict[str, Any]) -> int:
        strategy = {key: value for key, value in agreed["strategy"].items() if key not in self.strategy.drifts}
        own = ("version", "buffers", *(["best_weights"] if self.strategy.divides_model else []))
        return fingerprint({**agreed, "strategy": strategy, **dict.fromkeys(own)})

    def agreed_state(self) -> dict[str, Any]:
        """Return what ranks have in common, not copied. After a stop inside a round: as it was before they agreed."""
        return self._common(self.strategy.agreed_state())

    def load_agreed_state(self, state: dict[str, Any]) -> None:
        with self.changing():
            self.strategy.load_agreed_state(state["strategy"])
            self._buffers.write(state["buffers"])
            self._agreed_buffers = self._buffers.read()
            self.now = self.agreed = Position(**state["now"])
            self.total_steps = state["total_steps"]
            self.best_weights = state["best_weights"]
            self.sampler.load_state_dict(state["sampler"])
            self.trained, self.in_flight, self.is_mid_round = {}, None, False
            self._version = Version(*state["version"])
            planned = RunLength(**state["length"])
            if planned != self._length:
                self.total_steps = self.now.step + self._length.steps_left(self.now, self.sampler)
                self._length.extend(self.strategy.schedule, planned, self.now, self.sampler)

    def revert_to_agreed(self) -> None:
        """Give up what this rank has done since."""
        self.load_agreed_state(self.agreed_state())

    # All of it, as a checkpoint holds it.

    def whole(self) -> dict[str, Any]:
        """Return all that a checkpoint holds, not copied."""
        strategy = self.strategy.state_dict()
        own = {
            "now": asdict(self.now),
            "samples": self.samples,
            "trained": self.trained,
            "loss": [self.loss.total, self.loss.weight],
            "random": random_state(self._device),
            "strategy": strategy["own"],
            "buffers": self._buffers.read(),
        }
        return {"agreed": self._common(strategy["agreed"]), "own": own}

    def load_whole(self, state: dict[str, Any], *, exactly: bool, inside: bool, members: tuple[str, ...]) -> None:
        """exactly: all of `members` load the same one. inside: some of them go on inside a round."""
        self.load_agreed_state(state["agreed"])
        # A share of somebody who has another name now is nobody's: then the round begins anew.
        self.is_mid_round = exactly and inside and self.sampler.knows(members)
        own = state["own"]
        if own is None:  # another thread saved it, when the process had to end
            return
        self.strategy.load_own_state(own["strategy"], inside=self.is_mid_round)
        self.has_own = True
        if self.is_mid_round:
            self.now, self.trained = Position(**own["now"]), own["trained"]
            self._buffers.write(own["buffers"])
        self.samples, self.loss = own["samples"], Mean(*own["loss"])
        if exactly:
            set_random_state(own["random"], self._device)

    def _common(self, strategy: dict[str, Any]) -> dict[str, Any]:
        return {
            "version": tuple(self._version),
            "now": asdict(self.agreed),
            "total_steps": self.total_steps,
            "length": asdict(self._length),
            "strategy": strategy,
            "buffers": self._agreed_buffers,
            "best_weights": self.best_weights,
            "sampler": self.sampler.state_dict(),
        }
