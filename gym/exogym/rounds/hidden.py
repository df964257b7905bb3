"""Rounds whose exchange runs in the background while ranks go on with the next one."""

from __future__ import annotations

from exogym.comm.comm import Comm
from exogym.membership import ROUND
from exogym.rounds.round import Round
from exogym.settings import LoopSettings
from exogym.state.node_state import NodeState
from exogym.state.position import Position


class HiddenRound(Round):
    """Starts the exchange at the round's end, and ends it `overlap_steps` steps later.

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
        if not self._is_under_way:  # no other group may form while collectives run in this one
            super().begin_step()
        ends = state.now.step + 1 == state.strategy.round_end  # that of the round before while its exchange runs
        if ends and self._hidden_round != self._number and self._may_be_hidden():
            self._comm.ask_ahead(self._number, stopping=self._stop_waits)

    def due(self, wants_stop: bool = False) -> bool:
        """Start the exchange where the round ends; say whether it, or that of a round that is not hidden, ends here.

        May raise Rejoined.
        """
        strategy = self._state.strategy
        self._stopping = self._may_stop(wants_stop)
        if self._is_under_way:
            return self._has_arrived()
        if strategy.is_round_due:
            if self._begin(stopping=self._stopping):
                return False
            # Others' exchange may run already, if members have changed since: then nobody stops with this one.
            self._stopping = self._may_stop(self._stopping)
            return True
        return self._stopping and self._is_cut_short(stopping=True)

    def restart(self) -> None:
        self._hidden_round = 0  # it may still be cut short

    @property
    def keeps_steps(self) -> bool:
        """Such steps are void where ranks have to begin at the agreed point."""
        comm, state = self._comm, self._state
        return state.is_ahead and not comm.is_regroup_due and state.sampler.is_shared_among(comm.members)

    @property
    def _is_under_way(self) -> bool:
        return self._state.in_flight is not None

    @property
    def _end(self) -> Position:
        return self._state.in_flight.position if self._is_under_way else self._state.now

    @property
    def _number(self) -> int:
        """The number of the present round."""
        return self._state.strategy.agreements + 1

    def _may_stop(self, asked: bool) -> bool:
        """Say whether this rank stops now, as it was asked: not while an exchange runs, but right after that."""
        if self._is_under_way or self._hidden_round == self._number:
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

    def _begin(self, *, stopping: bool) -> bool:
        """Start the exchange at the round's end. False if ranks have to wait for it. May raise Rejoined."""
        state, now = self._state, self._state.now
        if self._is_cut_short(stopping=stopping):
            return False
        if self._comm.members != state.sampler.members:  # the work is resharded at the agreed point
            return False
        state.begin_exchange(now)
        about = state.about_round(now)
        state.strategy.begin_exchange(
            lambda exchanged: self._comm.vote_ahead(ROUND, about | state.strategy.about(exchanged))
        )
        return True

    def _has_arrived(self) -> bool:
        """Say whether the exchange is to be ended with this step: never before its time, unless it is lost."""
        state = self._state
        is_time = state.now.step >= state.in_flight.position.step + state.strategy.overlap_steps
        return is_time or state.strategy.exchange_has_failed or self._comm.is_over

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
