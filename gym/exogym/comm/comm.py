"""What ranks say to each other, whatever carries it.

All tensors are flat, contiguous and on the CPU: strategy/communicate.py takes others. Every rank must make the same
calls in the same order.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from exogym.comm.among import check_ranks, exchange, reduce_among_
from exogym.comm.background import Background, in_background
from exogym.errors import RanksDiverged

T = TypeVar("T")


class Member(Protocol):
    """A rank as its communicator sees it."""

    def sync_state(self) -> tuple[int, bool]:
        """Come to one state with the others. Its fingerprint, and whether it has replaced this rank's own."""

    def has_synced(self) -> None:
        """All ranks have: their common state counts."""


class Comm(ABC):
    """Collectives among `world_size` ranks.

    bytes_sent: what this rank has sent to others in them, without headers, see traffic.py. A collective that failed
    counts as a whole.
    seconds: time spent in them, waiting for slower ranks included; of those in a Background, what `wait` took.
    """

    rank: int
    world_size: int
    device = torch.device("cpu")  # from where tensors travel
    continues_round = False  # whether this group was formed for ranks to end a round that they had begun in another

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

    def all_to_all(self, flat: Tensor) -> Tensor:
        """`flat` is N equal parts, one for each rank; the result is those that the ranks had for this one, in order."""
        return torch.cat(exchange(self, flat.chunk(self.world_size), range(self.world_size)))

    def reduce_among_(self, flat: Tensor, ranks: Sequence[int]) -> None:
        """Replace `flat` on each of `ranks` by the sum over them, with the same bits on all of these.

        ranks: in ascending order, this one among them. The others take no part; they may do the same elsewhere.
        """
        check_ranks(self, ranks)
        if len(ranks) == self.world_size:
            self.all_reduce_(flat)
        else:
            reduce_among_(self, flat, ranks)

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
        it needs again. `kind` is one of those in membership/messages.py; what `about` makes of the result goes with the
        vote.
        """
        return work()

    def vote_ahead(self, kind: str, about: dict[str, Any]) -> None:  # noqa: B027
        """From another thread, once the collectives of a joint action have run: this rank will take part in it as soon
        as it comes to `commit_together`. So the others need not wait for that.
        """

    def ask_ahead(self, round_number: int, *, stopping: bool) -> None:  # noqa: B027
        """Before a round's last step: put the question of `is_cut_short`, where the answer needs no other rank."""

    def is_cut_short(self, round_number: int, *, stopping: bool) -> bool:
        """Whether ranks stop inside this round; the same for all of them. Each asks at the round's end, or earlier if
        it wants to stop there. May raise Rejoined.

        Here all wait for each other, and one that wants to stop is enough.
        """
        flag = torch.tensor([float(stopping)])
        self.all_reduce_(flag)
        return flag.item() > 0

    def compare(self, digest: int, where: str) -> None:
        """Raises RanksDiverged, here or before the next joint action, if ranks do not have the same digest."""
        digests = [int(t) for t in self.all_gather(torch.tensor([digest]))]
        others = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if others:
            raise RanksDiverged(f"after {where} the weights of rank {others} are not those of rank 0")

    def regroup(self) -> None:  # noqa: B027
        """Between rounds: let in who is waiting."""

    def check_for_call(self) -> None:  # noqa: B027
        """Between steps. Raises Rejoined if the others have gone on without this rank, and now call it."""

    @property
    def is_over(self) -> bool:
        """Whether nothing that these ranks exchange can count any more: a joint action would lead to another group."""
        return False

    @property
    def is_regroup_due(self) -> bool:
        """Whether `regroup` is going to form another group."""
        return False

    def alive(self) -> None:  # noqa: B027
        """This rank is at something that takes long, and makes progress."""

    def background(self) -> Background:
        """For collectives that run while this rank computes. Until it has waited for them it starts no others."""
        return Background(self.waiting, self.interrupt)

    def interrupt(self) -> None:  # noqa: B027
        """From another thread: a collective that this rank is in raises PeerLost soon. Nothing but `close` follows."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """This rank waits for what runs in its background."""
        with self._counted():
            yield

    def close(self) -> None:  # noqa: B027  (most have nothing to leave)
        """Leave. Safe after PeerLost and when called twice."""

    @contextmanager
    def _counted(self, sent: int = 0) -> Iterator[None]:
        """Around a collective in which this rank sends so many bytes."""
        self.bytes_sent += sent
        if in_background():
            yield
            return
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started
