"""One rank's state, as it can be written down and handed on: what all ranks have in common, and what is its own."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from exogym.batches import BatchSource
from exogym.comm.comm import Comm
from exogym.elastic_sampler import SharedWork
from exogym.errors import CheckpointError, SettingError
from exogym.random_state import random_state, set_random_state
from exogym.state.checkpoint import About, Checkpoints
from exogym.state.state_sync import NOT_BEGUN, Offer, Version
from exogym.state.tree import fingerprint
from exogym.strategy.strategy import Strategy

RESCUE_S = 5.0  # that a rescue waits for the end of a change


@dataclass(frozen=True)
class Position:
    """How far ranks have come together, and what is due next. `in_epoch` counts the steps of `epoch` in this deal.

    validation_waits: its data may still be on their way, since it was just dealt out anew. dealt_in: the epoch in which
    work was last dealt out.
    """

    step: int = 0
    epoch: int = 0
    in_epoch: int = 0
    rounds: int = 0
    val_loss: float | None = None
    validated_at: int = 0
    validation_due: bool = False
    validation_waits: bool = False
    dealt_in: int = 0

    @property
    def place(self) -> tuple[int, int, int]:
        return self.step, self.epoch, self.in_epoch


@dataclass
class Mean:
    total: float = 0.0
    weight: float = 0.0

    def add(self, total: float, weight: float) -> None:
        self.total += total
        self.weight += weight

    def fade(self, keep: float) -> None:
        self.total *= keep
        self.weight *= keep

    def value(self) -> float | None:
        return self.total / self.weight if self.weight else None


class NodeState:
    """What a rank brings when ranks meet (a Replica), what it saves, and how both change.

    `now` is where this rank is, `agreed` where all were when they last agreed. The common state changes only between
    `begin_change` and `end_change`, so that another thread can save it whole at any other moment. What there is to tell
    goes to `emit(type, **values)`.
    """

    def __init__(
        self,
        strategy: Strategy,
        train: BatchSource,
        comm: Comm,
        checkpoints: Checkpoints | None,
        *,
        epochs: int | None,
        max_steps: int | None,
        device: torch.device,
        resume: bool,
        emit: Callable[..., None],
    ):
        self.strategy, self.train, self.comm, self.checkpoints = strategy, train, comm, checkpoints
        self.now = self.agreed = Position()
        self.samples = 0
        self.trained: dict[int, list[str]] = {}  # ids of this rank's samples since the last agreement, by epoch
        self.loss = Mean()
        self.is_inside = False  # it was resumed in the middle of a round
        self.has_entered = False  # it has a state together with others
        self.has_own = False  # besides, what is its own, from a checkpoint
        # Another rank's source may have more steps than this one's, which has none.
        least = 1 if getattr(train, "may_be_lengthened", False) else 0
        self.total_steps = _total_steps(max(train.steps_per_epoch, least), epochs, max_steps)
        self._epochs, self._max_steps = epochs, max_steps
        self._device, self._resume, self._emit = device, resume, emit
        self._version, self._next_term = Version(0, 0), 0
        self._is_given = False  # the state in its memory came from another rank
        self._kept: dict[int, About] | None = None
        self._settings: dict[str, Any] | None = None
        self._readable = threading.Condition()
        self._changing = False
        self._writing: tuple[int, float, Future[int]] | None = None
        self._disk_trouble = False
        if checkpoints:
            checkpoints.describe = self._describe

    # Changes of what ranks have in common. All ranks make the same ones in the same order.

    def begin_change(self) -> None:
        """Waits for a rescue that is copying."""
        with self._readable:
            self._changing = True

    def end_change(self) -> None:
        with self._readable:
            self._changing = False
            self._readable.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """An exception inside leaves a state that nobody may read."""
        self.begin_change()
        yield
        self.end_change()

    @property
    def work(self) -> SharedWork | None:
        return self.train if isinstance(self.train, SharedWork) else None

    def begin(self, term: int, *, is_given: bool) -> None:
        """It has come to a state, which counts once all ranks have entered."""
        self._next_term, self._is_given = term, self._is_given or is_given

    def entered(self) -> None:
        with self.changing():
            self._version = Version(self._next_term, self._version.count)
            self.has_entered = True

    def settle(self, members: tuple[str, ...]) -> None:
        """What `members` have trained since they last agreed counts now. Inside a change."""
        since, until = self.agreed, self.now
        if self.work:
            self.work.settle((since.epoch, since.in_epoch), (until.epoch, until.in_epoch), members)
        self.now = self.agreed = replace(self.now, validation_waits=False)
        self.trained = {}
        self._has_changed()

    def deal(self, members: tuple[str, ...], weights: list[float] | None) -> None:
        """Share out anew what is left of the work."""
        with self.changing():
            waits, work = members != self.work.members, self.work
            work.deal(members, weights)
            first = work.first_epoch
            at = {"epoch": self.next_epoch(first), "in_epoch": 0, "dealt_in": first, "validation_waits": waits}
            self.now = self.agreed = replace(self.now, **at)
            self.total_steps = self.now.step + self._steps_left()
            self.strategy.schedule.stretch(self.now.step, self._steps_left())
            self._has_changed()

    def validated(self, loss: float | None) -> None:
        with self.changing():
            at = {"val_loss": loss, "validated_at": self.now.step, "validation_due": False}
            self.now = self.agreed = replace(self.now, **at)
            self._has_changed()

    def take_weights(self, flat: torch.Tensor) -> None:
        """The agreed weights, where ranks had drifted apart."""
        with self.changing():
            self.strategy.load_weights(flat)
            self._has_changed()

    def _has_changed(self) -> None:
        self._version = Version(self._version.term, self._version.count + 1)

    def lengthen(self, steps_per_epoch: int) -> None:
        """Before the beginning: another rank's batch source has more steps than this one's."""
        self.train.steps_per_epoch = steps_per_epoch
        self.total_steps = _total_steps(steps_per_epoch, self._epochs, self._max_steps)
        self.strategy.schedule.plan(self.total_steps)

    def steps_in(self, epoch: int) -> int:
        return self.work.steps_in(epoch) if self.work else self.train.steps_per_epoch

    def next_epoch(self, epoch: int) -> int:
        """The first one from `epoch` on that has steps: all of it may be done while an earlier one is not."""
        while self.steps_in(epoch) == 0 and (self._epochs is None or epoch < self._epochs):
            epoch += 1
        return epoch

    def _steps_left(self) -> int:
        """After `now`, as work is dealt out at present."""
        limits = [math.inf if self._max_steps is None else self._max_steps - self.now.step]
        if self._epochs is not None:
            limits.append(sum(map(self.steps_in, range(self.now.epoch, self._epochs))) - self.now.in_epoch)
        return int(max(0, min(limits)))

    # What `enter` asks of a rank, see Replica.

    def marks(self) -> list[int]:
        parameters = self.strategy.parameters
        data = self.work.mark() if self.work else self.total_steps
        return [parameters.layout(), parameters.frozen_digest(), data]

    def version(self) -> Version:
        return self._version if self.has_entered or self._is_given else NOT_BEGUN

    def fingerprint(self) -> int:
        return self._fingerprint_of(self.agreed_state())

    def _fingerprint_of(self, agreed: dict[str, Any]) -> int:
        strategy = {key: value for key, value in agreed["strategy"].items() if key not in self.strategy.drifts}
        return fingerprint({**agreed, "strategy": strategy, "version": None})

    def offers(self) -> list[Offer]:
        """Raises CheckpointError if they are of a run with other settings."""
        found = self._kept_here()
        if found:
            self._check_settings(found[max(found)]["settings"])
        return [Offer(Version(*about["version"]), about["fingerprint"], number) for number, about in found.items()]

    def is_damaged(self) -> bool:
        return self._may_load() and not self._kept_here() and bool(self.checkpoints.damaged())

    def _may_load(self) -> bool:
        """Later it remembers more."""
        return self.version() == NOT_BEGUN and self._resume and self.checkpoints is not None

    def _kept_here(self) -> dict[int, About]:
        """Read once: each look hashes gigabytes. Raises CheckpointError for those of another version of the program."""
        if not self._may_load():
            return {}
        if self._kept is None:
            self._kept = self.checkpoints.good()
        if not self._kept and (formats := self.checkpoints.other_formats()):
            what = f"checkpoints of another version of this program (format {formats[0]})"
            raise CheckpointError(f"{self.checkpoints.folder} has {what}: resume with that one, or begin a new run")
        return self._kept

    def load(self, offer: Offer, *, exactly: bool, inside: bool) -> bool:
        state = self.checkpoints.load(offer.number)
        self.load_agreed_state(state["agreed"])
        # Work that was dealt to somebody under another name is nobody's: then the round begins anew.
        known = self.work is None or set(self.comm.members) <= set(self.work.members)
        self.is_inside = exactly and inside and known
        own = state["own"]
        if own:
            self._load_own(own, exactly=exactly)
        return bool(own) and exactly and (self.is_inside or offer.number % 2 == 0)

    def agreed_state(self) -> dict[str, Any]:
        """After a stop inside a round: as it was before ranks were made to agree."""
        return self._common(self.strategy.state_dict()["agreed"])

    def load_agreed_state(self, state: dict[str, Any]) -> None:
        with self.changing():
            self.strategy.load_agreed_state(state["strategy"])
            self.now = self.agreed = Position(**state["now"])
            self.total_steps = state["total_steps"]
            if self.work:
                self.work.load_state_dict(state["work"])
            self.trained, self.is_inside = {}, False
            self._version = Version(*state["version"])
            if state["until"] != self._until():
                self._extend(state["until"])

    def back_to_agreed(self) -> None:
        """What this rank has done since is void."""
        self.load_agreed_state(self.agreed_state())

    def _extend(self, planned: dict[str, Any]) -> None:
        """Another number of epochs, or another limit of steps, than the run was planned for."""
        schedule, left = self.strategy.schedule, self._steps_left()
        now = self._until()
        self._epochs, self._max_steps = planned["epochs"], planned["max_steps"]
        before = self._steps_left()
        # What a step of an epoch that is dealt out whole is worth on the curve.
        whole = max(1, self.steps_in((now["epochs"] or self.now.epoch + 2) - 1))
        limits = [planned["max_steps"] or math.inf, (planned["epochs"] or math.inf) * whole]
        pace = schedule.planned_steps / min(limits)
        self._epochs, self._max_steps = now["epochs"], now["max_steps"]
        self.total_steps = self.now.step + left
        schedule.extend(self.now.step, before, left, pace)

    def _until(self) -> dict[str, Any]:
        return {"epochs": self._epochs, "max_steps": self._max_steps}

    def _common(self, strategy: dict[str, Any]) -> dict[str, Any]:
        return {
            "version": tuple(self._version),
            "now": asdict(self.agreed),
            "total_steps": self.total_steps,
            "until": self._until(),
            "strategy": strategy,
            "work": self.work.state_dict() if self.work else None,
        }

    def _whole(self) -> dict[str, Any]:
        strategy = self.strategy.state_dict()
        own = {
            "now": asdict(self.now),
            "samples": self.samples,
            "trained": self.trained,
            "loss": [self.loss.total, self.loss.weight],
            "random": random_state(self._device),
            "strategy": strategy["own"],
        }
        return {"settings": self.settings(), "agreed": self._common(strategy["agreed"]), "own": own}

    def _load_own(self, own: dict[str, Any], *, exactly: bool) -> None:
        self.strategy.load_own_state(own["strategy"], inside=self.is_inside)
        self.has_own = True
        if self.is_inside:
            self.now, self.trained = Position(**own["now"]), own["trained"]
        self.samples, self.loss = own["samples"], Mean(*own["loss"])
        if exactly:
            set_random_state(own["random"], self._device)

    # What must stay as it was when a run is resumed. Epochs, hosts and devices may change.

    def settings(self) -> dict[str, Any]:
        if self._settings is None:
            config, parameters = self.strategy.config, self.strategy.parameters
            values = {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
            source = getattr(self.train, "fixed_settings", None)
            data = source() if source else {"steps_per_epoch": self.train.steps_per_epoch}
            if not self.work:
                data = data | {"num_nodes": self.comm.world_size}
            model = {"trained parameters": parameters.layout(), "frozen weights": parameters.frozen_digest()}
            settings = {"strategy": type(self.strategy).__name__, **values, **model, **data}
            self._settings = json.loads(json.dumps(settings, default=str))  # as a checkpoint gives them back
        return self._settings

    def _check_settings(self, were: dict[str, Any]) -> None:
        now = self.settings()
        other = [name for name in {**were, **now} if json.dumps(were.get(name)) != json.dumps(now.get(name))]
        if other:
            told = "; ".join(_change(name, were.get(name), now.get(name)) for name in other)
            where = f"{self.checkpoints.folder} is of a run with other settings"
            raise CheckpointError(f"{where}: {told}. Set them as they were, or begin a new run in another folder")

    # The disk.

    def save(self, *, at_once: bool = False) -> None:
        """All of it, in the background unless at_once."""
        if self.checkpoints is None:
            return
        self.note_written(at_once=True)
        # A state inside a round is later than the agreement before it, and earlier than the next one.
        number = 2 * self.strategy.agreements + self.strategy.cut_short
        writing = self.checkpoints.save_in_background(number, self._whole())
        self._writing = (self.strategy.agreements, time.perf_counter(), writing)
        self.note_written(at_once=at_once)

    def note_written(self, *, at_once: bool = False) -> None:
        """Tell of the checkpoint that was being written, once it is."""
        if self._writing is None or not (at_once or self._writing[2].done()):
            return
        (agreements, started, writing), self._writing = self._writing, None
        try:
            written = writing.result()
        except CheckpointError as error:
            if not self._disk_trouble:
                self._emit("warning", what=f"no checkpoint is kept here while this lasts: {error}")
            self._disk_trouble = True
            return
        self._disk_trouble = False
        self._emit("checkpoint", round=agreements, bytes=written, seconds=time.perf_counter() - started)

    def save_agreed(self, patience_s: float = RESCUE_S) -> bool:
        """From another thread, when this process must end: what ranks last agreed on.

        False if the common state was changing all the time that it waited.
        """
        if self.checkpoints is None or not self.has_entered:
            return True
        if writing := self._writing:
            wait([writing[2]])
        with self._readable:
            if not self._readable.wait_for(lambda: not self._changing, patience_s):
                return False
            number = 2 * self.strategy.agreements + self.strategy.cut_short
            if self._is_kept(number):
                return True
            if self.strategy.cut_short:
                state = copy.deepcopy(self._whole())
            else:
                state = copy.deepcopy({"settings": self.settings(), "agreed": self.agreed_state(), "own": None})
        self.checkpoints.save(number, state, unless=lambda: self._is_kept(number))
        return True

    def _is_kept(self, number: int) -> bool:
        """Of this term; then it also has what is this rank's own, and a later change of the count is not worth that."""
        about = self.checkpoints.about(number)
        return about is not None and about["version"][0] == self._version.term

    def _describe(self, state: dict[str, Any]) -> About:
        agreed = state["agreed"]
        mark = self._fingerprint_of(agreed)
        return {"version": list(agreed["version"]), "fingerprint": mark, "settings": state["settings"]}


def _plain(value: Any) -> Any:
    """A setting as JSON can hold it: of a class or function its name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, functools.partial):
        return [_plain(value.func), repr(value.args), repr(sorted(value.keywords.items()))]
    if callable(value):
        return (
            f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else type(value).__qualname__
        )
    return value


def _change(name: str, was: Any, now: Any) -> str:
    if isinstance(was, int) and isinstance(now, int) and max(abs(was), abs(now)) > 2**31:  # hashes
        return f"its {name} were others"
    return f"{name} was {was}, and is {now}"


def _total_steps(steps_per_epoch: int, epochs: int | None, max_steps: int | None) -> int:
    if epochs is None and max_steps is None:
        raise SettingError("give epochs or max_steps")
    if steps_per_epoch < 1:
        raise SettingError("there is nothing to train on: an epoch has no steps")
    limits = [max_steps] if epochs is None else [epochs * steps_per_epoch, *([max_steps] if max_steps else [])]
    if min(limits) < 1:
        raise SettingError(f"nothing to do: epochs = {epochs}, max_steps = {max_steps}")
    return min(limits)
