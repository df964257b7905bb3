"""The end of a round: ranks exchange what they have trained, vote, and only then change anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exogym.comm.comm import Comm
from exogym.flat import FlatParameters
from exogym.membership import CORRELATION, ROUND
from exogym.settings import LoopSettings
from exogym.state.node_state import NodeState, Position
from exogym.strategy.strategy import StepResult

MOST_COMPARED = 1_000_000  # weights: 4 MB that each rank sends to each other; the correlation's error is about 1/1000


class Spent(NamedTuple):
    """The bytes that this rank has sent, and the seconds that communication took, up to a moment."""

    bytes: int
    seconds: float


class Round:
    """Ends a round at each step (AllReduce) or each H steps (DiLoCo); ranks wait for each other there.

    After each step: `if round.due(...): round.commit(round.run(), local)`. A HiddenRound lets ranks go on meanwhile.
    correlation: how alike the ranks' weights were before the last exchange; None if it was not measured.
    """

    def __init__(self, state: NodeState, comm: Comm, settings: LoopSettings):
        self._state, self._comm, self._settings = state, comm, settings
        self._stopping = False  # this rank wants to stop with this round
        self._before = Spent(0, 0.0)  # what was spent before that which belongs to the round's end
        self.correlation: float | None = None

    def begin_step(self) -> None:
        """Prepare for a step. Raises Rejoined if the others have gone on without this rank, and now call it."""
        self._comm.check_for_call()
        self.note_spent()

    def note_spent(self) -> None:
        """Count what is sent from now on as the round's: of a step's gradients a part may travel before it ends."""
        self._before, self._stopping = self._spent(), False

    def due(self, wants_stop: bool = False) -> bool:
        """Say whether ranks end their round here, after a step. wants_stop: this rank was asked to stop."""
        self._stopping = wants_stop
        return self._state.strategy.is_round_due or wants_stop

    def run(self) -> Any:
        """Make the exchange, and return what came of it once all ranks have voted for it. Raises PeerLost, Rejoined."""
        strategy = self._state.strategy
        self._measure_correlation()
        about = self._state.about_round(self._end)
        return self._comm.commit_together(
            ROUND,
            lambda: strategy.exchange(self._stopping),
            about=lambda exchanged: about | strategy.about(exchanged),
        )

    def commit(self, exchanged: Any, local: StepResult) -> StepResult:
        """Take on what ranks have agreed on. local: what the step did that this rank has just made."""
        strategy, state, end = self._state.strategy, self._state, self._end
        with state.changing():
            result = strategy.apply(exchanged, local)
            if result.digest is not None:
                self._comm.compare(result.digest, f"round {result.round}")
            if strategy.cut_short:
                state.now = end
            else:
                state.mark_done(replace(end, rounds=result.round or end.rounds), self._comm.members)
        now, before = self._spent(), self._before
        return replace(result, bytes=now.bytes - before.bytes, seconds_communicating=now.seconds - before.seconds)

    def restart(self) -> None:
        """Begin the round anew, after this rank was given the state of the others."""

    @property
    def keeps_steps(self) -> bool:
        """Say whether this rank has made steps beside the exchange that has just counted, and goes on from them."""
        return False

    @property
    def _end(self) -> Position:
        """The place where this rank's round ends."""
        return self._state.now

    def _spent(self) -> Spent:
        return Spent(self._comm.bytes_sent, self._comm.seconds)

    def _measure_correlation(self) -> None:
        """Compare the weights as they are before ranks agree, where that is asked for; it does not count as spent."""
        strategy, interval, before = self._state.strategy, self._settings.log_correlation, self._spent()
        self.correlation = None
        is_due = interval and (strategy.agreements + 1) % interval == 0
        if is_due and (strategy.differs or strategy.config.steps_in_round > 1):
            self.correlation = self._comm.commit_together(
                CORRELATION, lambda: mean_correlation(self._comm, strategy.parameters)
            )
            now, start = self._spent(), self._before
            spent = Spent(now.bytes - before.bytes, now.seconds - before.seconds)
            self._before = Spent(start.bytes + spent.bytes, start.seconds + spent.seconds)


def mean_correlation(comm: Comm, parameters: FlatParameters) -> float | None:
    """Return the mean over all pairs of ranks of the Pearson correlation of their trained weights. All ranks call it.

    Of a larger model the same MOST_COMPARED weights, drawn at random once and for all, are gathered and compared;
    buffers are left out. None for one rank, and where a rank's weights are all equal or not finite. Raises PeerLost.
    """
    if comm.world_size == 1 or parameters.num_parameters < 2:
        return None
    vectors = torch.stack(comm.all_gather(sample(parameters.read()[: parameters.num_parameters]))).double()
    among = torch.corrcoef(vectors)[*torch.triu_indices(comm.world_size, comm.world_size, offset=1)]
    mean = among.mean().item()
    return mean if among.isfinite().all() else None


def sample(flat: Tensor) -> Tensor:
    """Return `flat` [n], or MOST_COMPARED of its values, the same ones each time."""
    if flat.numel() <= MOST_COMPARED:
        return flat.contiguous()
    generator = torch.Generator().manual_seed(0)
    return flat[torch.randint(flat.numel(), (MOST_COMPARED,), generator=generator)]


class HiddenRound(Round):
    """A round whose exchange starts at its end, runs beside the next steps, and ends `overlap_steps` steps later.

    Ranks wait for it, as in Round, where something needs all of them at one agreed point. That follows from what they
    have in common, so they decide alike, also one that stops in the middle of the round. Whether somebody stops they
    ask their communicator. A round that no stop cuts short is hidden: who is asked to stop later goes on to the
    exchange's end.
    """

    def __init__(self, state: NodeState, comm: Comm, settings: LoopSettings, *, validates: bool):
        super().__init__(state, comm, settings)
        self._validates = validates
        self._stop_waits = False
        self._hidden_round = 0  # that is not cut short

    def begin_step(self) -> None:
        """Prepare for a step; if the round ends with it, ask ahead, so that the answer is there when it is made."""
        state = self._state
        if state.in_flight is None:  # no other group may form while collectives run in this one
            super().begin_step()
        ends = state.now.step + 1 == state.strategy.round_end  # that of the round before while its exchange runs
        if ends and self._hidden_round != self._number and self._may_be_hidden():
            self._comm.ask_ahead(self._number, stopping=self._stop_waits)

    def due(self, wants_stop: bool = False) -> bool:
        """Start the exchange where the round ends; say whether it, or that of a round that is not hidden, ends here.

        May raise Rejoined.
        """
        state, comm, now = self._state, self._comm, self._state.now
        strategy = state.strategy
        self._stopping = self._may_stop(wants_stop)
        if state.in_flight is not None:  # it ends with this step: never before its time, unless it is lost
            is_time = now.step >= state.in_flight.position.step + strategy.overlap_steps
            return is_time or strategy.exchange_has_failed or comm.is_over
        if not strategy.is_round_due:
            return self._stopping and self._is_cut_short(stopping=True)
        # Where members have changed the work is resharded at the agreed point. Others' exchange may run already then:
        # nobody stops with this one.
        if self._is_cut_short(stopping=self._stopping) or comm.members != state.sampler.members:
            self._stopping = self._may_stop(self._stopping)
            return True
        state.begin_exchange(now)
        about = state.about_round(now)
        strategy.begin_exchange(lambda exchanged: comm.vote_ahead(ROUND, about | strategy.about(exchanged)))
        return False

    def restart(self) -> None:
        self._hidden_round = 0  # it may still be cut short

    @property
    def keeps_steps(self) -> bool:
        """Such steps are void where ranks have to begin at the agreed point."""
        comm, state = self._comm, self._state
        return state.is_ahead and not comm.is_regroup_due and state.sampler.is_shared_among(comm.members)

    @property
    def _end(self) -> Position:
        return self._state.in_flight.position if self._state.in_flight else self._state.now

    @property
    def _number(self) -> int:
        """The number of the present round."""
        return self._state.strategy.agreements + 1

    def _may_stop(self, asked: bool) -> bool:
        """Say whether this rank stops now, as it was asked: not while an exchange runs, but right after that."""
        if self._state.in_flight or self._hidden_round == self._number:
            self._stop_waits |= asked
            return False
        return asked or self._stop_waits

    def _is_cut_short(self, *, stopping: bool) -> bool:
        """Say whether ranks wait at this round's end, which is here for one that is stopping. May raise Rejoined."""
        if not self._may_be_hidden():
            return True
        self._stop_waits |= stopping
        if self._comm.is_cut_short(self._number, stopping=self._stop_waits):
            return True
        self._hidden_round = self._number
        return False

    def _may_be_hidden(self) -> bool:
        """Say whether the present round may be hidden, as far as is known before its end."""
        state, settings = self._state, self._settings
        steps, end = state.strategy.overlap_steps, state.strategy.round_end
        if self._comm.world_size == 1 or end + steps > state.total_steps:
            return False
        at, agreements = state.position_at(end, settings.val_interval), state.strategy.agreements + 1
        return not (
            (settings.log_correlation and agreements % settings.log_correlation == 0)
            or (at.validation_due and self._validates)
        )
