"""A group of one rank."""

from __future__ import annotations

from torch import Tensor

from exogym.comm.comm import Comm
from exogym.errors import ExogymError


class SingleComm(Comm):
    """A group of one."""

    rank = 0
    world_size = 1

    def all_reduce_(self, flat: Tensor) -> None:
        pass

    def broadcast_(self, flat: Tensor, src: int = 0) -> None:
        pass

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        return [flat.clone()]

    def send(self, flat: Tensor, dst: int) -> None:
        raise ExogymError("a group of one has nobody to send to")

    def recv(self, flat: Tensor, src: int) -> None:
        raise ExogymError("a group of one has nobody to receive from")
