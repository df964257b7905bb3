"""Rounds whose exchange travels while ranks go on with the next one."""

from __future__ import annotations

from typing import NamedTuple

from exogym.comm.comm import Comm
from exogym.membership.messages import ROUND
from exogym.settings import LoopSettings
from exogym.state.node_state import NodeState
from exogym.state.position import Position


class Spent(NamedTuple):
    """On communication, up to a moment."""

    bytes: int
    seconds: float

    @classmethod
    def by(cls, comm: Comm) -> Spent:
        return cls(comm.bytes_sent, comm.seconds)


class HiddenRounds:
    """Whether ranks wait at the end of a round, and when they end an exchange that travels.

    Ranks wait where something needs all of them at one agreed point. That follows from what they have in common, so
    they decide alike, also one that stops in the middle of the round. Whether somebody stops they ask their
    communicator. A round that no stop cuts short is hidden: who is asked to stop later goes on to the exchange's end.
    """

    def __init__(self, state: NodeState, comm: Comm, settings: LoopSettings, *, validates: bool):
        self._state, self._comm, self._settings, self._validates = state, comm, settings, validates
        self._stop_waits = False
        self._hidden_round = 0  # that is not cut short
        self.before = Spent(0, 0.0)  # what was spent before the step with which the round ended whose exchange travels

    @property
    def is_under_way(self) -> bool:
        """Whether an exchange travels."""
        return self._state.in_flight is not None

    def may_stop(self, asked: bool) -> bool:
        """Whether this rank stops now, as it was asked: not while an exchange travels, but right after that."""
        if self.is_under_way or self._hidden_round == self._round:
            self._stop_waits |= asked
            return False
        return asked or self._stop_waits

    def ask_ahead(self) -> None:
        """Before a step. If the round ends with it: so the answer is there when the step is made."""
        state = self._state
        ends = state.now.step + 1 == state.strategy.round_end  # that of the round before while its exchange travels
        if ends and self._hidden_round != self._round and self._may_be_hidden():
            self._comm.ask_ahead(self._round, stopping=self._stop_waits)

    def is_cut_short(self, *, stopping: bool) -> bool:
        """Whether ranks wait at the end of this round, which is here for one that is stopping. May raise Rejoined."""
        if not self._may_be_hidden():
            return True
        self._stop_waits |= stopping
        if self._comm.is_cut_short(self._round, stopping=self._stop_waits):
            return True
        self._hidden_round = self._round
        return False

    def begin_round(self) -> None:
        """Anew: it may still be cut short."""
        self._hidden_round = 0

    def begin(self, now: Position, before: Spent, *, stopping: bool) -> bool:
        """At the round's end let its exchange travel. False if ranks have to wait for it. May raise Rejoined."""
        state = self._state
        if self.is_cut_short(stopping=stopping):
            return False
        if self._comm.members != state.sampler.members:  # the work is resharded at the agreed point
            return False
        state.begin_exchange(now)
        about = state.about_round(now)
        state.strategy.begin_exchange(
            lambda exchanged: self._comm.vote_ahead(ROUND, about | state.strategy.about(exchanged))
        )
        self.before = before
        return True

    def is_due(self) -> bool:
        """Whether the exchange that travels is to be ended with this step: never before its time, unless it is lost."""
        state = self._state
        is_time = state.now.step >= state.in_flight.position.step + state.strategy.overlap_steps
        return is_time or state.strategy.exchange_has_failed or self._comm.is_over

    def are_steps_void(self) -> bool:
        """After the exchange: whether those made meanwhile are, as ranks have to begin at the agreed point."""
        comm = self._comm
        return comm.is_regroup_due or not self._state.sampler.is_shared_among(comm.members)

    def _may_be_hidden(self) -> bool:
        """The present round, as far as is known before its end."""
        state, settings = self._state, self._settings
        steps, end = state.strategy.overlap_steps, state.strategy.round_end
        if not steps or self._comm.world_size == 1 or end + steps > state.total_steps:
            return False
        at, agreements = state.position_at(end, settings.val_interval), state.strategy.agreements + 1
        return not (
            (settings.log_correlation and agreements % settings.log_correlation == 0)
            or (at.validation_due and self._validates)
        )

    @property
    def _round(self) -> int:
        return self._state.strategy.agreements + 1
