import os
import signal

import pytest
import torch
from exogym_toys import Processes, run_threads

from exogym import PeerLost, SingleComm, digest
from exogym.comm import process_group
from exogym.errors import ExogymError

ISLANDS = {2: [[0], [1]], 3: [[0, 2], [1]], 4: [[0, 3], [1, 2]], 5: [[0, 2, 4], [1, 3]]}
SIZES = (0, 1, 2, 7, 60, 61)


def values(rank: int, size: int) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(1000 * size + rank)) + rank


def on_islands(comm, islands):
    """The hash of the sum of each size, how far it is from float64's, and whether bytes are as expected."""
    [ranks] = [island for island in islands if comm.rank in island]
    found = []
    for size in SIZES:
        flat, sent = values(comm.rank, size), comm.bytes_sent
        comm.reduce_among_(flat, ranks)
        sent = comm.bytes_sent - sent
        expected = sum(values(rank, size).double() for rank in ranks)
        found.append((digest(flat), torch.allclose(flat.double(), expected, rtol=1e-6), sent))
    comm.all_reduce_(torch.zeros(1))
    return found


def check(results, islands):
    for ranks in islands:
        first = results[ranks[0]]
        for rank in ranks:
            assert [(hashed, right) for hashed, right, _ in results[rank]] == [(hashed, True) for hashed, _, _ in first]
        for number, size in enumerate(SIZES):
            in_all = sum(results[rank][number][2] for rank in ranks)
            assert in_all == 2 * 4 * size * (len(ranks) - 1)  # as much as a ring


@pytest.mark.parametrize("ranks", ISLANDS)
def test_islands_of_threads_sum_at_the_same_time(ranks):
    check(run_threads(ranks, lambda comm: on_islands(comm, ISLANDS[ranks])), ISLANDS[ranks])


def test_islands_of_real_processes():
    with Processes(5, on_islands, ISLANDS[5]) as processes:
        check([processes.result(rank) for rank in range(5)], ISLANDS[5])


def test_all_ranks_are_an_all_reduce_and_one_rank_keeps_its_own():
    def rank_main(comm):
        flat, alone = torch.full((3,), comm.rank + 1.0), torch.full((3,), comm.rank + 1.0)
        comm.reduce_among_(flat, [0, 1, 2])
        comm.reduce_among_(alone, [comm.rank])
        return flat.tolist(), alone.tolist(), comm.bytes_sent

    results = run_threads(3, rank_main)
    assert results == [([6.0] * 3, [rank + 1.0] * 3, 16) for rank in range(3)]
    flat = torch.ones(2)
    SingleComm().reduce_among_(flat, [0])
    assert flat.tolist() == [1, 1]


@pytest.mark.parametrize("ranks", [[1], [1, 0], [0, 0], [0, 3], []])
def test_ranks_that_cannot_be(ranks):
    with pytest.raises(ExogymError, match="rank 0 of 3 cannot exchange among the ranks"):
        run_threads(3, lambda comm: comm.reduce_among_(torch.ones(2), ranks) if comm.rank == 0 else None)


def in_pieces(comm):
    process_group.WHOLE_BYTES, process_group.PIECE_BYTES = 16, 64
    return on_islands(comm, [[0, 1], [2]])


def member_dies(comm):
    comm.all_reduce_(torch.zeros(1))
    if comm.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    flat = torch.full((9,), 1.0)
    if comm.rank in (0, 2):
        comm.reduce_among_(flat, [0, 2])  # the other island is none of theirs
        return flat.unique().tolist()
    with pytest.raises(PeerLost, match=r"rank 1 of 4 lost a peer in (send|receive)"):
        comm.reduce_among_(flat, [1, 3])
    return "lost"


@pytest.mark.slow
def test_a_member_that_dies_is_lost_for_its_island_alone():
    with Processes(4, member_dies, timeout=5) as processes:
        assert [processes.result(rank) for rank in range(3)] == [[2.0], "lost", [2.0]]
