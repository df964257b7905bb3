"""Machines of different arithmetic drift apart by rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from exogym.comm.comm import Comm
from exogym.flat import digest
from exogym.membership.messages import DRIFT_CHECK
from exogym.progress import Progress
from exogym.state.node_state import NodeState


def remove_drift(comm: Comm, state: NodeState, progress: Progress) -> None:
    """Right after an agreement: all ranks take on the weights of rank 0, where theirs differ."""
    if comm.world_size == 1:
        return
    own = state.strategy.agreed_weights()
    taken = comm.commit_together(DRIFT_CHECK, lambda: _weights_of_rank_0(comm, own))
    if taken is not None:
        apart = (taken - own).abs().max().item()
        state.take_weights(taken)
        progress.emit("drift", difference=apart)


def _weights_of_rank_0(comm: Comm, own: Tensor) -> Tensor | None:
    """None if they are everybody's."""
    digests = [int(value) for value in comm.all_gather(torch.tensor([digest(own)]))]
    if all(value == digests[0] for value in digests):
        return None
    taken = own.clone()
    comm.broadcast_(taken)
    return taken
