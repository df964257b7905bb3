"""What a rank does when its communicator has formed a group: come to one state with the others."""

from __future__ import annotations

from exogym.comm.comm import Comm
from exogym.progress import Progress
from exogym.state.node_state import NodeState
from exogym.state.saved_states import NoSavedStates, SavedStates
from exogym.state.state_sync import Synced, sync_state


class Joining:
    """A Member, see comm.py. received: this rank was given the state of the others, after they had agreed on some."""

    def __init__(
        self,
        comm: Comm,
        state: NodeState,
        saved: SavedStates | NoSavedStates,
        progress: Progress,
        *,
        resume: bool,
    ):
        self._comm, self._state, self._saved, self._progress, self._resume = comm, state, saved, progress, resume
        self.received = False

    def sync_state(self) -> tuple[int, bool]:
        state, is_new = self._state, not self._state.has_synced
        self._saved.look_at_data()
        if not is_new and not self._comm.continues_round:
            state.revert_to_agreed()
        if state.sampler.agree_on_length(self._comm):
            state.lengthened()
            self._progress.planned()
        synced = sync_state(self._comm, state, self._saved)
        state.begin(synced.term, is_given=synced.received)
        self.received = self.received or (synced.received and state.strategy.agreements > 0)
        if is_new:
            self._tell(synced)
        return synced.fingerprint, synced.received and not is_new

    def has_synced(self) -> None:
        self._state.begun()

    def _tell(self, synced: Synced) -> None:
        if self._resume or synced.checkpoint is not None:
            state = self._state
            anew = not state.has_own and bool(state.strategy.own_state())
            self._progress.emit("resume", round=state.now.rounds, exactly=synced.exactly, anew=anew)
