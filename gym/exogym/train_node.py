"""The training loop of one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from exogym import device as devices
from exogym.batches import Batch, BatchSource, count_samples, sample_ids, tensors, to_device
from exogym.comm.comm import Comm
from exogym.elastic_sampler import SharedWork
from exogym.errors import ExogymError, NotFinite, PeerLost, Rejoined
from exogym.flat import digest
from exogym.logger import Events, NullLogger
from exogym.membership.messages import END, ENTER, ROUND, SHARES, SYNC, VALIDATION
from exogym.state.checkpoint import Checkpoints
from exogym.state.node_state import RESCUE_S, Mean, NodeState
from exogym.state.state_sync import enter
from exogym.strategy.strategy import StepResult, Strategy

SPEED_MEMORY = 0.9  # of a step's speed in the next
MOST_UNEQUAL = 5.0  # no rank gets so many times more, or less, than the mean
MOST_SKIPPED = 5  # steps in a row without a finite loss, before the run ends
NAMED = 8  # clips at most in a message


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
    Where it was just dealt out anew it waits for the agreement after that, since its data may be on their way.
    `should_stop` is asked at every step; when it says yes on any rank, all ranks stop at the same agreed weights.

    With `checkpoints` each rank keeps its own state: after every `checkpoint_interval` agreements (rounds, or steps of
    a strategy without rounds; 0: never), when it is given the state of others, and when it is stopped. `resume` goes on
    from the newest that all ranks have, bit for bit as if nothing had happened. If there is none that all have, the
    newest that any has is given to the others, whose inner optimizers start anew; if nobody has one, training starts
    from the beginning. Epochs, ranks and device may be others then; another model, strategy or data set is refused.
    A checkpoint that cannot be written is a "warning" event, and training goes on.

    What gives a loss or gradient that is not finite is left out, with a "warning" event; NotFinite after MOST_SKIPPED
    steps in a row.

    In an ElasticComm ranks may be lost, and may come (back) between rounds. What a lost rank trained since the last
    agreement is dealt out again if `train` is SharedWork; else losing one ends the run with PeerLost. With
    `auto_shares` it is dealt in proportion to the ranks' measured speeds, anew at every epoch: faster ranks then have
    larger batches, and a run cannot be repeated bit for bit.

    events gets dicts with `type` start, resume, plan (work was dealt out anew), step, round (at each agreement of a
    strategy that has rounds, on every rank), drift (ranks had come to differ by rounding, and do no more), validation,
    checkpoint, stop or warning.
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
        limits = {"epochs": epochs, "max_steps": max_steps}
        about = {"device": self.device, "resume": resume, "emit": self._emit}
        self.state = NodeState(strategy, train, comm, checkpoints, **limits, **about)
        self._epochs, self._auto_shares = epochs, auto_shares
        self._last_epoch = 0
        self._ranks = comm.world_size
        self._dealt_anew = self._received = False
        self._speed = Mean()  # samples a second, over the last steps
        self._skipped = self._skipped_in_a_row = 0
        self._too_many_skipped: NotFinite | None = None
        self._shapes: list[torch.Size] = []

    def run(self) -> TrainResult:
        """Raises PeerLost, RanksDiverged, NotFinite, CheckpointError."""
        started = time.perf_counter()
        with _modes_kept(self.model):
            self.model.to(self.device).train()
            self.model.zero_grad(set_to_none=True)
            self.strategy.setup(self.model, self.comm, self.state.total_steps)
            self._announce()
            self.comm.on_commit = self._on_commit
            self.comm.enter(self._enter)
            stopped = self._until_the_end()
            self.state.note_written(at_once=True)
        state = self.state
        return TrainResult(
            steps=state.now.step,
            rounds=state.now.rounds,
            samples=state.samples,
            train_loss=state.loss.value(),
            val_loss=state.now.val_loss,
            digest=digest(self.strategy.agreed_weights()),
            stopped=stopped,
            bytes_sent=self.comm.bytes_sent,
            seconds=time.perf_counter() - started,
            seconds_communicating=self.comm.seconds,
        )

    def save_agreed(self, patience_s: float = RESCUE_S) -> bool:
        """See NodeState.save_agreed."""
        return self.state.save_agreed(patience_s)

    # Coming together.

    def _enter(self) -> int:
        """Come to one state with the others; returns its fingerprint."""
        state, is_new = self.state, not self.state.has_entered
        if self.checkpoints:
            state.settings()  # looks at the data, which nothing should do while they are trained on
        if not is_new and not self.comm.amid_round:
            state.back_to_agreed()
        if state.work is None:
            self._match_lengths()
        entered = enter(self.comm, state)
        state.begin(entered.term, is_given=entered.received)
        self._received = self._received or (entered.received and self.strategy.agreements > 0)
        if is_new:
            if self.resume or entered.checkpoint is not None:
                anew = not state.has_own and bool(self.strategy.own_state())
                self._emit("resume", round=state.now.rounds, exactly=entered.exactly, anew=anew)
        elif entered.received:
            self.comm.rejoined()
        return entered.fingerprint

    def _match_lengths(self) -> None:
        """Data sets that ranks have made for themselves may give unequally many steps."""
        steps = self.comm.all_gather(torch.tensor([self.train.steps_per_epoch]))
        longest = max(int(count) for count in steps)
        if getattr(self.train, "may_be_lengthened", False) and self.train.steps_per_epoch != longest:
            self.state.lengthen(longest)
            self._emit("plan", total_steps=self.state.total_steps, hosts=self.comm.world_size)

    def _on_commit(self, what: str) -> None:
        if what == ENTER:
            self.state.entered()
        elif what == ROUND:
            self.state.begin_change()

    def _until_the_end(self) -> bool:
        """True if somebody asked to stop."""
        while True:
            try:
                stopped = self._train()
                self.comm.together(END, lambda: None)
                return stopped
            except Rejoined:
                self.model.zero_grad(set_to_none=True)
                self._last_epoch = self.state.now.epoch
                self._emit("resume", round=self.state.now.rounds)

    # The loop. What ranks do together, and in which order, is decided by their common state alone: so a rank that has
    # just been given this state does the same as those who have gone through it.

    def _train(self) -> bool:
        """From the state as it is to the end of the work. True if somebody asked to stop."""
        if self._received and self.checkpoint_interval:
            self.state.save()  # whoever gave it may be gone when this rank has to go on from it
        self._received, stopped = False, False
        if self.state.is_inside:
            stopped = self._catch_up()
        else:
            self._at_agreed_point()
        while not stopped:
            stopped = self._all_steps() or self._finish()
            # What a rank lost in the last round had left undone is dealt out again.
            if not self._work_left():
                break
        if self.strategy.is_sync_due(at_least=True) and not self.strategy.cut_short:
            self._sync()
        if stopped:
            self.state.save(at_once=True)
        elif self.state.now.validated_at < self.state.now.step:
            self._validate()
        return stopped

    def _all_steps(self) -> bool:
        """True if somebody asked to stop."""
        while self._work_left():
            self._dealt_anew = False
            for batches in self._epoch():
                self.comm.look_up()
                result = self._one_step(batches)
                if result.agreed:
                    self._after_agreement(result)
                if self._too_many_skipped:
                    raise self._too_many_skipped
                if result.stop:
                    return True
                if self._dealt_anew:
                    break
        return False

    def _finish(self) -> bool:
        """End the last, short round. True if somebody asked to stop."""
        self._tell_place()
        last = self.strategy.finish()
        if last:
            self._after_agreement(last)
        return last is not None and last.stop

    def _catch_up(self) -> bool:
        """End the round that a stop cut short when this rank was through with it. True if somebody asks to stop."""
        self._tell_place()
        result = self.strategy.catch_up()
        if result:
            self._after_agreement(result)
        return result is not None and result.stop

    def _after_agreement(self, result: StepResult) -> None:
        state, spent = self.state, {"bytes": result.bytes, "seconds": result.seconds_communicating}
        if result.stop:
            self._emit("stop", round=result.round, digest=result.digest, **spent)
        elif result.round is not None:
            state.now = replace(state.now, rounds=result.round)
            self._emit("round", round=result.round, digest=result.digest, **spent)
        if not self.strategy.cut_short:
            state.settle(self.comm.members)
        state.end_change()
        if result.stop:
            return
        interval = self.checkpoint_interval
        is_save_due = interval > 0 and self.strategy.agreements % interval == 0
        if self.strategy.is_sync_due(at_least=is_save_due):
            self._sync()
        self.comm.regroup()
        self._at_agreed_point()
        if is_save_due and self._work_left():
            state.save()

    def _at_agreed_point(self) -> None:
        self._deal()
        now = self.state.now
        if now.validation_due and not now.validation_waits and self._work_left():
            self._validate()

    def _work_left(self) -> bool:
        return self.state.now.step < self.state.total_steps

    def _epoch(self) -> Iterator[list[Batch]]:
        """Micro-batches of each step of the epoch. Every rank must make the same number of steps."""
        epoch, first = self.state.now.epoch, self.state.now.in_epoch
        if first == 0:
            self.state.loss = Mean()
        promised = self.state.steps_in(epoch)
        for batches in self.train.epoch(epoch, first_step=first) if first else self.train.epoch(epoch):
            yield batches
            first += 1
            if first == promised or not self._work_left():
                break
        if first < promised and self._work_left():
            missing = f"{promised - first} of the {promised} steps it promised"
            raise ExogymError(f"rank {self.comm.rank}: epoch {epoch} of the batch source lacks {missing}")

    # One step.

    def _one_step(self, batches: list[Batch]) -> StepResult:
        started, state = time.perf_counter(), self.state
        mean, samples, bad = Mean(), 0, []
        trained = state.trained.setdefault(state.now.epoch, [])
        for batch in batches:
            samples += self._accumulate(batch, mean, bad)
            trained += sample_ids(batch)
        communicating = self.comm.seconds
        result = self._strategy_step(mean.weight, samples)
        computing = time.perf_counter() - started - (self.comm.seconds - communicating)
        self._speed.fade(SPEED_MEMORY)
        self._speed.add(samples, computing if samples else 0.0)
        self.model.zero_grad(set_to_none=True)
        state.samples += samples
        state.loss.add(mean.total, mean.weight)
        self._emit_step(result, mean, samples, time.perf_counter() - started)
        self._note_skipped(result, mean, bad, batches)
        state.note_written()
        return result

    def _strategy_step(self, weight: float, samples: int) -> StepResult:
        state = self.state
        before = state.now
        is_last = before.in_epoch + 1 == state.steps_in(before.epoch)
        now = replace(before, step=before.step + 1, in_epoch=before.in_epoch + 1)
        due = now.step % self.val_interval == 0 if self.val_interval else is_last
        now = replace(now, validation_due=now.validation_due or due)
        if is_last:
            now = replace(now, epoch=state.next_epoch(now.epoch + 1), in_epoch=0)
        self._tell_place(now.place)
        result = self.strategy.step(weight, samples if weight else 0, stopping=bool(self.should_stop()))
        state.now, self._last_epoch = now, before.epoch
        return result

    def _tell_place(self, place: tuple[int, ...] | None = None) -> None:
        """What goes with this rank's next vote on a round."""
        self.comm.trained, self.comm.position = self.state.trained, place or self.state.now.place

    def _accumulate(self, batch: Batch, mean: Mean, bad: list[str]) -> int:
        """Add one micro-batch's weighted gradient and loss; returns its number of samples, 0 if it does not count."""
        buffers = self.strategy.parameters.read_buffers()
        loss, weight, samples = self._forward(batch)
        if weight > 0:  # a mean over no token at all is NaN
            value = loss.item()
            if not isfinite(value):
                self.strategy.parameters.write_buffers(buffers)
                bad += [*sample_ids(batch)] if bad else [f"the loss is {value}", *sample_ids(batch)]
                return 0
            (loss * weight).backward()
            mean.add(value * weight, weight)
        return samples

    def _note_skipped(self, result: StepResult, mean: Mean, bad: list[str], batches: list[Batch]) -> None:
        """Once the step is over, one time too many in a row ends the run."""
        if not bad and not result.skipped:
            self._skipped_in_a_row = 0 if mean.weight else self._skipped_in_a_row
            return
        what, *clips = bad or [result.skipped, *(name for batch in batches for name in sample_ids(batch))]
        names = f" ({', '.join(clips[:NAMED])}{' ...' if len(clips) > NAMED else ''})" if clips else ""
        whole = bool(result.skipped) or not mean.weight
        self._skipped += 1
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if whole else 0
        at = f"step {self.state.now.step} of rank {self.comm.rank}"
        if self._skipped_in_a_row >= MOST_SKIPPED:
            what = f"{what} at {at}{names}, as in the {MOST_SKIPPED - 1} steps before"
            self._too_many_skipped = NotFinite(f"{what}; a smaller learning rate or max_norm may help, or other clips")
            return
        self._emit("warning", what=f"{what} at {at}{names}: left out", skipped=self._skipped)

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

    # What ranks do together between rounds.

    def _sync(self) -> None:
        """Where machines of different arithmetic have drifted apart, all take on the weights of rank 0."""
        if self.comm.world_size == 1:
            return
        taken = self.comm.together(SYNC, self._weights_of_rank_0)
        if taken is not None:
            apart = (taken - self.strategy.agreed_weights()).abs().max().item()
            self.state.take_weights(taken)
            self._emit("drift", difference=apart)

    def _weights_of_rank_0(self) -> Tensor | None:
        """None if they are everybody's."""
        weights = self.strategy.agreed_weights()
        digests = [int(value) for value in self.comm.all_gather(torch.tensor([digest(weights)]))]
        if all(value == digests[0] for value in digests):
            return None
        taken = weights.clone()
        self.comm.broadcast_(taken)
        return taken

    def _validate(self) -> None:
        if self.val is None:
            return
        sums = self.comm.together(VALIDATION, self._validation_sums)
        loss = Mean(*sums.tolist()).value()
        self.state.validated(loss)
        self._emit("validation", loss=loss)

    def _validation_sums(self) -> Tensor:
        """Over all ranks: the sum of the losses, and of their weights."""
        self._deal_validation()
        mean = Mean()
        with _modes_kept(self.model), torch.no_grad():
            self.model.eval()
            for batches in self.val.epoch(0):
                self.comm.alive()
                for batch in batches:
                    loss, weight, _ = self._forward(batch)
                    if weight > 0 and isfinite(value := loss.item()):
                        mean.add(value * weight, weight)
        sums = torch.tensor([mean.total, mean.weight], dtype=torch.float64)
        self.comm.all_reduce_(sums)
        return sums

    def _deal(self) -> None:
        """Deal out anew what is left, if it was dealt to others than those who are here now."""
        members, work = self.comm.members, self.state.work
        if work is None:
            if len(members) != self._ranks:
                what = f"{type(self.train).__name__} cannot be dealt out anew"
                raise PeerLost(f"{self._ranks} ranks had begun, now there are {len(members)}, and {what}")
            return
        is_share_due = self._auto_shares and work.first_epoch > self.state.now.dealt_in and len(members) > 1
        if members == work.members and not work.is_stale and not is_share_due:
            return
        weights = self._weights() if self._auto_shares else None
        self.state.deal(self.comm.members, weights)  # one may have been lost meanwhile
        work.expect(self._epochs)
        self._deal_validation()
        self._dealt_anew = True
        self._emit("plan", total_steps=self.state.total_steps, hosts=len(self.comm.members))

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

    # Events.

    def _announce(self) -> None:
        parameters = self.strategy.parameters.num_parameters
        steps = {"steps_per_epoch": self.train.steps_per_epoch, "total_steps": self.state.total_steps}
        self.events(
            {"type": "start", "rank": self.comm.rank, **steps, "trainable": parameters, "device": str(self.device)}
        )

    def _emit_step(self, result: StepResult, mean: Mean, samples: int, seconds: float) -> None:
        # A round tells its own.
        without_rounds = result.agreed and result.round is None
        norm = result.grad_norm
        self._emit(
            "step",
            loss=mean.value(),
            lr=result.lr,
            tokens=mean.weight,
            samples=samples,
            seconds=seconds,
            grad_norm=norm if norm is not None and isfinite(norm) else None,
            bytes=result.bytes,
            memory=devices.memory_in_use(self.device),
            **({"seconds_communicating": result.seconds_communicating} if without_rounds else {}),
        )

    def _emit(self, kind: str, **values: Any) -> None:
        at = {"epoch": self._last_epoch, "step": self.state.now.step}
        self.events({"type": kind, "rank": self.comm.rank, **at, **values})


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    """Put each module back into train or eval mode as it was."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
