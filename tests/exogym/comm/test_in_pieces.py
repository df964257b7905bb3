import os
import signal
import threading
import time

import pytest
import torch
from exogym_toys import Processes, run_threads
from torch.distributed import PrefixStore

from exogym import PeerLost, SingleComm
from exogym.comm import process_group
from exogym.comm.process_group import LOOPBACK, ProcessGroupComm, join_local_store, local_store

PIECE = 64  # bytes


def gathered_of_all_sizes(comm):
    """What of any rank did not arrive as it was, by size and kind."""
    process_group.WHOLE_BYTES, process_group.PIECE_BYTES = 16, PIECE
    wrong = []
    for size in (0, 1, 5, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 9 * PIECE - 1):
        for kind in (torch.uint8, torch.int64, torch.float32, torch.float64):
            base = torch.arange(size).remainder(50).to(kind)
            mine = base * (comm.rank + 1)
            gathered = comm.all_gather(mine)
            whole = [part.equal(base * (rank + 1)) for rank, part in enumerate(gathered)]
            wrong += [] if whole == [True] * comm.world_size and mine.equal(base * (comm.rank + 1)) else [(size, kind)]
    return wrong


def swapped_of_all_sizes(comm):
    """What did not arrive as it was, by size and kind, and the bytes that the counter missed."""
    process_group.WHOLE_BYTES, process_group.PIECE_BYTES = 16, 3 * PIECE
    wrong = []
    for size in (0, 1, 5, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 9 * PIECE - 1):
        for kind in (torch.uint8, torch.int64, torch.float32, torch.float64):
            base, before = torch.arange(size).remainder(50).to(kind), comm.bytes_sent
            mine = torch.cat([base * (10 * comm.rank + dst) for dst in range(comm.world_size)])
            came = comm.all_to_all(mine)
            wanted = torch.cat([base * (10 * src + comm.rank) for src in range(comm.world_size)])
            wrong += [] if came.equal(wanted) and came.dtype == kind else [(size, kind)]
            uncounted = (comm.world_size - 1) * base.nbytes - (comm.bytes_sent - before)
            wrong += [(size, kind, uncounted)] if not -8 <= uncounted <= 0 else []
    return wrong


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
@pytest.mark.parametrize("of_all_sizes", [gathered_of_all_sizes, swapped_of_all_sizes])
def test_what_travels_in_pieces_arrives_whole(of_all_sizes, ranks):
    with Processes(ranks, of_all_sizes) as processes:
        assert [processes.result(rank) for rank in range(ranks)] == [[]] * ranks


def order_of_words(comm):
    """What gloo is asked for while parts are swapped."""
    told, group = [], comm._group

    class Noting:
        def __getattr__(self, name):
            told.append(name)
            return getattr(group, name)

    comm._group = Noting()
    comm.all_to_all(torch.ones(4))
    comm._group = group
    return told


@pytest.mark.slow
def test_a_rank_is_ready_to_be_sent_to_before_it_sends():
    """Else gloo sends that word behind all that the rank sends itself, and a link carries one way at a time."""
    with Processes(2, order_of_words) as processes:
        assert [processes.result(rank) for rank in range(2)] == [["recv", "send"]] * 2


def test_without_gloo_parts_are_swapped_in_pairs():
    rank_main = lambda comm: (comm.all_to_all(torch.arange(6.0) + 10 * comm.rank).tolist(), comm.bytes_sent)  # noqa: E731
    swapped = [([0.0, 1.0, 10.0, 11.0, 20.0, 21.0], 16), ([2.0, 3.0, 12.0, 13.0, 22.0, 23.0], 16)]
    assert run_threads(3, rank_main)[:2] == swapped
    assert SingleComm().all_to_all(torch.ones(2)).tolist() == [1.0, 1.0]


COLLECTIVES = {
    "all_gather": lambda comm, mine: comm.all_gather(mine),
    "all_to_all": lambda comm, mine: comm.all_to_all(mine).split(len(mine) // comm.world_size),
}
BIG = 42_000_000  # bytes: more than the kernel holds for a peer that is frozen


def gathered_beside_a_frozen_peer(comm, port, what):
    """Rank 2 freezes; the others give it up, and do the same in another group, also once it has thawed."""
    collective = COLLECTIVES[what]
    store, mine = join_local_store(port), torch.full((BIG,), comm.rank, dtype=torch.uint8)
    comm.all_gather(torch.zeros(1))
    if comm.rank == 2:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        with pytest.raises(PeerLost):
            while True:
                collective(comm, mine)
        store.set("thawed", "")
        return None
    interrupt = threading.Event()
    comm._interrupted = interrupt.is_set
    threading.Timer(1.5, interrupt.set).start()
    started = time.monotonic()
    with pytest.raises(PeerLost, match=f"{what}: interrupted"):
        while True:
            collective(comm, mine)
    waited = time.monotonic() - started
    comm.close()
    second = ProcessGroupComm(
        rank=comm.rank, world_size=2, store=PrefixStore("second", store), address=LOOPBACK, timeout=30
    )
    gathered = collective(second, mine)
    store.set(f"gathered {comm.rank}", "")
    store.wait(["thawed"])
    time.sleep(0.3)
    return waited, [part.unique().tolist() for part in gathered], mine.unique().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("what", COLLECTIVES)
def test_a_frozen_peer_is_given_up_and_changes_nothing_when_it_thaws(what):
    store = local_store()
    with Processes(3, gathered_beside_a_frozen_peer, store.port, what, timeout=10) as processes:
        store.wait(["gathered 0", "gathered 1"])
        os.kill(processes.processes[2].pid, signal.SIGCONT)
        assert processes.result(2) is None
        for rank in range(2):
            waited, gathered, mine = processes.result(rank)
            assert 1 < waited < 3 and gathered == [[0], [1]] and mine == [rank]
