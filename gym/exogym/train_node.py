"""The training loop of one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from exogym import device as devices
from exogym.comm.comm import Comm, use
from exogym.config import refuse
from exogym.errors import ExogymError, Rejoined
from exogym.flat import digest
from exogym.logger.event import Events, Mean, NullLogger
from exogym.membership import END
from exogym.micro_batches import Forward, StepWork, accumulate
from exogym.rounds.progress import Progress, Score, Validation, modes_kept
from exogym.rounds.round import HiddenRound, Round
from exogym.rounds.shares import Shares
from exogym.samplers.batches import Batch, BatchSource
from exogym.samplers.elastic import sampler_of
from exogym.settings import LoopSettings
from exogym.state.checkpoint import Checkpoints
from exogym.state.node_state import NodeState, RunLength
from exogym.state.state_sync import RESCUE_S, SavedStates, remove_drift, share_moments, sync_state
from exogym.strategy.strategy import StepResult, Strategy


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The figures of one rank at the end. Losses are means per target token (or per sample, see TrainNode).

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
    score: by which a validation is the best so far, in place of its loss, as by word errors.
    `should_stop` is asked at every step; when it says yes on any rank, all ranks stop at the same agreed weights.
    With `checkpoints` each rank keeps its own state; one that cannot be written is a "warning" event.
    What gives a loss or gradient that is not finite is left out, with a "warning" event.

    In an ElasticComm ranks may be lost, and may come (back) between rounds. What a lost rank trained since the last
    agreement is resharded if `train` is an ElasticSampler; else losing one ends the run with PeerLost.

    events gets dicts with `type` start, resume, plan (work was resharded), shares (anew by speed), step, round (at each
    agreement of a strategy that has rounds, on every rank), drift (weights of ranks had come to differ by rounding, and
    are equal again), validation, best, early_stop, correlation (see LoopSettings), checkpoint, stop or warning.
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
        score: Score | None = None,
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
        self.forward = Forward(model, self.device, settings.precision)
        self.validation = Validation(
            val, model, self.forward, comm, self.state, self.progress, keep_best=settings.keep_best, score=score
        )
        if val is None:
            refuse("without validation data", early_stopping=settings.early_stopping or None)
            refuse("without validation data", keep_best=settings.keep_best or None)
        self.shares = Shares(self.state, comm, settings)
        if strategy.overlap_steps:
            self.round: Round = HiddenRound(self.state, comm, settings, validates=val is not None)
        else:
            self.round = Round(self.state, comm, settings)
        self.joined_midrun = False  # it was given the state of the others, after they had agreed on some
        self.was_resharded = False  # so that the batches of the last share are no longer this rank's

    def run(self) -> TrainResult:
        """Train to the end of the run. Raises PeerLost, RanksDiverged, NotFinite, CheckpointError."""
        started, state = time.perf_counter(), self.state
        with modes_kept(self.model), use(self.comm):
            self.model.to(self.device).train()
            self.model.zero_grad(set_to_none=True)
            self.strategy.setup(self.model, self.comm, state.total_steps)
            try:
                self.progress.start(self.device, self.settings)
                self.comm.join(self)  # meet whoever is there, and come to one state: see sync_state
                stopped = self._until_all_have_ended()
                best_step = None if stopped else self._take_best()
                self.saved.note_written(at_once=True)
            finally:
                self.strategy.close()
        best = None if best_step is None else state.best_weights
        return TrainResult(
            steps=state.now.step,
            rounds=state.now.rounds,
            samples=state.samples,
            train_loss=state.loss.value(),
            val_loss=state.now.val_loss if best_step is None else state.now.best_loss,
            best_step=best_step,
            digest=digest(self.strategy.agreed_weights() if best is None else best),
            stopped=stopped,
            bytes_sent=self.comm.bytes_sent,
            seconds=time.perf_counter() - started,
            seconds_communicating=self.comm.seconds,
        )

    # What ranks do together, and in which order, is decided by their common state alone: so a rank that has just been
    # given this state does the same as those who have gone through it.

    def _until_all_have_ended(self) -> bool:
        """Train, and begin again from the others' state whenever this rank was away. True if somebody asked to stop."""
        while True:
            try:
                stopped = self._train()
                self.comm.commit_together(END, lambda: None)
                return stopped
            except Rejoined:
                self.round.restart()
                self.model.zero_grad(set_to_none=True)
                self.progress.resumed()

    def _train(self) -> bool:
        """Go from the state as it is to the end of the work. True if somebody asked to stop."""
        stopped = self._begin()
        # What a lost rank had left undone in the last round is work again.
        while not stopped and (self.state.work_is_left or self.strategy.has_open_round):
            stopped = self._make_steps()
            if not stopped and self.strategy.has_open_round:  # the end of the work has cut it off
                self.round.note_spent()
                stopped = self._end_round()
        self._come_to_same_weights(stopped)
        if not stopped and self.state.now.validated_at < self.state.now.step:
            self.validation.run()
        return stopped

    def _make_steps(self) -> bool:
        """Make the steps that are left. True if somebody asked to stop."""
        for batches, waited in self._batches():  # this rank's share of each step
            self.round.begin_step()
            started, communicated = time.perf_counter(), self.comm.seconds
            work = self.forward_backward(batches)
            wants_stop = bool(self.should_stop())
            result = self.optimizer_step(work)
            wants_stop &= self.state.work_is_left  # after the last step nothing is cut short
            if self.round.due(wants_stop):  # at each step (AllReduce), or each H steps (DiLoCo)
                result = self.round.commit(self.round.run(), result)  # all vote; only then weights change
            self.model.zero_grad(set_to_none=True)
            seconds = time.perf_counter() - started
            self.shares.speed.add(work.cost, seconds - (self.comm.seconds - communicated))
            self.progress.step_made(result, work, seconds=seconds, waiting=waited, device=self.device)
            self.progress.check_finite(result, work)
            self.saved.note_written()
            if result.agreed and self._after_round(result):  # validate, save, share the work anew
                return True
        return False

    def forward_backward(self, batches: list[Batch]) -> StepWork:
        """Add the gradients of a step's micro-batches up in `.grad`, each weighted as its loss is."""
        state, parameters = self.state, self.strategy.parameters
        self.progress.epoch = state.now.epoch
        version = parameters.version
        work = self.accumulate(batches)
        self.strategy.passes_change_weights |= parameters.version != version
        work.cost = self.train.cost((state.now.epoch, state.now.in_epoch), work.samples)
        state.trained.setdefault(state.now.epoch, []).extend(work.ids)
        state.samples += work.samples
        state.loss.add(work.loss.total, work.loss.weight)
        return work

    def accumulate(self, batches: list[Batch]) -> StepWork:
        return accumulate(batches, self.forward, self.strategy.parameters, self.strategy.no_sync)

    def optimizer_step(self, work: StepWork) -> StepResult:
        """Do what a rank does by itself in a step; with AllReduce that is nothing, as all ranks step together."""
        self.strategy.samples_in_step = self.train.samples_in_step(self.state.now.epoch)
        result = self.strategy.local_step(work.loss.weight, work.samples if work.loss.weight else 0)
        self.state.now = self.state.after_one_step(self.settings.val_interval)
        return result

    def _after_round(self, result: StepResult) -> bool:
        """Do what is due once all ranks have agreed. True if somebody asked to stop."""
        self.progress.round_ended(result)
        if result.stop:
            return True
        interval = self.settings.checkpoint_interval
        is_save_due = interval > 0 and self.strategy.agreements % interval == 0
        if self.round.keeps_steps:  # a hidden round: this rank has trained on meanwhile, and does not go back
            self._reshard()
        else:
            self._go_back_to_agreed()
            if self.round.correlation is not None:
                self.progress.emit("correlation", value=self.round.correlation)
            self._check_drift(is_needed=is_save_due)
            self.comm.regroup()  # let in who is waiting
            self._at_agreed_point()
        if is_save_due and self.state.work_is_left:
            self.saved.save()
        return False

    def _at_agreed_point(self) -> None:
        self._reshard()
        now = self.state.now
        if now.validation_due and not now.validation_waits and self.state.work_is_left:
            self.validation.run()

    # The batches of this rank, and who trains which.

    def _batches(self) -> Iterator[tuple[list[Batch], float]]:
        """Yield each step's micro-batches with the seconds until they came, until no work is left.

        Where the work was shared anew they are of the new share.
        """
        while self.state.work_is_left:
            self.was_resharded = False
            for batches in self._epoch():
                yield batches
                if self.was_resharded:
                    break

    def _epoch(self) -> Iterator[tuple[list[Batch], float]]:
        """Yield what is left of the epoch, as the work is shared now. Every rank must make the same number of steps."""
        epoch, first = self.state.now.epoch, self.state.now.in_epoch
        if first == 0:
            self.state.loss = Mean()
        promised = self.train.steps_in(epoch)
        began = time.perf_counter()
        for batches in self.train.epoch(epoch, first_step=first):
            yield batches, time.perf_counter() - began
            first += 1
            if first == promised or not self.state.work_is_left:
                break
            began = time.perf_counter()
        if first < promised and self.state.work_is_left:
            missing = f"{promised - first} of the {promised} steps it promised"
            raise ExogymError(f"rank {self.comm.rank}: epoch {epoch} of the batch source lacks {missing}")

    def _reshard(self) -> None:
        """Share what is left anew, if others shared it than those who are here now, or as speeds now are."""
        work, shares, measured = self.train, self.shares, None
        if shares.is_comparison_due(self.state.agreed):
            measured = shares.compare()
        members = self.comm.members  # one may have been lost meanwhile
        if measured is None and work.is_shared_among(members):
            return
        self._go_back_to_agreed()
        weights, what = measured or (shares.kept(members), "")
        self.state.reshard(members, weights)
        shares.speed.clear()
        if what:
            self.progress.emit("shares", what=what)
        work.prefetch(self.settings.num_epochs)
        self.validation.follow()
        self.was_resharded = True
        self.progress.planned()

    def _go_back_to_agreed(self) -> None:
        """Give up what this rank has trained beside an exchange, if there is any: the work is shared from there."""
        if self.state.is_ahead:
            self.state.revert_to_agreed()
            self.was_resharded = True

    # The beginning and the end.

    def sync_state(self) -> tuple[int, bool]:
        """Come to one state with the others of a new group, as a Member of it: see comm.py."""
        state, is_new = self.state, not self.state.has_synced
        self.saved.look_at_data()
        if not is_new and not self.comm.continues_round:
            state.revert_to_agreed()
        if state.sampler.agree_on_length(self.comm):
            state.lengthened()
            self.progress.planned()
        planned = state.total_steps
        synced = sync_state(self.comm, state, self.saved)
        share_moments(self.comm, state)
        state.begin(synced.term, is_given=synced.received)
        if state.total_steps != planned:
            self.progress.planned()
        self.joined_midrun |= synced.received and state.strategy.agreements > 0
        if is_new and (self.settings.resume or synced.checkpoint is not None):
            anew = not state.has_own and bool(state.strategy.own_state())
            self.progress.resumed(exactly=synced.exactly, anew=anew)
        return synced.fingerprint, synced.received and not is_new

    def has_synced(self) -> None:
        self.state.begun()
        sharded = self.strategy.sharded
        if sharded and sharded.lost and self.comm.rank == 0:
            what = f"the optimizer's moments of {100 * sharded.lost:.0f} % of the weights are lost with a rank that had"
            self.progress.emit("warning", what=f"{what} them: they begin anew")

    def _begin(self) -> bool:
        """Do what is due before the first step. True if somebody asked to stop."""
        if self.joined_midrun and self.settings.checkpoint_interval:
            self.saved.save()  # whoever gave it the state may be gone when this rank has to go on from it
        self.joined_midrun = False
        if not self.state.is_mid_round:
            self._at_agreed_point()
            return False
        self.round.note_spent()
        return self.round.due() and self._end_round()

    def _end_round(self) -> bool:
        """End a round without a step. True if somebody asked to stop."""
        return self._after_round(self.round.commit(self.round.run(), StepResult()))

    def _come_to_same_weights(self, stopped: bool) -> None:
        """Give all ranks the same weights. What is saved is this rank's state before it takes on the mean of all."""
        if self.strategy.differs:
            if stopped:
                self.saved.save(at_once=True)
            remove_drift(self.comm, self.state)
            return
        if not self.strategy.cut_short:
            self._check_drift(is_needed=True)
        if stopped:
            self.saved.save(at_once=True)

    def _check_drift(self, *, is_needed: bool) -> None:
        is_due = self.strategy.is_drift_check_due(at_least=is_needed)
        if is_due and (apart := remove_drift(self.comm, self.state)) is not None:
            self.progress.emit("drift", difference=apart)

    def _take_best(self) -> int | None:
        """Give the model the best weights, once all have ended: what ranks have in common stays as it is.

        Returns the step of their validation; None if the last weights stay.
        """
        state = self.state
        if state.ends_early:
            self.progress.emit("early_stop", validations=state.now.not_better, total_steps=state.total_steps)
        if not self.settings.keep_best or state.best_weights is None:
            return None
        self.strategy.parameters.write(state.best_weights)
        score = {} if state.now.best_score is None else {"score": state.now.best_score}
        self.progress.emit("best", best_step=state.now.best_at, loss=state.now.best_loss, **score)
        return state.now.best_at

    def save_agreed(self, patience_s: float = RESCUE_S) -> bool:
        """Save what ranks last agreed on, from another thread: see SavedStates.save_agreed."""
        return self.saved.save_agreed(patience_s)
