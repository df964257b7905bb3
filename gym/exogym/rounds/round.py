"""The end of a round: ranks exchange what they have trained, vote, and only then change anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from exogym.comm.comm import Comm
from exogym.membership import CORRELATION, ROUND
from exogym.rounds.validation import mean_correlation
from exogym.settings import LoopSettings
from exogym.state.node_state import NodeState
from exogym.state.position import Position
from exogym.strategy.strategy import StepResult


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
