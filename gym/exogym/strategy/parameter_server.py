"""DiLoCo with a parameter server: rank 0 alone makes the outer step (Li et al., OSDI 2014, for the arrangement)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from exogym.comm.comm import Comm
from exogym.flat import FlatParameters
from exogym.strategy.communication_module import NOT_FINITE, Draft, Exchanged, Payload
from exogym.strategy.diloco import DiLoCoCommunicator, DiLoCoStrategy
from exogym.strategy.parameter_server_settings import ParameterServerConfig

SERVER = 0


class ServerCommunicator(DiLoCoCommunicator):
    """The server adds up the ranks' changes in rank order, makes the outer step, and sends the new weights to all.

    If the server is lost, the next rank goes on in its place: from the same weights, with an outer optimizer that
    begins anew.
    """

    Config = ParameterServerConfig

    def setup(self, comm: Comm, parameters: FlatParameters, common: Tensor, *, keeps_common: bool) -> None:
        super().setup(comm, parameters, common, keeps_common=keeps_common)
        self.is_exact = False  # only the server has the outer optimizer's state
        self._sent = Payload(comm)

    def exchange(self, draft: Draft, samples: int, stopping: bool) -> Exchanged:
        """Send this rank's change and receive the new weights.

        The result is (the new weights [numel], on the server its outer optimizer's new state), or None if nobody has
        trained.
        """
        change, skipped = self._sent.flat(self.parameters.numel), ""
        if samples and not self._read_change(draft, change, samples):
            samples, skipped = 0, NOT_FINITE
        flags = torch.tensor([samples, float(stopping)])
        self.comm.all_reduce_(flags)
        total, stop = flags.tolist()
        if not total:
            return Exchanged(None, stop > 0, skipped)
        if not samples:
            change.zero_()
        new, outer = self._step_at_server(change, total)
        self.comm.broadcast_(new, src=SERVER)
        return Exchanged((new, outer), stop > 0, skipped)

    def apply(self, result: Any, draft: Draft) -> None:
        if result is not None:
            new, outer = result
            self.common.copy_(new)
            if outer is not None:
                self.outer.load_state_dict(outer)
            else:
                self.outer.state.clear()  # of the time when this rank was the server
        draft.set(self.common)

    def _step_at_server(self, change: Tensor, total: float) -> tuple[Tensor, dict[str, Any] | None]:
        """Return the new weights [numel], to be filled in on all but the server, and there the outer optimizer's state.

        The server's common weights stay as they are: the step may have to be repeated.
        """
        if self.comm.rank != SERVER:
            self.comm.send(change, SERVER)
            return torch.empty_like(change), None
        new, theirs = self.common.clone(), torch.empty_like(change)
        for rank in range(1, self.comm.world_size):
            self.comm.recv(theirs, rank)
            change.add_(theirs)
        del theirs
        outer = self._outer_of(new)
        outer.load_state_dict(copy.deepcopy(self.outer.state_dict()))
        self._outer_step(new, outer, change.mul_(1 / total))
        return new, outer.state_dict()


class ParameterServerStrategy(DiLoCoStrategy):
    """DiLoCo where rank 0 holds the outer optimizer.

    A worker sends its change and receives the weights, 4 bytes a trained parameter each way; the server receives all
    changes. From four ranks on some workers hand the weights on to others. Choose it where one machine has by far the
    best link or the most memory.
    """

    Config = ParameterServerConfig
    config: ParameterServerConfig
    Module = ServerCommunicator
