"""What a rank sends in each collective, in bytes without headers: by the algorithms of gloo, which depend on N alone.

`size` is that of one rank's tensor. See gloo/allreduce.cc, allgather.cc and broadcast.cc.
"""

from __future__ import annotations


def all_reduce(size: int, ranks: int) -> int:
    """In a ring, N - 1 of N parts on their way to the sum, and N - 1 sums on their way to everybody."""
    return 2 * size * (ranks - 1) // ranks


def all_gather(size: int, ranks: int) -> int:
    """In a ring: this rank's own tensor and, of those that it has received, all but its successor's own."""
    return size * (ranks - 1)


def all_to_all(size: int, ranks: int) -> int:
    """All parts but its own."""
    return size // ranks * (ranks - 1)


def broadcast(size: int, ranks: int, rank: int, src: int) -> int:
    """In a binomial tree: those who have the tensor double with each turn, 1, 2, 4 and so on, counted from `src`."""
    place, turns = (rank - src) % ranks, (ranks - 1).bit_length()
    return size * sum(place < 2**turn and place + 2**turn < ranks for turn in range(turns))
