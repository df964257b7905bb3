"""The training loop of one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import nn

from exogym import device as devices
from exogym.comm.comm import Comm
from exogym.config import refuse
from exogym.errors import ExogymError, Rejoined
from exogym.flat import digest
from exogym.logger import Events, NullLogger
from exogym.logger.event import Mean
from exogym.membership.messages import CORRELATION, END, ROUND
from exogym.micro_batches import Forward, accumulate
from exogym.rounds.hidden import HiddenRounds, Spent
from exogym.rounds.progress import NonFiniteGuard, Progress, waited_for
from exogym.rounds.shares import Shares
from exogym.rounds.validation import Validation, mean_correlation, modes_kept
from exogym.samplers.batches import Batch, BatchSource
from exogym.samplers.elastic import sampler_of
from exogym.settings import LoopSettings
from exogym.state.checkpoint import Checkpoints
from exogym.state.node_state import NodeState
from exogym.state.position import Position, RunLength
from exogym.state.saved_states import RESCUE_S, SavedStates
from exogym.state.state_sync import Synced, remove_drift, sync_state
from exogym.strategy import communicate
from exogym.strategy.strategy import StepResult, Strategy


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a rank can say at the end. Losses are means per target token (or per sample, see TrainNode).

    train_loss: this rank's, over its last epoch; val_loss: over all ranks, of the weights that the model has now; None
    if there was none. best_step: whose weights these are, with keep_best.
    digest: hash of the agreed weights, the same on all ranks. stopped: somebody asked to stop before the end.
    """

    steps: int
    rounds: int
    samples: int
    train_loss: float | None
    val_loss: float | None
    best_step: int | None
    digest: int | None
    stopped: bool
    bytes_sent: int
    seconds: float
    seconds_communicating: float


class TrainNode:
    """Trains `model` as rank `comm.rank`, together with whoever else is in `comm`.

    The model is called as `model(batch)` and returns a mean loss, or `(mean loss, weight)` with the number of target
    tokens that the mean is over; a bare loss has the number of samples for its weight. Ranks may have unequal shares.
    `should_stop` is asked at every step; when it says yes on any rank, all ranks stop at the same agreed weights.
    With `checkpoints` each rank keeps its own state; one that cannot be written is a "warning" event.
    What gives a loss or gradient that is not finite is left out, with a "warning" event.

    In an ElasticComm ranks may be lost, and may come (back) between rounds. What a lost rank trained since the last
    agreement is resharded if `train` is an ElasticSampler; else losing one ends the run with PeerLost.

    events gets dicts with `type` start, resume, plan (work was resharded), shares (anew by speed), step, round (at each
    agreement of a strategy that has rounds, on every rank), drift (ranks had come to differ by rounding, and do no
    more), validation, correlation (see LoopSettings), checkpoint, stop or warning.
    The caller owns `comm` and closes it, also after an exception.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        strategy: Strategy,
        train: BatchSource,
        settings: LoopSettings,
        *,
        val: BatchSource | None = None,
        events: Events | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        checkpoints: Checkpoints | None = None,
    ):
        self.model, self.comm, self.strategy, self.settings = model, comm, strategy, settings
        self.should_stop = should_stop
        self.device = devices.choose(settings.device, local_rank=comm.rank)
        self.train = sampler_of(train, comm.members)
        strategy.stretches = self.train.has_larger_steps
        length = RunLength(settings.num_epochs, settings.max_steps)
        self.state = NodeState(model, strategy, self.train, length, self.device, patience=settings.early_stopping)
        self.progress = Progress(events or NullLogger(), comm, self.state)
        self.saved = SavedStates(checkpoints, self.state, comm, resume=settings.resume, emit=self.progress.emit)
        self._forward = Forward(model, self.device, settings.precision)
        self._guard = NonFiniteGuard(self.progress)
        about = {"keep_best": settings.keep_best}
        self._validation = Validation(val, model, self._forward, comm, self.state, self.progress, **about)
        if val is None:
            refuse("without validation data", early_stopping=settings.early_stopping or None)
            refuse("without validation data", keep_best=settings.keep_best or None)
        self.shares = Shares(self.state, comm, settings)
        self._hidden = HiddenRounds(self.state, comm, settings, validates=self._validation.has_data)
        self._was_given_state = False  # that of the others, after they had agreed on some
        self._was_resharded = False
        self._correlation: float | None = None  # of the last round
        self._waited = 0.0  # for the batches of this step

    def run(self) -> TrainResult:
        """Raises PeerLost, RanksDiverged, NotFinite, CheckpointError."""
        started, state = time.perf_counter(), self.state
        with modes_kept(self.model), communicate.use(self.comm):
            self.model.to(self.device).train()
            self.model.zero_grad(set_to_none=True)
            self.strategy.setup(self.model, self.comm, state.total_steps)
            try:
                self.progress.start(self.device, self.settings)
                self.comm.join(self)
                stopped = self._until_all_have_ended()
                best_step = None if stopped else self._take_best()
                self.saved.note_written(at_once=True)
            finally:
                self.strategy.close()
        return TrainResult(
            steps=state.now.step,
            rounds=state.now.rounds,
            samples=state.samples,
            train_loss=state.loss.value(),
            val_loss=state.now.val_loss if best_step is None else state.now.best_loss,
            best_step=best_step,
            digest=digest(self.strategy.agreed_weights() if best_step is None else state.best_weights),
            stopped=stopped,
            bytes_sent=self.comm.bytes_sent,
            seconds=time.perf_counter() - started,
            seconds_communicating=self.comm.seconds,
        )

    def save_agreed(self, patience_s: float = RESCUE_S) -> bool:
        """See SavedStates.save_agreed."""
        return self.saved.save_agreed(patience_s)

    # A Member, see comm.py: what a rank does when its communicator has formed a group.

    def sync_state(self) -> tuple[int, bool]:
        state, is_new = self.state, not self.state.has_synced
        self.saved.look_at_data()
        if not is_new and not self.comm.continues_round:
            state.revert_to_agreed()
        if state.sampler.agree_on_length(self.comm):
            state.lengthened()
            self.progress.planned()
        synced = sync_state(self.comm, state, self.saved)
        state.begin(synced.term, is_given=synced.received)
        self._was_given_state |= synced.received and state.strategy.agreements > 0
        if is_new:
            self._tell_resumed(synced)
        return synced.fingerprint, synced.received and not is_new

    def has_synced(self) -> None:
        self.state.begun()

    def _tell_resumed(self, synced: Synced) -> None:
        if self.settings.resume or synced.checkpoint is not None:
            state = self.state
            anew = not state.has_own and bool(state.strategy.own_state())
            self.progress.emit("resume", round=state.now.rounds, exactly=synced.exactly, anew=anew)

    def _until_all_have_ended(self) -> bool:
        """True if somebody asked to stop."""
        while True:
            try:
                stopped = self._train()
                self.comm.commit_together(END, lambda: None)
                return stopped
            except Rejoined:
                self._hidden.begin_round()
                self.model.zero_grad(set_to_none=True)
                self.progress.epoch = self.state.now.epoch
                self.progress.emit("resume", round=self.state.now.rounds)

    def _take_best(self) -> int | None:
        """Once all have ended: what ranks have in common stays as it is, for those who go on from it."""
        state = self.state
        if state.ends_early:
            self.progress.emit("early_stop", validations=state.now.not_better, total_steps=state.total_steps)
        if not self.settings.keep_best or state.best_weights is None:
            return None
        self.strategy.parameters.write(state.best_weights)
        self.progress.emit("best", best_step=state.now.best_at, loss=state.now.best_loss)
        return state.now.best_at

    # What ranks do together, and in which order, is decided by their common state alone: so a rank that has just been
    # given this state does the same as those who have gone through it.

    def _train(self) -> bool:
        """From the state as it is to the end of the work. True if somebody asked to stop."""
        if self._was_given_state and self.settings.checkpoint_interval:
            self.saved.save()  # whoever gave it may be gone when this rank has to go on from it
        self._was_given_state, stopped = False, False
        if self.state.is_mid_round:
            stopped = self.strategy.is_round_due and self._end_open_round(may_hide=True)
        else:
            self._at_agreed_point()
        while not stopped:
            stopped = self._all_steps() or self._end_open_round()
            # What a lost rank had left undone in the last round is resharded.
            if not self.state.work_is_left and not self.strategy.has_open_round:
                break
        self._come_to_same_weights(stopped)
        if not stopped and self.state.now.validated_at < self.state.now.step:
            self._validation.run()
        return stopped

    def _come_to_same_weights(self, stopped: bool) -> None:
        """At the end. What is saved is this rank's state before it takes on the mean of all."""
        if self.strategy.differs:
            if stopped:
                self.saved.save(at_once=True)
            remove_drift(self.comm, self.state)
            return
        if not self.strategy.cut_short:
            self._check_drift(is_needed=True)
        if stopped:
            self.saved.save(at_once=True)

    def _all_steps(self) -> bool:
        """True if somebody asked to stop."""
        while self.state.work_is_left:
            self._was_resharded = False
            for batches in self._epoch():
                if not self._hidden.is_under_way:  # no other group may form while collectives run in this one
                    self.comm.check_for_call()
                result = self._one_step(batches)
                if result.agreed:
                    self._after_agreement(result)
                if result.stop:
                    return True
                if self._was_resharded:
                    break
        return False

    def _epoch(self) -> Iterator[list[Batch]]:
        """Micro-batches of each step of the epoch. Every rank must make the same number of steps."""
        epoch, first = self.state.now.epoch, self.state.now.in_epoch
        if first == 0:
            self.state.loss = Mean()
        promised = self.train.steps_in(epoch)
        for batches, waited in waited_for(self.train.epoch(epoch, first_step=first)):
            self._waited = waited
            yield batches
            first += 1
            if first == promised or not self.state.work_is_left:
                break
        if first < promised and self.state.work_is_left:
            missing = f"{promised - first} of the {promised} steps it promised"
            raise ExogymError(f"rank {self.comm.rank}: epoch {epoch} of the batch source lacks {missing}")

    def _one_step(self, batches: list[Batch]) -> StepResult:
        started, spent, state = time.perf_counter(), self._spent(), self.state
        before, after = state.now, state.after_one_step(self.settings.val_interval)
        self._hidden.ask_ahead()
        version = self.strategy.parameters.version
        work = accumulate(batches, self._forward, self.strategy.parameters, self.strategy.no_sync)
        self.strategy.passes_change_weights |= self.strategy.parameters.version != version
        state.trained.setdefault(before.epoch, []).extend(work.ids)
        state.samples += work.samples
        state.loss.add(work.loss.total, work.loss.weight)
        cost = self.train.cost((before.epoch, before.in_epoch), work.samples)
        stopping = self._hidden.may_stop(bool(self.should_stop()))
        self.strategy.samples_in_step = self.train.samples_in_step(before.epoch)
        result = self.strategy.local_step(work.loss.weight, work.samples if work.loss.weight else 0)
        result = self._end_step(after, result, stopping, spent)
        self.model.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
        self.shares.speed.add(cost, seconds - (self.comm.seconds - spent.seconds))
        self.progress.epoch = before.epoch
        self.progress.step_made(result, work, seconds=seconds, waiting=self._waited, device=self.device)
        self._guard.check(result, work)
        self.saved.note_written()
        return result

    def _spent(self) -> Spent:
        return Spent.by(self.comm)

    def _end_step(self, after: Position, local: StepResult, stopping: bool, before: Spent) -> StepResult:
        """The round may end with this step, or the exchange of the one before it, which travels."""
        if self._hidden.is_under_way:
            self.state.now = after
            if self._hidden.is_due():
                return self._end_round(self.state.in_flight.position, local, stopping, self._hidden.before)
        elif self.strategy.is_round_due:
            if not self._hidden.begin(after, before, stopping=stopping):
                # Others' exchange may travel already, if members have changed since: then nobody stops with this one.
                return self._end_round(after, local, self._hidden.may_stop(stopping), before)
        elif stopping and self._hidden.is_cut_short(stopping=True):
            return self._end_round(after, local, stopping, before)
        else:
            self.state.now = after
        return local

    def _end_round(self, after: Position, local: StepResult, stopping: bool, before: Spent) -> StepResult:
        """All ranks agree on the sum of their work; `after` is where this rank's round ends.

        before: what was spent before the work, a part of which may be sent already.
        """
        strategy, state = self.strategy, self.state
        elsewhere = self._measure_correlation()
        about = state.about_round(after)
        exchanged = self.comm.commit_together(
            ROUND, lambda: strategy.exchange(stopping), about=lambda exchanged: about | strategy.about(exchanged)
        )
        with state.changing():
            result = strategy.apply(exchanged, local)
            if result.digest is not None:
                self.comm.compare(result.digest, f"round {result.round}")
            if strategy.cut_short:
                state.now = after
            else:
                state.mark_done(replace(after, rounds=result.round or after.rounds), self.comm.members)
        now = self._spent()
        return replace(
            result,
            bytes=now.bytes - before.bytes - elsewhere.bytes,
            seconds_communicating=now.seconds - before.seconds - elsewhere.seconds,
        )

    def _measure_correlation(self) -> Spent:
        """Of the weights as they are before the ranks agree; returns what that took."""
        interval, strategy, before = self.settings.log_correlation, self.strategy, self._spent()
        is_due = interval and (strategy.agreements + 1) % interval == 0
        self._correlation = None
        if is_due and (strategy.differs or strategy.config.steps_in_round > 1):
            work = lambda: mean_correlation(self.comm, strategy.parameters)  # noqa: E731
            self._correlation = self.comm.commit_together(CORRELATION, work)
        return Spent(self.comm.bytes_sent - before.bytes, self.comm.seconds - before.seconds)

    def _end_open_round(self, *, may_hide: bool = False) -> bool:
        """True if somebody asked to stop. may_hide: ranks go on after it."""
        now, before = self.state.now, self._spent()
        if not self.strategy.has_open_round or (may_hide and self._hidden.begin(now, before, stopping=False)):
            return False
        result = self._end_round(now, StepResult(), stopping=False, before=before)
        self._after_agreement(result)
        return result.stop

    def _after_agreement(self, result: StepResult) -> None:
        self.progress.round_ended(result)
        if result.stop:
            return
        interval = self.settings.checkpoint_interval
        is_save_due = interval > 0 and self.strategy.agreements % interval == 0
        if self.state.is_ahead and not self._hidden.are_steps_void():
            self._reshard()
        else:
            self._go_back_to_agreed()
            if self._correlation is not None:
                self.progress.emit("correlation", value=self._correlation)
            self._check_drift(is_needed=is_save_due)
            self.comm.regroup()
            self._at_agreed_point()
        if is_save_due and self.state.work_is_left:
            self.saved.save()

    def _go_back_to_agreed(self) -> None:
        """What this rank has trained while the exchange travelled is void, if there is any: ranks share the work anew
        from the agreed point.
        """
        if self.state.is_ahead:
            self.state.revert_to_agreed()
            self._was_resharded = True

    def _check_drift(self, *, is_needed: bool) -> None:
        is_due = self.strategy.is_drift_check_due(at_least=is_needed)
        if is_due and (apart := remove_drift(self.comm, self.state)) is not None:
            self.progress.emit("drift", difference=apart)

    def _at_agreed_point(self) -> None:
        self._reshard()
        now = self.state.now
        if now.validation_due and not now.validation_waits and self.state.work_is_left:
            self._validation.run()

    def _reshard(self) -> None:
        """Share what is left anew, if others shared it than those who are here now, or as speeds now are."""
        work, shares, dealt = self.train, self.shares, None
        if shares.is_comparison_due(self.state.agreed):
            dealt = shares.compare()
        members = self.comm.members  # one may have been lost meanwhile
        if dealt is None and work.is_shared_among(members):
            return
        self._go_back_to_agreed()
        weights, what = dealt or (shares.kept(members), "")
        self.state.reshard(members, weights)
        shares.speed.clear()
        if what:
            self.progress.emit("shares", what=what)
        work.prefetch(self.settings.num_epochs)
        self._validation.follow()
        self._was_resharded = True
        self.progress.planned()
