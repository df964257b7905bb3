"""Exchanges among some of the ranks, made of send and receive, so that the others need not take part.

The pairs of ranks meet one after another, (0, 1), (0, 2), (1, 2) and so on. In each pair the lower rank sends first, so
all wait for an earlier pair only, and never in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from torch import Tensor

from exogym.errors import ExogymError

if TYPE_CHECKING:
    from exogym.comm.comm import Comm


def reduce_among_(comm: Comm, flat: Tensor, ranks: Sequence[int]) -> None:
    """Replace `flat` by its sum over `ranks`: each of them sums one part, in rank order, and hands it out."""
    parts = flat.tensor_split(len(ranks))
    own = parts[ranks.index(comm.rank)]
    first, *others = exchange(comm, parts, ranks)
    total = first.clone()
    for other in others:
        total += other
    own.copy_(total)
    _in_pairs(comm, ranks, sent=[own] * len(ranks), received=parts)


def exchange(comm: Comm, parts: Sequence[Tensor], ranks: Sequence[int]) -> list[Tensor]:
    """What each of `ranks` has for this one, in rank order, where `parts` are what this one has for each of them.

    All have a part of the same size for the same rank. The result's own part is that of `parts` itself.
    """
    own = parts[ranks.index(comm.rank)]
    received = [part if part is own else own.new_empty(own.shape) for part in parts]
    _in_pairs(comm, ranks, parts, received)
    return received


def _in_pairs(comm: Comm, ranks: Sequence[int], sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
    """Send each other rank its own of `sent`, and fill its own of `received`; what is empty does not travel."""

    def send(place: int) -> None:
        if sent[place].numel():
            comm.send(sent[place], ranks[place])

    def receive(place: int) -> None:
        if received[place].numel():
            comm.recv(received[place], ranks[place])

    for lower, upper in combinations(range(len(ranks)), 2):
        if comm.rank == ranks[lower]:
            send(upper)
            receive(upper)
        elif comm.rank == ranks[upper]:
            receive(lower)
            send(lower)


def check_ranks(comm: Comm, ranks: Sequence[int]) -> None:
    is_sorted = list(ranks) == sorted({*ranks})
    if not is_sorted or comm.rank not in ranks or not 0 <= ranks[0] <= ranks[-1] < comm.world_size:
        raise ExogymError(f"rank {comm.rank} of {comm.world_size} cannot exchange among the ranks {list(ranks)}")
