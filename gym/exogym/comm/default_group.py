"""The default group of torch.distributed as a communicator, for scripts that have joined one themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from exogym.comm.comm import Comm, all_gather_bytes, all_reduce_bytes, broadcast_bytes
from exogym.comm.process_group import brief
from exogym.errors import PeerLost


class DefaultGroupComm(Comm):
    """Whatever its backend is. Tensors that the backend cannot send from where they are go by way of `device`.

    bytes_sent is computed as for gloo, whose ring all_reduce and all_gather send as much as those of nccl.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.world_size, self.device = dist.get_rank(), dist.get_world_size(), _device()

    def all_reduce_(self, flat: Tensor) -> None:
        with self._sending(flat, all_reduce_bytes(flat.nbytes, self.world_size)) as there:
            dist.all_reduce(there)

    def broadcast_(self, flat: Tensor, src: int = 0) -> None:
        with self._sending(flat, broadcast_bytes(flat.nbytes, self.world_size, self.rank, src)) as there:
            dist.broadcast(there, src)

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        with self._sending(flat, all_gather_bytes(flat.nbytes, self.world_size)) as there:
            gathered = [torch.empty_like(there) for _ in range(self.world_size)]
            dist.all_gather(gathered, there)
        return [tensor.to(flat.device) for tensor in gathered]

    def send(self, flat: Tensor, dst: int) -> None:
        with self._sending(flat, flat.nbytes) as there:
            dist.send(there, dst)

    def recv(self, flat: Tensor, src: int) -> None:
        with self._sending(flat, 0) as there:
            dist.recv(there, src)

    @contextmanager
    def _sending(self, flat: Tensor, sent: int) -> Iterator[Tensor]:
        """Give `flat`, or what takes its place on the device of the group."""
        there = flat.to(self.device)
        try:
            with self._counted(sent):
                yield there
        except RuntimeError as error:
            raise PeerLost(f"rank {self.rank} of {self.world_size} lost a peer: {brief(error)}") from error
        if there is not flat:
            flat.copy_(there)


def default_group() -> DefaultGroupComm | None:
    """Always the same one for the same group; None if there is no default group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD
    if group not in _known:
        _known.clear()
        _known[group] = DefaultGroupComm()
    return _known[group]


def leave_default_group() -> None:
    """Leave it: a process that ends while gloo's threads still run may be aborted (`terminate called`, SIGABRT)."""
    _known.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


_known: dict[dist.ProcessGroup, DefaultGroupComm] = {}


def _device() -> torch.device:
    """Return the CPU if the group's backends take tensors there, else this process's own accelerator."""
    kinds = [pair.split(":")[0] for pair in dist.get_backend_config().split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
