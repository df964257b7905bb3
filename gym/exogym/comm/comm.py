"""Collectives of a group of ranks, whatever carries them; the group of one rank, and that of threads.

All tensors are flat, contiguous and on the CPU: strategy/communicate.py takes others. Every rank must make the same
calls in the same order.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import combinations
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from exogym.errors import ExogymError, PeerLost, RanksDiverged

DEFAULT_TIMEOUT = 300.0  # seconds; a rank waits this long for the slowest one before it gives the others up

T = TypeVar("T")
Job = Callable[[], None]
_of_thread = threading.local()  # comm: see `use`. is_background: this thread belongs to a Background


class use:
    """Have the collectives of this thread run on `comm`; as a context, until its end. None: as without it."""

    def __init__(self, comm: Comm | None):
        self._before = comm_in_use()
        _of_thread.comm = comm

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        _of_thread.comm = self._before


def comm_in_use() -> Comm | None:
    return getattr(_of_thread, "comm", None)


def in_background() -> bool:
    """Say whether this thread belongs to a Background: nobody waits for what it does, unless in Background.wait."""
    return getattr(_of_thread, "is_background", False)


class Background:
    """Runs jobs in a thread, one at a time, in the order in which they were put.

    Once one has failed, the others are left out, until `wait` has raised its error.
    waiting: gives the context in which a rank waits for others. interrupt: makes the job that is running fail soon.
    """

    def __init__(self, waiting: Callable[[], AbstractContextManager[None]], interrupt: Job):
        self._waiting, self._interrupt = waiting, interrupt
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def put(self, job: Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="background collectives", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def wait(self) -> None:
        """Wait until all is done."""
        with self._waiting():
            self._jobs.join()
            error, self._error = self._error, None
            if error is not None:
                raise error

    def close(self) -> None:
        """End the thread. What it is at is given up. May be called twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._jobs.unfinished_tasks:
            self._error = self._error or RuntimeError("closed")
            self._interrupt()
        self._jobs.put(None)
        thread.join()
        self._error = None

    def _run(self) -> None:
        _of_thread.is_background = True
        while (job := self._next()) is not None:
            try:
                if self._error is None:
                    job()
            except BaseException as error:  # for the thread that waits
                self._error = error
            del job  # it may hold large tensors
            self._jobs.task_done()
        self._jobs.task_done()

    def _next(self) -> Job | None:
        """Wait for a job; a simulation waits in its own time."""
        return self._jobs.get()


class Member(Protocol):
    """A rank as its communicator sees it."""

    def sync_state(self) -> tuple[int, bool]:
        """Come to one state with the others. Returns its fingerprint, and whether it has replaced this rank's own."""

    def has_synced(self) -> None:
        """Learn that all ranks have: their common state counts."""


class Comm(ABC):
    """Collectives among `world_size` ranks.

    bytes_sent: what this rank has sent to others in them, without headers. A collective that failed
    counts as a whole.
    seconds: time spent in them, waiting for slower ranks included; of those in a Background, what `wait` took.
    on_commit: called after a joint action that no coordinator has to confirm, see `commit_together`.
    """

    rank: int
    world_size: int
    device = torch.device("cpu")  # from where tensors travel
    continues_round = False  # whether this group was formed for ranks to end a round that they had begun in another

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.seconds = 0.0
        self.on_commit: Callable[[str, dict[str, Any]], None] = lambda kind, about: None

    @abstractmethod
    def all_reduce_(self, flat: Tensor) -> None:
        """Replace `flat` on every rank by the sum over ranks, with the same bits on all. Raises PeerLost."""

    @abstractmethod
    def broadcast_(self, flat: Tensor, src: int = 0) -> None:
        """Replace `flat` on every rank by that of rank `src`."""

    @abstractmethod
    def all_gather(self, flat: Tensor) -> list[Tensor]:
        """Return the ranks' tensors (equal shapes) in rank order."""

    @abstractmethod
    def send(self, flat: Tensor, dst: int) -> None: ...

    @abstractmethod
    def recv(self, flat: Tensor, src: int) -> None:
        """Fill `flat` with what rank `src` sent."""

    def all_to_all(self, flat: Tensor) -> Tensor:
        """Send each rank its own of the N equal parts of `flat`; return those that the ranks had for this one."""
        return torch.cat(exchange(self, flat.chunk(self.world_size), range(self.world_size)))

    def reduce_among_(self, flat: Tensor, ranks: Sequence[int]) -> None:
        """Replace `flat` on each of `ranks` by the sum over them, with the same bits on all of these.

        ranks: in ascending order, this one among them. The others take no part; they may do the same elsewhere.
        Each of them sums one part, in rank order, and hands it out.
        """
        is_sorted = list(ranks) == sorted({*ranks})
        if not is_sorted or self.rank not in ranks or not 0 <= ranks[0] <= ranks[-1] < self.world_size:
            raise ExogymError(f"rank {self.rank} of {self.world_size} cannot exchange among the ranks {list(ranks)}")
        if len(ranks) == self.world_size:
            self.all_reduce_(flat)
            return
        parts = flat.tensor_split(len(ranks))
        own = parts[ranks.index(self.rank)]
        first, *others = exchange(self, parts, ranks)
        total = first.clone()
        for other in others:
            total += other
        own.copy_(total)
        _exchange_in_pairs(self, ranks, sent=[own] * len(ranks), received=parts)

    @property
    def members(self) -> tuple[str, ...]:
        """A name for each rank, which stays the same when ranks are numbered anew."""
        return tuple(f"rank{rank}" for rank in range(self.world_size))

    @property
    def generation(self) -> int:
        """Counts the groups that this communicator has been; buffers must not outlive theirs."""
        return 0

    def join(self, member: Member) -> None:
        """Meet the others, and come to one state with them."""
        member.sync_state()
        member.has_synced()

    def commit_together(
        self, kind: str, work: Callable[[], T], about: Callable[[T], dict[str, Any]] = lambda result: {}
    ) -> T:
        """Two-phase commit of all ranks: run work() with its collectives, vote, wait for the others' votes.

        A group that survives losses runs work() again until all of its ranks have voted, so work() must not change what
        it needs again. `kind` is one of those in membership/__init__.py; what `about` makes of the result goes with the
        vote.
        """
        result = work()
        self.on_commit(kind, about(result))
        return result

    def vote_ahead(self, kind: str, about: dict[str, Any]) -> None:  # noqa: B027
        """Promise, once a joint action's collectives have run in another thread, that this rank will take part in it.

        It does so as soon as it comes to `commit_together`; the others need not wait for that.
        """

    def ask_ahead(self, round_number: int, *, stopping: bool) -> None:  # noqa: B027
        """Put the question of `is_cut_short` before a round's last step, where the answer needs no other rank."""

    def is_cut_short(self, round_number: int, *, stopping: bool) -> bool:
        """Say whether ranks stop inside this round; the same for all of them. May raise Rejoined.

        Each asks at the round's end, or earlier if it wants to stop there. Here all wait for each other, and one that
        wants to stop is enough.
        """
        flag = torch.tensor([float(stopping)])
        self.all_reduce_(flag)
        return flag.item() > 0

    def compare(self, digest: int, where: str) -> None:
        """Raise RanksDiverged, here or before the next joint action, if ranks do not have the same digest."""
        digests = [int(t) for t in self.all_gather(torch.tensor([digest]))]
        others = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if others:
            raise RanksDiverged(f"after {where} the weights of rank {others} are not those of rank 0")

    def regroup(self) -> None:  # noqa: B027
        """Let in who is waiting, between rounds."""

    def check_for_call(self) -> None:  # noqa: B027
        """Raise Rejoined, between steps, if the others have gone on without this rank, and now call it."""

    @property
    def is_over(self) -> bool:
        """Say whether nothing that these ranks exchange can count any more: another group is about to form."""
        return False

    @property
    def is_regroup_due(self) -> bool:
        """Say whether `regroup` is going to form another group."""
        return False

    def alive(self) -> None:  # noqa: B027
        """Tell that this rank is at something that takes long, and makes progress."""

    def background(self) -> Background:
        """Make a thread for collectives that run while this rank computes. Until it has waited it starts no others."""
        return Background(self.waiting, self.interrupt)

    def interrupt(self) -> None:  # noqa: B027
        """Have this rank's collective raise PeerLost soon, from another thread. Nothing but `close` follows."""

    def waiting(self) -> AbstractContextManager[None]:
        """Count what this rank waits for its background."""
        return self._counted()

    def close(self) -> None:  # noqa: B027  (most have nothing to leave)
        """Leave. Safe after PeerLost and when called twice."""

    @contextmanager
    def _counted(self, sent: int = 0) -> Iterator[None]:
        """Count a collective in which this rank sends so many bytes."""
        self.bytes_sent += sent
        if in_background():
            yield
            return
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

    def abort(self) -> None:
        self._shared.barrier.abort()

    def interrupt(self) -> None:
        self.abort()

    def _exchange(self, flat: Tensor) -> list[Tensor]:
        """Return copies of all ranks' tensors."""
        shared = self._shared
        shared.slots[self.rank] = flat.clone()
        try:
            shared.barrier.wait(shared.timeout)
            slots = list(shared.slots)
            shared.barrier.wait(shared.timeout)
        except threading.BrokenBarrierError:
            raise PeerLost(f"rank {self.rank} of {self.world_size} lost a peer") from None
        if any(t.shape != flat.shape or t.dtype != flat.dtype for t in slots):
            raise ExogymError(f"ranks met in different collectives: {[(tuple(t.shape), t.dtype) for t in slots]}")
        return slots


class _Shared:
    def __init__(self, size: int, timeout: float):
        self.size, self.timeout = size, timeout
        self.barrier = threading.Barrier(size)
        self.slots: list[Tensor] = [torch.empty(0)] * size
        self.messages: dict[tuple[int, int], queue.Queue[Tensor]] = {
            (a, b): queue.Queue() for a in range(size) for b in range(size)
        }


def exchange(comm: Comm, parts: Sequence[Tensor], ranks: Sequence[int]) -> list[Tensor]:
    """Return what each of `ranks` has for this one, in rank order, where `parts` are what this one has for each.

    Made of send and receive, so that the other ranks of `comm` need not take part. All have a part of the same size for
    the same rank. The result's own part is that of `parts` itself.
    """
    own = parts[ranks.index(comm.rank)]
    received = [part if part is own else own.new_empty(own.shape) for part in parts]
    _exchange_in_pairs(comm, ranks, parts, received)
    return received


def _exchange_in_pairs(comm: Comm, ranks: Sequence[int], sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
    """Send each other rank its own of `sent`, and fill its own of `received`; what is empty is not sent.

    The pairs of ranks meet one after another, (0, 1), (0, 2), (1, 2) and so on. In each pair the lower rank sends
    first, so all wait for an earlier pair only, and never in a circle.
    """

    own = ranks.index(comm.rank)
    for lower, upper in combinations(range(len(ranks)), 2):
        if own not in (lower, upper):
            continue
        other = upper if own == lower else lower
        if own == lower and sent[other].numel():
            comm.send(sent[other], ranks[other])
        if received[other].numel():
            comm.recv(received[other], ranks[other])
        if own == upper and sent[other].numel():
            comm.send(sent[other], ranks[other])


# What a rank sends in each collective, in bytes without headers, where one rank's tensor has `size` bytes. By the
# algorithms of gloo, which depend on the number of ranks alone: see gloo/allreduce.cc, allgather.cc and broadcast.cc.


def all_reduce_bytes(size: int, ranks: int) -> int:
    return 2 * size * (ranks - 1) // ranks  # in a ring: N - 1 of N parts to be summed, then N - 1 of the sums


def all_gather_bytes(size: int, ranks: int) -> int:
    return size * (ranks - 1)  # in a ring: its own, and those that it has received but the one of its successor


def broadcast_bytes(size: int, ranks: int, rank: int, src: int) -> int:
    # In a binomial tree, those who have the tensor double with each turn, 1, 2, 4 and so on, counted from `src`.
    place, turns = (rank - src) % ranks, (ranks - 1).bit_length()
    return size * sum(place < 1 << turn and place + (1 << turn) < ranks for turn in range(turns))
