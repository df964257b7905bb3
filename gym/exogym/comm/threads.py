"""Ranks that are threads of one process: for tests and for trying things out."""

from __future__ import annotations

import queue
import threading

import torch
from torch import Tensor

from exogym.comm.comm import Comm, all_gather_bytes, all_reduce_bytes, broadcast_bytes
from exogym.errors import ExogymError, PeerLost


class ThreadComm(Comm):
    """One of N ranks that are threads of this process: for tests and for trying things out.

    A rank that fails should `abort()`, which is PeerLost for the others.
    """

    def __init__(self, rank: int, shared: _Shared):
        super().__init__()
        self.rank, self.world_size, self._shared = rank, shared.size, shared

    @classmethod
    def group(cls, size: int, timeout: float = 60.0) -> list[ThreadComm]:
        """Return the communicators of ranks 0 to size-1."""
        shared = _Shared(size, timeout)
        return [cls(rank, shared) for rank in range(size)]

    def all_reduce_(self, flat: Tensor) -> None:
        with self._counted(all_reduce_bytes(flat.nbytes, self.world_size)):
            flat.copy_(torch.stack(self._exchange(flat)).sum(0))

    def broadcast_(self, flat: Tensor, src: int = 0) -> None:
        with self._counted(broadcast_bytes(flat.nbytes, self.world_size, self.rank, src)):
            flat.copy_(self._exchange(flat)[src])

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        with self._counted(all_gather_bytes(flat.nbytes, self.world_size)):
            return [other.clone() for other in self._exchange(flat)]

    def send(self, flat: Tensor, dst: int) -> None:
        with self._counted(flat.nbytes):
            self._shared.messages[self.rank, dst].put(flat.clone())

    def recv(self, flat: Tensor, src: int) -> None:
        with self._counted():
            try:
                flat.copy_(self._shared.messages[src, self.rank].get(timeout=self._shared.timeout))
            except queue.Empty:
                raise PeerLost(f"rank {self.rank} waited in vain for rank {src}") from None

    def _meet(self) -> None:
        try:
            self._shared.barrier.wait(self._shared.timeout)
        except threading.BrokenBarrierError:
            raise PeerLost(f"rank {self.rank} of {self.world_size} lost a peer") from None

    def abort(self) -> None:
        self._shared.barrier.abort()

    def interrupt(self) -> None:
        self.abort()

    def _exchange(self, flat: Tensor) -> list[Tensor]:
        """Return copies of all ranks' tensors."""
        self._shared.slots[self.rank] = flat.clone()
        self._meet()
        slots = list(self._shared.slots)
        self._meet()
        if any(t.shape != flat.shape or t.dtype != flat.dtype for t in slots):
            raise ExogymError(f"ranks met in different collectives: {[(tuple(t.shape), t.dtype) for t in slots]}")
        return slots


class _Shared:
    def __init__(self, size: int, timeout: float):
        self.size, self.timeout = size, timeout
        self.barrier = threading.Barrier(size)
        self.slots: list[Tensor] = [torch.empty(0)] * size
        self.messages = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
