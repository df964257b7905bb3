import os
import signal
import threading
import time

import pytest
import torch
from exogym_toys import Processes
from torch.distributed import PrefixStore

from exogym import PeerLost
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
            wrong += [] if whole == [True] * 3 and mine.equal(base * (comm.rank + 1)) else [(size, kind)]
    return wrong


def test_what_is_gathered_in_pieces_arrives_whole():
    with Processes(3, gathered_of_all_sizes) as processes:
        assert [processes.result(rank) for rank in range(3)] == [[], [], []]


BIG = 40_000_000  # bytes: more than the kernel holds for a peer that is frozen


def gathered_beside_a_frozen_peer(comm, port):
    """Rank 2 freezes; the others give it up, and gather in another group, also once it has thawed."""
    store, mine = join_local_store(port), torch.full((BIG,), comm.rank, dtype=torch.uint8)
    comm.all_gather(torch.zeros(1))
    if comm.rank == 2:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        with pytest.raises(PeerLost):
            while True:
                comm.all_gather(mine)
        store.set("thawed", "")
        return None
    interrupt = threading.Event()
    comm._interrupted = interrupt.is_set
    threading.Timer(1.5, interrupt.set).start()
    started = time.monotonic()
    with pytest.raises(PeerLost, match="all_gather: interrupted"):
        while True:
            comm.all_gather(mine)
    waited = time.monotonic() - started
    comm.close()
    second = ProcessGroupComm(
        rank=comm.rank, world_size=2, store=PrefixStore("second", store), address=LOOPBACK, timeout=30
    )
    gathered = second.all_gather(mine)
    store.set(f"gathered {comm.rank}", "")
    store.wait(["thawed"])
    time.sleep(0.3)
    return waited, [part.unique().tolist() for part in gathered], mine.unique().tolist()


def test_a_frozen_peer_is_given_up_and_changes_nothing_when_it_thaws():
    store = local_store()
    with Processes(3, gathered_beside_a_frozen_peer, store.port, timeout=10) as processes:
        store.wait(["gathered 0", "gathered 1"])
        os.kill(processes.processes[2].pid, signal.SIGCONT)
        assert processes.result(2) is None
        for rank in range(2):
            waited, gathered, mine = processes.result(rank)
            assert 1 < waited < 3 and gathered == [[0], [1]] and mine == [rank]
