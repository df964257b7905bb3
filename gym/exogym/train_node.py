"""The training loop of one rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from exogym import device as devices
from exogym.batches import Batch, BatchSource, count_samples, tensors, to_device
from exogym.checkpoint import Checkpoints, newest_common, random_state, set_random_state
from exogym.communication import Comm
from exogym.errors import CheckpointError, ExogymError, NotFinite, SettingError
from exogym.logger import Events, NullLogger
from exogym.strategy.strategy import StepResult, Strategy


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


class TrainNode:
    """Trains `model` as rank `comm.rank`, together with whoever else is in `comm`.

    The model is called as `model(batch)` and returns a mean loss, or `(mean loss, weight)` with the number of target
    tokens that the mean is over; a bare loss has the number of samples for its weight. Ranks may have unequal shares.
    It runs for `epochs` or `max_steps` optimizer steps, whichever ends first. Validation falls due every `val_interval`
    steps, or at the end of each epoch, and takes place once ranks next agree: in between each has its own weights.
    `should_stop` is asked at every step; when it says yes on any rank, all ranks stop at the same agreed weights.

    With `checkpoints` each rank keeps its own state: after every `checkpoint_interval` agreements (rounds, or steps of
    a strategy without rounds; 0: never), and when it is stopped. `resume` goes on from the newest that all ranks have,
    bit for bit as if nothing had happened; from the start if there is none. A checkpoint that cannot be written is a
    "warning" event, and training goes on.

    events gets dicts with `type` start, resume, step, round (at each agreement of a strategy that has rounds, on every
    rank), validation, checkpoint, stop or warning.
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
    ):
        self.model, self.comm, self.strategy = model, comm, strategy
        self.train, self.val, self.val_interval = train, val, val_interval
        self.device = devices.choose(device, local_rank=comm.rank)
        self.precision = precision
        self.events = events or NullLogger()
        self.should_stop = should_stop
        self.checkpoints, self.checkpoint_interval, self.resume = checkpoints, checkpoint_interval, resume
        self.total_steps = _total_steps(train.steps_per_epoch, epochs, max_steps)
        self._step = self._rounds = self._samples = 0
        self._loss = _Mean()
        self._val_loss: float | None = None
        self._validated_at = 0
        self._validation_due = False
        self._digest: int | None = None
        self._shapes: list[torch.Size] = []

    def run(self) -> TrainResult:
        """Raises PeerLost, RanksDiverged, NotFinite."""
        started = time.perf_counter()
        with _modes_kept(self.model):
            self.model.to(self.device).train()
            self.model.zero_grad(set_to_none=True)
            self.strategy.setup(self.model, self.comm, self.total_steps)
            self._announce()
            if self.resume:
                self._resume()
            stopped = self._catch_up() or self._all_steps()
            last = None if stopped else self.strategy.finish()
            if last:
                self._after_agreement(last)
                stopped = last.stop
            if not stopped and self._validated_at < self._step:
                self._validate()
            if stopped:
                self._save()
        return TrainResult(
            steps=self._step,
            rounds=self._rounds,
            samples=self._samples,
            train_loss=self._loss.value(),
            val_loss=self._val_loss,
            digest=self._digest,
            stopped=stopped,
            bytes_sent=self.comm.bytes_sent,
            seconds=time.perf_counter() - started,
            seconds_communicating=self.comm.seconds,
        )

    def _all_steps(self) -> bool:
        """True if somebody asked to stop."""
        for batches in self._work():
            result = self._one_step(batches)
            if result.stop:
                return True
            self._at_agreement(result)
        return False

    def _catch_up(self) -> bool:
        """End the round that a stop cut short when this rank was through with it. True if somebody asks to stop."""
        result = self.strategy.catch_up()
        if result is None:
            return False
        self._after_agreement(result)
        if not result.stop:
            self._at_agreement(result)
        return result.stop

    def _at_agreement(self, result: StepResult) -> None:
        if not result.agreed or self._step == self.total_steps:
            return
        if self._validation_due:
            self._validate()
        if self.checkpoint_interval and self.strategy.agreements % self.checkpoint_interval == 0:
            self._save()

    def _work(self) -> Iterator[list[Batch]]:
        """Micro-batches of each step of the run. Every rank must make the same number of steps."""
        while self._step < self.total_steps:
            epoch, first = divmod(self._step, self.train.steps_per_epoch)
            if first == 0:
                self._loss = _Mean()
            promised = (epoch + 1) * self.train.steps_per_epoch
            for batches in self.train.epoch(epoch, first_step=first) if first else self.train.epoch(epoch):
                yield batches
                if self._step in (self.total_steps, promised):
                    break
            if self._step < min(promised, self.total_steps):
                missing = f"{promised - self._step} of the {self.train.steps_per_epoch} steps it promised"
                raise ExogymError(f"rank {self.comm.rank}: epoch {epoch} of the batch source lacks {missing}")

    def _one_step(self, batches: list[Batch]) -> StepResult:
        started = time.perf_counter()
        mean, samples = _Mean(), 0
        for batch in batches:
            samples += self._accumulate(batch, mean)
        result = self.strategy.step(mean.weight, samples if mean.weight else 0, stopping=bool(self.should_stop()))
        self.model.zero_grad(set_to_none=True)
        self._step += 1
        self._samples += samples
        self._loss.add(mean.total, mean.weight)
        self._emit_step(result, mean, samples, time.perf_counter() - started)
        if self.val_interval:
            self._validation_due |= self._step % self.val_interval == 0
        else:
            self._validation_due |= self._step % self.train.steps_per_epoch == 0
        self._after_agreement(result)
        return result

    def _accumulate(self, batch: Batch, mean: _Mean) -> int:
        """Add one micro-batch's weighted gradient and loss; returns its number of samples."""
        loss, weight, samples = self._forward(batch)
        if weight > 0:  # a mean over no token at all is NaN
            value = loss.item()
            if not math.isfinite(value):
                raise NotFinite(f"the loss is {value} on rank {self.comm.rank}, step {self._step + 1}")
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
        mean = _Mean()
        with _modes_kept(self.model), torch.no_grad():
            self.model.eval()
            for batches in self.val.epoch(0):
                for batch in batches:
                    loss, weight, _ = self._forward(batch)
                    if weight > 0:
                        mean.add(loss.item() * weight, weight)
        sums = torch.tensor([mean.total, mean.weight], dtype=torch.float64)
        self.comm.all_reduce_(sums)
        self._val_loss = _Mean(*sums.tolist()).value()
        self._validation_due, self._validated_at = False, self._step
        self._emit("validation", loss=self._val_loss)

    def _after_agreement(self, result: StepResult) -> None:
        self._digest = result.digest if result.agreed else self._digest
        spent = {"bytes": result.bytes, "seconds": result.seconds_communicating}
        if result.stop:
            self._emit("stop", round=result.round, digest=result.digest, **spent)
        elif result.round is not None:
            self._rounds = result.round
            self._emit("round", round=result.round, digest=result.digest, **spent)

    def _save(self) -> None:
        if self.checkpoints is None:
            return
        started = time.perf_counter()
        # A state inside a round is later than the agreement before it, and earlier than the next one.
        number = 2 * self.strategy.agreements + self.strategy.cut_short
        try:
            written = self.checkpoints.save(number, self._state_dict())
        except CheckpointError as error:
            self._emit("warning", what=str(error))
            return
        spent = {"bytes": written, "seconds": time.perf_counter() - started}
        self._emit("checkpoint", round=self.strategy.agreements, **spent)

    def _state_dict(self) -> dict[str, Any]:
        return {
            "fits": self._fits(),
            "step": self._step,
            "samples": self._samples,
            "rounds": self._rounds,
            "loss": [self._loss.total, self._loss.weight],
            "val_loss": self._val_loss,
            "validated_at": self._validated_at,
            "validation_due": self._validation_due,
            "random": random_state(self.device),
            "strategy": self.strategy.state_dict(),
        }

    def _fits(self) -> dict[str, Any]:
        """What must be the same for a state to be of any use."""
        return {
            "rank": self.comm.rank,
            "ranks": self.comm.world_size,
            "strategy": type(self.strategy).__name__,
            "layout of the model": self.strategy.parameters.layout(),
            "steps in all": self.total_steps,
            "steps in an epoch": self.train.steps_per_epoch,
        }

    def _resume(self) -> None:
        """Raises CheckpointError."""
        number = newest_common(self.comm, self.checkpoints.good() if self.checkpoints else [])
        if number is None and self.checkpoints and (damaged := self.checkpoints.damaged()):
            raise CheckpointError(f"{self.checkpoints.folder}: all checkpoints are damaged ({len(damaged)})")
        if number is not None:
            state = self.checkpoints.load(number)
            for what, now in self._fits().items():
                if state["fits"].get(what) != now:
                    was = f"{what} was {state['fits'].get(what)}, and is {now}"
                    raise CheckpointError(f"{self.checkpoints.folder} is of another run: {was}")
            self.strategy.load_state_dict(state["strategy"])
            self._step, self._samples, self._rounds = state["step"], state["samples"], state["rounds"]
            self._loss = _Mean(*state["loss"])
            self._val_loss, self._validated_at = state["val_loss"], state["validated_at"]
            self._validation_due = state["validation_due"]
            set_random_state(state["random"], self.device)
        self._emit("resume", round=self._rounds)

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
        epoch = max(0, self._step - 1) // self.train.steps_per_epoch
        self.events({"type": kind, "rank": self.comm.rank, "epoch": epoch, "step": self._step, **values})


@dataclass
class _Mean:
    total: float = 0.0
    weight: float = 0.0

    def add(self, total: float, weight: float) -> None:
        self.total += total
        self.weight += weight

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
