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
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from exogym.errors import ExogymError, PeerLost, RanksDiverged
from exogym.membership import ENTER

DEFAULT_TIMEOUT = 300.0  # seconds; a rank waits this long for the slowest one before it gives the others up
POLL = 0.25  # seconds; how soon an interrupt is noticed inside a collective

T = TypeVar("T")


class Comm(ABC):
    """Collectives among `world_size` ranks.

    bytes_sent: payload that this rank put into collectives (what the backend sends on the wire is its own affair).
    seconds: time spent in them, waiting for slower ranks included.
    """

    rank: int
    world_size: int
    amid_round = False  # whether this group was formed for ranks to end a round that they had begun in another

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.seconds = 0.0
        self.trained: dict[int, list[str]] = {}  # ids of this rank's samples since the last round, by epoch
        self.position: tuple[int, ...] = ()  # of this rank in the work: the same on all when a round ends
        self.on_commit: Callable[[str], None] = lambda what: None  # called as soon as a joint action counts

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

    @property
    def members(self) -> tuple[str, ...]:
        """A name for each rank, which stays the same when ranks are numbered anew."""
        return tuple(f"rank{rank}" for rank in range(self.world_size))

    @property
    def generation(self) -> int:
        """Counts the groups that this communicator has been; buffers must not outlive theirs."""
        return 0

    def enter(self, enter: Callable[[], int]) -> None:
        """Meet the others. `enter` makes ranks agree on a common state, and returns its digest."""
        enter()
        self.on_commit(ENTER)

    def together(self, what: str, work: Callable[[], T], about: Callable[[T], dict[str, Any]] = lambda _: {}) -> T:
        """work() with its collectives, as one action of all ranks.

        A group that survives losses repeats it until all of its ranks have done it: until then work() must change
        nothing that it needs again. `what` is one of the kinds of votes in membership.py; what `about` makes of the
        result goes with this rank's.
        """
        result = work()
        self.on_commit(what)
        return result

    def compare(self, digest: int, where: str) -> None:
        """Raises RanksDiverged, here or before the next joint action, if ranks do not have the same digest."""
        digests = [int(t) for t in self.all_gather(torch.tensor([digest]))]
        others = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if others:
            raise RanksDiverged(f"after {where} the weights of rank {others} are not those of rank 0")

    def regroup(self) -> None:  # noqa: B027
        """Between rounds: let in who is waiting."""

    def look_up(self) -> None:  # noqa: B027
        """Between steps. Raises Rejoined if the others have gone on without this rank, and now call it."""

    def alive(self) -> None:  # noqa: B027
        """This rank is at something that takes long, and makes progress."""

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
    """A torch.distributed process group; gloo's are kept out of torch's global state, so that several may follow.

    Collectives start asynchronously and are polled, so that a peer that is silent for `timeout` seconds becomes
    PeerLost, and so does `interrupted()` when it turns true, also in a process where signals cannot. `store` outlives
    the group: give each group that forms over it a PrefixStore of its own. For gloo between machines set
    GLOO_SOCKET_IFNAME before this. Backends other than gloo allow one group at a time in a process.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        store: dist.Store,
        backend: str = "gloo",
        timeout: float = DEFAULT_TIMEOUT,
        interrupted: Callable[[], bool] = lambda: False,
    ):
        super().__init__()
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._work: dist.Work | None = None
        self._buffers: tuple[Tensor, ...] = ()
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._interrupted = interrupted
        self._lost: PeerLost | None = None
        self._global = backend != "gloo"
        # gloo's own timeout is the same: the process of a rank that gave up cannot exit before it has passed.
        wait = timedelta(seconds=timeout)
        try:
            if self._global:
                dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=wait)
                self._group = dist.group.WORLD
            else:
                self._group = dist.ProcessGroupGloo(store, rank, world_size, wait)
        except RuntimeError as error:
            raise PeerLost(
                f"rank {rank} of {world_size} could not join the {backend} group: {_brief(error)}"
            ) from error

    def all_reduce_(self, flat: Tensor) -> None:
        with self._counted(flat), self._staged(flat) as tensor:
            self._wait(lambda: self._group.allreduce([tensor]), "all_reduce", tensor)

    def broadcast_(self, flat: Tensor, src: int = 0) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        sent = [flat] if src == self.rank else []
        with self._counted(*sent), self._staged(flat) as tensor:
            self._wait(lambda: self._group.broadcast([tensor], options), "broadcast", tensor)

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        with self._counted(flat), self._staged(flat) as tensor:
            gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
            self._wait(lambda: self._group.allgather([gathered], [tensor]), "all_gather", tensor, *gathered)
        return [t.cpu() for t in gathered]

    def send(self, flat: Tensor, dst: int) -> None:
        with self._counted(flat), self._staged(flat) as tensor:
            self._wait_whole(lambda: self._group.send([tensor], dst, 0), f"send to rank {dst}", tensor)

    def recv(self, flat: Tensor, src: int) -> None:
        with self._counted(), self._staged(flat) as tensor:
            self._wait_whole(lambda: self._group.recv([tensor], src, 0), f"receive from rank {src}", tensor)

    def barrier(self) -> None:
        self.all_reduce_(torch.zeros(1))

    def close(self) -> None:
        if self._group is None:
            return
        group, self._group = self._group, None
        if self._lost and self._work is not None:
            _abandoned.append((group, self._work, self._buffers))
        self._work, self._buffers = None, ()
        if self._global:
            dist.destroy_process_group()
        del group
        # Dropping one whose work is still in flight would block until its timeout.
        _abandoned[:] = [kept for kept in _abandoned if not kept[1].is_completed()]

    @contextmanager
    def _staged(self, flat: Tensor) -> Iterator[Tensor]:
        tensor = flat.to(self._device)
        yield tensor
        if tensor is not flat:
            flat.copy_(tensor)

    def _wait(self, start: Callable[[], dist.Work], what: str, *buffers: Tensor) -> None:
        self._poll(start, what, buffers, lambda work: _finished(work, POLL))

    def _wait_whole(self, start: Callable[[], dist.Work], what: str, *buffers: Tensor) -> None:
        """For send and receive, where gloo cuts the connection when a wait ends early."""
        outcome: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()

        def wait(work: dist.Work) -> None:
            try:
                work.wait(timedelta(seconds=self.timeout))
                outcome.put(None)
            except RuntimeError as error:
                outcome.put(error)

        def begin() -> dist.Work:
            work = start()
            threading.Thread(target=wait, args=(work,), daemon=True).start()
            return work

        def finished(_: dist.Work) -> bool:
            try:
                error = outcome.get(timeout=POLL)
            except queue.Empty:
                return False
            if error:
                raise error
            return True

        self._poll(begin, what, buffers, finished)

    def _poll(
        self,
        start: Callable[[], dist.Work],
        what: str,
        buffers: tuple[Tensor, ...],
        finished: Callable[[dist.Work], bool],
    ) -> None:
        if self._lost:
            raise self._lost
        if self._group is None:
            raise ExogymError(f"{what} on a closed communicator")
        deadline = time.monotonic() + self.timeout
        try:
            self._work, self._buffers = None, buffers
            if self._interrupted():
                raise RuntimeError("interrupted")
            self._work = start()
            while not finished(self._work):
                if self._interrupted():
                    raise RuntimeError("interrupted")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no answer within {self.timeout:g} s")
            self._work, self._buffers = None, ()
        except RuntimeError as error:
            self._lost = PeerLost(f"rank {self.rank} of {self.world_size} lost a peer in {what}: {_brief(error)}")
            raise self._lost from error


# Groups that were given up, with their work and its buffers: a peer that wakes up may still write into them.
_abandoned: list[tuple[dist.ProcessGroup, dist.Work, tuple[Tensor, ...]]] = []


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
