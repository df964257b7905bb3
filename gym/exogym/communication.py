"""What ranks say to each other. The only file that touches torch.distributed's collectives.

All tensors are flat, contiguous and on the CPU. Every rank must make the same calls in the same order.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from exogym.errors import ExogymError, PeerLost

DEFAULT_TIMEOUT = 300.0  # seconds; a rank waits this long for the slowest one before it gives the others up
POLL = 0.25  # seconds; how soon an interrupt is noticed inside a collective


class Comm(ABC):
    """Collectives among `world_size` ranks.

    bytes_sent: payload that this rank put into collectives (what the backend sends on the wire is its own affair).
    seconds: time spent in them, waiting for slower ranks included.
    """

    rank: int
    world_size: int

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.seconds = 0.0

    @abstractmethod
    def all_reduce_(self, flat: Tensor) -> None:
        """Replace `flat` on every rank by the sum over ranks, with the same bits on all. Raises PeerLost."""

    @abstractmethod
    def broadcast_(self, flat: Tensor, src: int = 0) -> None:
        """Replace `flat` on every rank by that of rank `src`."""

    @abstractmethod
    def all_gather(self, flat: Tensor) -> list[Tensor]:
        """The ranks' tensors (equal shapes) in rank order."""

    @abstractmethod
    def send(self, flat: Tensor, dst: int) -> None: ...

    @abstractmethod
    def recv(self, flat: Tensor, src: int) -> None:
        """Fill `flat` with what rank `src` sent."""

    @abstractmethod
    def barrier(self) -> None: ...

    def close(self) -> None:  # noqa: B027  (most have nothing to leave)
        """Leave. Safe after PeerLost and when called twice."""

    @contextmanager
    def _counted(self, *sent: Tensor) -> Iterator[None]:
        self.bytes_sent += sum(t.numel() * t.element_size() for t in sent)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started


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

    def barrier(self) -> None:
        pass


class ProcessGroupComm(Comm):
    """A torch.distributed process group; one at a time in a process.

    Collectives start asynchronously and are polled against a deadline, so that a frozen peer becomes PeerLost after
    `timeout` seconds and an interrupt is noticed while waiting. `store` outlives the group: give each group that
    forms over it a PrefixStore of its own. For gloo between machines set GLOO_SOCKET_IFNAME before this.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        store: dist.Store,
        backend: str = "gloo",
        timeout: float = DEFAULT_TIMEOUT,
    ):
        super().__init__()
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._lost: PeerLost | None = None
        # gloo's own timeout is the same: the process of a rank that gave up cannot exit before it has passed.
        wait = timedelta(seconds=timeout)
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=wait)
        except RuntimeError as error:
            raise PeerLost(
                f"rank {rank} of {world_size} could not join the {backend} group: {_brief(error)}"
            ) from error
        self._group = dist.group.WORLD

    def all_reduce_(self, flat: Tensor) -> None:
        with self._counted(flat), self._staged(flat) as tensor:
            self._wait(lambda: dist.all_reduce(tensor, group=self._group, async_op=True), "all_reduce")

    def broadcast_(self, flat: Tensor, src: int = 0) -> None:
        sent = [flat] if src == self.rank else []
        with self._counted(*sent), self._staged(flat) as tensor:
            self._wait(lambda: dist.broadcast(tensor, src, group=self._group, async_op=True), "broadcast")

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        with self._counted(flat), self._staged(flat) as tensor:
            gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
            self._wait(lambda: dist.all_gather(gathered, tensor, group=self._group, async_op=True), "all_gather")
        return [t.cpu() for t in gathered]

    def send(self, flat: Tensor, dst: int) -> None:
        with self._counted(flat), self._staged(flat) as tensor:
            self._wait(lambda: dist.isend(tensor, dst, group=self._group), f"send to rank {dst}", self.timeout)

    def recv(self, flat: Tensor, src: int) -> None:
        with self._counted(), self._staged(flat) as tensor:
            self._wait(lambda: dist.irecv(tensor, src, group=self._group), f"receive from rank {src}", self.timeout)

    def barrier(self) -> None:
        self.all_reduce_(torch.zeros(1))

    def close(self) -> None:
        if self._group is None:
            return
        if self._lost:
            # With work in flight, dropping the last reference blocks until the timeout.
            _abandoned.append(self._group)
        self._group = None
        dist.destroy_process_group()

    @contextmanager
    def _staged(self, flat: Tensor) -> Iterator[Tensor]:
        tensor = flat.to(self._device)
        yield tensor
        if tensor is not flat:
            flat.copy_(tensor)

    def _wait(self, start: Callable[[], dist.Work], what: str, poll: float = POLL) -> None:
        """For send and receive `poll` must be the whole timeout: gloo cuts the connection when a wait ends early."""
        if self._lost:
            raise self._lost
        if self._group is None:
            raise ExogymError(f"{what} on a closed communicator")
        deadline = time.monotonic() + self.timeout
        try:
            work = start()
            while not _finished(work, poll):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no answer within {self.timeout:g} s")
        except RuntimeError as error:
            self._lost = PeerLost(f"rank {self.rank} of {self.world_size} lost a peer in {what}: {_brief(error)}")
            raise self._lost from error


# Groups that were given up, with their work and its buffers: a peer that wakes up may still write into them.
_abandoned: list[dist.ProcessGroup] = []


def _finished(work: dist.Work, poll: float) -> bool:
    """Wait for `poll` seconds at most. Raises RuntimeError if the work failed."""
    try:
        work.wait(timedelta(seconds=poll))
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    work.wait()
    return True


def _brief(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]


def loopback_interface() -> str:
    """`lo` on Linux, `lo0` on macOS."""
    return next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))


def local_store(timeout: float = DEFAULT_TIMEOUT) -> dist.TCPStore:
    """A store that only this machine reaches; its `port` is free."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def join_local_store(port: int, timeout: float = DEFAULT_TIMEOUT) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout))


class ThreadComm(Comm):
    """One of N ranks that are threads of this process: for tests and for trying things out.

    A rank that fails should `abort()`, which is PeerLost for the others.
    """

    def __init__(self, rank: int, shared: _Shared):
        super().__init__()
        self.rank, self.world_size, self._shared = rank, shared.size, shared

    @classmethod
    def group(cls, size: int, timeout: float = 60.0) -> list[ThreadComm]:
        """The communicators of ranks 0 to size-1."""
        shared = _Shared(size, timeout)
        return [cls(rank, shared) for rank in range(size)]

    def all_reduce_(self, flat: Tensor) -> None:
        with self._counted(flat):
            flat.copy_(torch.stack(self._exchange(flat)).sum(0))

    def broadcast_(self, flat: Tensor, src: int = 0) -> None:
        with self._counted(*([flat] if src == self.rank else [])):
            flat.copy_(self._exchange(flat)[src])

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        with self._counted(flat):
            return self._exchange(flat)

    def send(self, flat: Tensor, dst: int) -> None:
        with self._counted(flat):
            self._shared.letters[self.rank, dst].put(flat.clone())

    def recv(self, flat: Tensor, src: int) -> None:
        with self._counted():
            try:
                flat.copy_(self._shared.letters[src, self.rank].get(timeout=self._shared.timeout))
            except queue.Empty:
                raise PeerLost(f"rank {self.rank} waited in vain for rank {src}") from None

    def barrier(self) -> None:
        try:
            self._shared.barrier.wait(self._shared.timeout)
        except threading.BrokenBarrierError:
            raise PeerLost(f"rank {self.rank} of {self.world_size} lost a peer") from None

    def abort(self) -> None:
        self._shared.barrier.abort()

    def _exchange(self, flat: Tensor) -> list[Tensor]:
        """Copies of all ranks' tensors."""
        self._shared.slots[self.rank] = flat.clone()
        self.barrier()
        slots = list(self._shared.slots)
        self.barrier()
        if any(t.shape != flat.shape or t.dtype != flat.dtype for t in slots):
            raise ExogymError(f"ranks met in different collectives: {[(tuple(t.shape), t.dtype) for t in slots]}")
        return slots


class _Shared:
    def __init__(self, size: int, timeout: float):
        self.size, self.timeout = size, timeout
        self.barrier = threading.Barrier(size)
        self.slots: list[Tensor] = [torch.empty(0)] * size
        self.letters = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
