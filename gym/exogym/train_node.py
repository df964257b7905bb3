"""The training loop of one rank."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from exogym import device as devices
from exogym.batches import Batch, BatchSource, count_samples, sample_ids, tensors, to_device
from exogym.checkpoint import Checkpoints, random_state, set_random_state
from exogym.communication import Comm
from exogym.entry import DAMAGED, NOT_BEGUN, enter
from exogym.errors import CheckpointError, ExogymError, NotFinite, PeerLost, Rejoined, SettingError
from exogym.flat import digest
from exogym.logger import Events, NullLogger
from exogym.membership import END, SHARES, VALIDATION
from exogym.shared_work import SharedWork
from exogym.strategy.strategy import StepResult, Strategy

RESCUE_TRIES, RESCUE_AGAIN_S = 50, 0.1
SPEED_MEMORY = 0.9  # of a step's speed in the next
MOST_UNEQUAL = 5.0  # no rank gets so many times more, or less, than the mean


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a rank can say at the end. Losses are means per target token (or per sample, see TrainNode).

    train_loss: this rank's, over its last epoch; val_loss: over all ranks, after the last step; None if there was none.
    digest: hash of the agreed weights, the same on all ranks. stopped: somebody asked to stop before the end.
    """

    steps: int
    rounds: int
    samples: int
    train_loss: float | None
    val_loss: float | None
    digest: int | None
    stopped: bool
    bytes_sent: int
    seconds: float
    seconds_communicating: float


@dataclass(frozen=True)
class Position:
    """How far ranks have come together. `in_epoch` counts the steps of `epoch` in the present deal of the work."""

    step: int = 0
    epoch: int = 0
    in_epoch: int = 0
    rounds: int = 0
    val_loss: float | None = None
    validated_at: int = 0
    validation_due: bool = False


class TrainNode:
    """Trains `model` as rank `comm.rank`, together with whoever else is in `comm`.

    The model is called as `model(batch)` and returns a mean loss, or `(mean loss, weight)` with the number of target
    tokens that the mean is over; a bare loss has the number of samples for its weight. Ranks may have unequal shares.
    It runs for `epochs` or `max_steps` optimizer steps, whichever ends first. Validation falls due every `val_interval`
    steps, or at the end of each epoch, and takes place once ranks next agree: in between each has its own weights.
    Where it was just dealt out anew it waits for the agreement after that, since its data may be on their way.
    `should_stop` is asked at every step; when it says yes on any rank, all ranks stop at the same agreed weights.

    With `checkpoints` each rank keeps its own state: after every `checkpoint_interval` agreements (rounds, or steps of
    a strategy without rounds; 0: never), and when it is stopped. `resume` goes on from the newest that all ranks have,
    bit for bit as if nothing had happened. If there is none that all have, the newest that any has is given to the
    others, whose inner optimizers start anew; if nobody has one, training starts from the beginning. A checkpoint that
    cannot be written is a "warning" event, and training goes on.

    In an ElasticComm ranks may be lost, and may come (back) between rounds. What a lost rank trained since the last
    agreement is dealt out again if `train` is SharedWork; else losing one ends the run with PeerLost. With
    `auto_shares` it is dealt in proportion to the ranks' measured speeds, anew at every epoch: faster ranks then have
    larger batches, and a run cannot be repeated bit for bit.

    events gets dicts with `type` start, resume, plan (work was dealt out anew), step, round (at each agreement of a
    strategy that has rounds, on every rank), validation, checkpoint, stop or warning.
    The caller owns `comm` and closes it, also after an exception.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        strategy: Strategy,
        train: BatchSource,
        *,
        val: BatchSource | None = None,
        epochs: int | None = None,
        max_steps: int | None = None,
        val_interval: int | None = None,
        device: str | torch.device | None = None,
        precision: str = "float32",
        events: Events | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        checkpoints: Checkpoints | None = None,
        checkpoint_interval: int = 0,
        resume: bool = False,
        auto_shares: bool = False,
    ):
        self.model, self.comm, self.strategy = model, comm, strategy
        self.train, self.val, self.val_interval = train, val, val_interval
        self.device = devices.choose(device, local_rank=comm.rank)
        self.precision = precision
        self.events = events or NullLogger()
        self.should_stop = should_stop
        self.checkpoints, self.checkpoint_interval, self.resume = checkpoints, checkpoint_interval, resume
        self._epochs, self._max_steps, self._auto_shares = epochs, max_steps, auto_shares
        self.total_steps = _total_steps(train.steps_per_epoch, epochs, max_steps)
        self._now = self._agreed = Position()
        self._samples = 0
        self._trained: dict[int, list[str]] = {}  # ids of this rank's samples since the last agreement, by epoch
        self._loss = _Mean()
        self._digest: int | None = None
        self._settled: int | None = 0  # agreements after which all of this rank's state has followed
        self._last_epoch = 0
        self._begun = self._dealt_anew = self._validation_dealt = False
        self._dealt_in = 0  # the epoch
        self._speed = _Mean()  # samples a second, over the last steps
        self._writing: tuple[int, float, Future[int]] | None = None
        self._disk_trouble = False
        self._shapes: list[torch.Size] = []

    def run(self) -> TrainResult:
        """Raises PeerLost, RanksDiverged, NotFinite, CheckpointError."""
        started = time.perf_counter()
        with _modes_kept(self.model):
            self.model.to(self.device).train()
            self.model.zero_grad(set_to_none=True)
            self.strategy.setup(self.model, self.comm, self.total_steps)
            self._announce()
            self.comm.enter(self._enter)
            stopped = self._until_the_end()
            self._note_written(at_once=True)
        return TrainResult(
            steps=self._now.step,
            rounds=self._now.rounds,
            samples=self._samples,
            train_loss=self._loss.value(),
            val_loss=self._now.val_loss,
            digest=self._digest,
            stopped=stopped,
            bytes_sent=self.comm.bytes_sent,
            seconds=time.perf_counter() - started,
            seconds_communicating=self.comm.seconds,
        )

    def _until_the_end(self) -> bool:
        """True if somebody asked to stop."""
        while True:
            try:
                stopped = self._train()
                self.comm.together(END, lambda: None)
                return stopped
            except Rejoined:
                self.model.zero_grad(set_to_none=True)
                self._emit("resume", round=self._now.rounds)

    def _train(self) -> bool:
        """From the state as it is to the end of the work. True if somebody asked to stop."""
        if self._now == self._agreed:
            self._deal()
            if self._is_validation_due() and self._work_left():
                self._validate()
        stopped = self._catch_up()
        while not stopped:
            stopped = self._all_steps()
            self._tell_place()
            last = None if stopped else self.strategy.finish()
            if last:
                self._after_agreement(last)
                stopped = last.stop
                if not stopped:
                    self._at_agreement(last)  # somebody may have come, and brought work
            # What a rank lost in the last round had left undone is dealt out again.
            if not self._work_left():
                break
        if not stopped and self._now.validated_at < self._now.step:
            self._validate()
        if stopped:
            self._save(at_once=True)
        return stopped

    def _all_steps(self) -> bool:
        """True if somebody asked to stop."""
        while self._work_left():
            self._dealt_anew = False
            for batches in self._epoch():
                self.comm.look_up()
                result = self._one_step(batches)
                if result.stop:
                    return True
                self._at_agreement(result)
                if self._dealt_anew:
                    break
        return False

    def _work_left(self) -> bool:
        return self._now.step < self.total_steps

    def _catch_up(self) -> bool:
        """End the round that a stop cut short when this rank was through with it. True if somebody asks to stop."""
        self._tell_place()
        result = self.strategy.catch_up()
        if result is None:
            return False
        self._after_agreement(result)
        if not result.stop:
            self._at_agreement(result)
        return result.stop

    def _at_agreement(self, result: StepResult) -> None:
        if not result.agreed or not self._work_left():
            return
        if self._is_validation_due():
            self._validate()
        if self.checkpoint_interval and self.strategy.agreements % self.checkpoint_interval == 0:
            self._save()

    def _is_validation_due(self) -> bool:
        return self._now.validation_due and not self._validation_dealt

    def _epoch(self) -> Iterator[list[Batch]]:
        """Micro-batches of each step of the epoch. Every rank must make the same number of steps."""
        epoch, first = self._now.epoch, self._now.in_epoch
        if first == 0:
            self._loss = _Mean()
        promised = self._steps_in(epoch)
        for batches in self.train.epoch(epoch, first_step=first) if first else self.train.epoch(epoch):
            yield batches
            first += 1
            if first == promised or not self._work_left():
                break
        if first < promised and self._work_left():
            missing = f"{promised - first} of the {promised} steps it promised"
            raise ExogymError(f"rank {self.comm.rank}: epoch {epoch} of the batch source lacks {missing}")

    def _steps_in(self, epoch: int) -> int:
        return self.train.steps_in(epoch) if isinstance(self.train, SharedWork) else self.train.steps_per_epoch

    def _one_step(self, batches: list[Batch]) -> StepResult:
        started = time.perf_counter()
        mean, samples = _Mean(), 0
        trained = self._trained.setdefault(self._now.epoch, [])
        for batch in batches:
            samples += self._accumulate(batch, mean)
            trained += sample_ids(batch)
        communicating = self.comm.seconds
        result = self._strategy_step(mean.weight, samples)
        computing = time.perf_counter() - started - (self.comm.seconds - communicating)
        self._speed.fade(SPEED_MEMORY)
        self._speed.add(samples, computing if samples else 0.0)
        self.model.zero_grad(set_to_none=True)
        self._samples += samples
        self._loss.add(mean.total, mean.weight)
        self._emit_step(result, mean, samples, time.perf_counter() - started)
        self._note_written()
        self._after_agreement(result)
        return result

    def _strategy_step(self, weight: float, samples: int) -> StepResult:
        now, before = self._now, self._now
        is_last = now.in_epoch + 1 == self._steps_in(now.epoch)
        now = replace(now, step=now.step + 1, in_epoch=now.in_epoch + 1)
        due = now.step % self.val_interval == 0 if self.val_interval else is_last
        now = replace(now, validation_due=now.validation_due or due)
        if is_last:
            now = replace(now, epoch=now.epoch + 1, in_epoch=0)
        self._tell_place(now)
        result = self.strategy.step(weight, samples if weight else 0, stopping=bool(self.should_stop()))
        self._now, self._last_epoch = now, before.epoch
        return result

    def _tell_place(self, now: Position | None = None) -> None:
        """What goes with this rank's next vote on a round."""
        now = now or self._now
        self.comm.trained, self.comm.position = self._trained, (now.step, now.epoch, now.in_epoch)

    def _accumulate(self, batch: Batch, mean: _Mean) -> int:
        """Add one micro-batch's weighted gradient and loss; returns its number of samples."""
        loss, weight, samples = self._forward(batch)
        if weight > 0:  # a mean over no token at all is NaN
            value = loss.item()
            if not math.isfinite(value):
                raise NotFinite(f"the loss is {value} on rank {self.comm.rank}, step {self._now.step + 1}")
            (loss * weight).backward()
            mean.add(value * weight, weight)
        return samples

    def _forward(self, batch: Batch) -> tuple[Tensor, float, int]:
        self._tidy(batch)
        batch = to_device(batch, self.device)
        samples = count_samples(batch)
        with devices.autocast(self.device, self.precision):
            output = self.model(batch)
        loss, weight = output if isinstance(output, tuple) else (output, samples)
        return loss, float(weight), samples

    def _tidy(self, batch: Batch) -> None:
        """On mps the driver's memory grows with each new shape until the cache is emptied."""
        if self.device.type == "mps":
            shapes = [t.shape for t in tensors(batch)]
            if shapes != self._shapes:
                devices.empty_cache(self.device)
            self._shapes = shapes

    def _validate(self) -> None:
        if self.val is None:
            return
        sums = self.comm.together(VALIDATION, self._validation_sums)
        loss = _Mean(*sums.tolist()).value()
        self._now = replace(self._now, val_loss=loss, validation_due=False, validated_at=self._now.step)
        self._agreed = self._now
        self._emit("validation", loss=loss)

    def _validation_sums(self) -> Tensor:
        """Over all ranks: the sum of the losses, and of their weights."""
        self._deal_validation()
        mean = _Mean()
        with _modes_kept(self.model), torch.no_grad():
            self.model.eval()
            for batches in self.val.epoch(0):
                self.comm.alive()
                for batch in batches:
                    loss, weight, _ = self._forward(batch)
                    if weight > 0:
                        mean.add(loss.item() * weight, weight)
        sums = torch.tensor([mean.total, mean.weight], dtype=torch.float64)
        self.comm.all_reduce_(sums)
        return sums

    def _after_agreement(self, result: StepResult) -> None:
        if not result.agreed:
            return
        self._digest = result.digest
        spent = {"bytes": result.bytes, "seconds": result.seconds_communicating}
        if result.stop:
            self._emit("stop", round=result.round, digest=result.digest, **spent)
        elif result.round is not None:
            self._now = replace(self._now, rounds=result.round)
            self._emit("round", round=result.round, digest=result.digest, **spent)
        if not self.strategy.cut_short:
            self._settle()
            if not result.stop:
                self.comm.regroup()
                self._deal()

    def _settle(self) -> None:
        """What ranks have trained since they last agreed counts now."""
        since, self._agreed = self._agreed, self._now
        self._trained = {}
        if isinstance(self.train, SharedWork):
            until = (self._now.epoch, self._now.in_epoch)
            self.train.settle((since.epoch, since.in_epoch), until, self.comm.members)
        self._settled = self.strategy.agreements

    def _deal(self) -> None:
        """Deal out anew what is left, if it was dealt to others than those who are here now."""
        members = self.comm.members
        self._validation_dealt = False
        if not isinstance(self.train, SharedWork):
            if len(members) != self._ranks:
                what = f"{type(self.train).__name__} cannot be dealt out anew"
                raise PeerLost(f"{self._ranks} ranks had begun, now there are {len(members)}, and {what}")
            return
        shares_due = self._auto_shares and self.train.first_epoch > self._dealt_in and len(members) > 1
        if members == self.train.members and not self.train.is_stale and not shares_due:
            return
        weights = self._weights() if self._auto_shares else None
        members = self.comm.members  # one may have been lost meanwhile
        self._validation_dealt = members != self.train.members
        self.train.deal(members, weights)
        self.train.expect(self._epochs)
        self._deal_validation()
        self._dealt_in = self.train.first_epoch
        self._now = self._agreed = replace(self._now, epoch=self.train.first_epoch, in_epoch=0)
        left = [math.inf if limit is None else limit for limit in (self._steps_left(), self._max_steps)]
        self.total_steps = int(min(self._now.step + left[0], left[1]))
        self.strategy.schedule.stretch(self.strategy.steps, self.total_steps - self._now.step)
        self._dealt_anew = True
        self._emit("plan", total_steps=self.total_steps, hosts=len(members))

    def _deal_validation(self) -> None:
        if isinstance(self.val, SharedWork) and self.val.members != self.comm.members:
            self.val.deal(self.comm.members)
            self.val.expect(epochs=1)

    def _weights(self) -> list[float]:
        """Each rank's speed; the mean of the others' for one that has not been measured."""
        mine = torch.tensor([self._speed.value() or 0.0], dtype=torch.float64)
        speeds = [float(speed) for speed in self.comm.together(SHARES, lambda: self.comm.all_gather(mine))]
        known = [speed for speed in speeds if speed > 0]
        mean = sum(known) / len(known) if known else 1.0
        return [min(max(speed or mean, mean / MOST_UNEQUAL), mean * MOST_UNEQUAL) for speed in speeds]

    def _steps_left(self) -> int | None:
        if self._epochs is None:
            return None
        return sum(self.train.steps_in(epoch) for epoch in range(self.train.first_epoch, self._epochs))

    def _save(self, *, at_once: bool = False) -> None:
        if self.checkpoints is None:
            return
        self._note_written(at_once=True)
        # A state inside a round is later than the agreement before it, and earlier than the next one.
        number = 2 * self.strategy.agreements + self.strategy.cut_short
        writing = self.checkpoints.save_in_background(number, self._state_dict())
        self._writing = (self.strategy.agreements, time.perf_counter(), writing)
        self._note_written(at_once=at_once)

    def save_agreed(self) -> None:
        """From another thread, when this process must end: what ranks last agreed on.

        A strategy counts an agreement before it changes anything, and `_settled` is set after all is changed.
        """
        if self.checkpoints is None or not self._begun or self.strategy.cut_short:
            return
        if writing := self._writing:
            wait([writing[2]])
        for _ in range(RESCUE_TRIES):
            agreements = self.strategy.agreements
            if self._settled == agreements:
                if self.checkpoints.has(2 * agreements):
                    return
                state = copy.deepcopy(self.agreed_state())
                if self.strategy.agreements == agreements:
                    name = type(self.strategy).__name__
                    self.checkpoints.save(2 * agreements, {"strategy": name, "agreed": state, "own": None})
                    return
            time.sleep(RESCUE_AGAIN_S)

    def _note_written(self, *, at_once: bool = False) -> None:
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

    def _state_dict(self) -> dict[str, Any]:
        strategy = self.strategy.state_dict()
        return {
            "strategy": type(self.strategy).__name__,
            "agreed": self._common_state(strategy["agreed"]),
            "own": {
                "now": asdict(self._now),
                "samples": self._samples,
                "trained": self._trained,
                "loss": [self._loss.total, self._loss.weight],
                "random": random_state(self.device),
                "strategy": strategy["own"],
            },
        }

    def _common_state(self, strategy: dict[str, Any]) -> dict[str, Any]:
        work = self.train.state_dict() if isinstance(self.train, SharedWork) else None
        return {"now": asdict(self._agreed), "total_steps": self.total_steps, "strategy": strategy, "work": work}

    # What `enter` asks of a rank, see Entrant.

    def marks(self) -> list[int]:
        parameters = self.strategy.parameters
        work = self.train.mark() if isinstance(self.train, SharedWork) else self.total_steps
        return [parameters.layout(), parameters.frozen_digest(), work]

    def agreements(self) -> int:
        return self.strategy.agreements if self._begun else NOT_BEGUN

    def digest(self) -> int:
        return digest(self.strategy.agreed_weights())

    def offers(self) -> list[int]:
        if self._begun or not (self.resume and self.checkpoints):  # one that has begun remembers more
            return []
        return self.checkpoints.good() or ([DAMAGED] if self.checkpoints.damaged() else [])

    def load(self, number: int, *, exactly: bool) -> bool:
        state = self.checkpoints.load(number)
        if state["strategy"] != (now := type(self.strategy).__name__):
            was = f"its strategy was {state['strategy']}, and is {now}"
            raise CheckpointError(f"{self.checkpoints.folder} is of another run: {was}")
        self.load_agreed_state(state["agreed"])
        own = state["own"] if exactly else None
        if own and isinstance(self.train, SharedWork) and not set(self.comm.members) <= set(self.train.members):
            own = None  # one of them has another name now: what was dealt to the old one is nobody's
        if own:
            self.strategy.load_own_state(own["strategy"])
            self._now, self._trained = Position(**own["now"]), own["trained"]
            self._samples, self._loss = own["samples"], _Mean(*own["loss"])
            set_random_state(own["random"], self.device)
        return own is not None

    def agreed_state(self) -> dict[str, Any]:
        return self._common_state(self.strategy.agreed_state())

    def load_agreed_state(self, state: dict[str, Any]) -> None:
        self._settled = None
        self.strategy.load_agreed_state(state["strategy"])
        self._now = self._agreed = Position(**state["now"])
        self._last_epoch = self._now.epoch
        self.total_steps = state["total_steps"]
        if isinstance(self.train, SharedWork):
            self.train.load_state_dict(state["work"])
        self._trained = {}
        self._settled = self.strategy.agreements

    def _enter(self) -> int:
        """Come to one state with the others; returns the digest of the weights that ranks agree on."""
        if self._begun and not self.comm.amid_round:
            self.load_agreed_state(self.agreed_state())
        entered = enter(self.comm, self)
        if not self._begun:
            self._begun, self._ranks = True, self.comm.world_size
            if self.resume or entered.checkpoint is not None:
                anew = not entered.exactly and bool(self.strategy.own_state())
                self._emit("resume", round=self._now.rounds, exactly=entered.exactly, anew=anew)
        elif entered.received:
            self.comm.rejoined()
        self._digest = self.digest()
        return self._digest

    def _announce(self) -> None:
        parameters = self.strategy.parameters.num_parameters
        steps = {"steps_per_epoch": self.train.steps_per_epoch, "total_steps": self.total_steps}
        self.events(
            {"type": "start", "rank": self.comm.rank, **steps, "trainable": parameters, "device": str(self.device)}
        )

    def _emit_step(self, result: StepResult, mean: _Mean, samples: int, seconds: float) -> None:
        # A round tells its own.
        without_rounds = result.agreed and result.round is None
        self._emit(
            "step",
            loss=mean.value(),
            lr=result.lr,
            tokens=mean.weight,
            samples=samples,
            seconds=seconds,
            grad_norm=result.grad_norm,
            bytes=result.bytes,
            memory=devices.memory_in_use(self.device),
            **({"seconds_communicating": result.seconds_communicating} if without_rounds else {}),
        )

    def _emit(self, kind: str, **values: float | int | None) -> None:
        at = {"epoch": self._last_epoch, "step": self._now.step}
        self.events({"type": kind, "rank": self.comm.rank, **at, **values})


@dataclass
class _Mean:
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


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    """Put each module back into train or eval mode as it was."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _total_steps(steps_per_epoch: int, epochs: int | None, max_steps: int | None) -> int:
    if epochs is None and max_steps is None:
        raise SettingError("give epochs or max_steps")
    if steps_per_epoch < 1:
        raise SettingError("there is nothing to train on: an epoch has no steps")
    limits = [max_steps] if epochs is None else [epochs * steps_per_epoch, *([max_steps] if max_steps else [])]
    if min(limits) < 1:
        raise SettingError(f"nothing to do: epochs = {epochs}, max_steps = {max_steps}")
    return min(limits)
