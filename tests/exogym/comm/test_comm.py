import contextlib
import os
import signal
import threading
import time

import pytest
import torch
from exogym_toys import Line, Points, Processes, Steps, run_threads, train_node
from torch.distributed import PrefixStore

from exogym import AllReduceStrategy, DiLoCoStrategy, FlatParameters, PeerLost, SingleComm, digest
from exogym.comm import process_group
from exogym.comm.process_group import LOOPBACK, ProcessGroupComm, join_local_store, local_store
from exogym.errors import ExogymError


def collectives(comm):
    """One of each, and what came out."""
    mine = torch.tensor([1.0, 10.0]) * (comm.rank + 1)
    reduced, cast = mine.clone(), mine.clone()
    comm.all_reduce_(reduced)
    comm.broadcast_(cast, src=1)
    gathered = comm.all_gather(torch.tensor([comm.rank, -(2**62) - comm.rank]))
    passed = torch.zeros(2)
    if comm.rank == 0:
        comm.send(mine, dst=1)
    elif comm.rank == 1:
        time.sleep(0.4)  # longer than one poll: the sender must not give up
        comm.recv(passed, src=0)
        comm.send(mine, dst=2)
    else:
        comm.recv(passed, src=1)
    comm.all_reduce_(torch.zeros(1))
    return reduced.tolist(), cast.tolist(), [t.tolist() for t in gathered], passed.tolist(), comm.bytes_sent


def strategies(comm):
    """Flats and digests after training with each strategy."""
    ends = []
    for strategy in (DiLoCoStrategy(H=2, lr=0.05), AllReduceStrategy(lr=0.05)):
        points, model = Points(18), Line()
        steps = Steps([[(points.x[i + comm.rank :: 9], points.y[i + comm.rank :: 9])] for i in (0, 3, 6)])
        result = train_node(model, comm, strategy, steps, epochs=2, device="cpu").run()
        ends.append((FlatParameters(model).read().tolist(), result.digest))
    return ends


def all_of_it(comm):
    return collectives(comm), strategies(comm)


def test_threads_and_real_processes_agree():
    with Processes(3, all_of_it) as processes:
        of_processes = [processes.result(rank) for rank in range(3)]
    of_threads = run_threads(3, all_of_it)
    for rank in range(3):
        reduced, cast, gathered, passed, _ = of_processes[rank][0]
        assert (reduced, cast) == ([6.0, 60.0], [2.0, 20.0])
        assert gathered == [[r, -(2**62) - r] for r in range(3)]
        assert passed == [[0.0, 0.0], [1.0, 10.0], [2.0, 20.0]][rank]
        assert of_threads[rank][0][:4] == of_processes[rank][0][:4]
        assert of_threads[rank][1][0][1] == of_threads[0][1][0][1]
        for (flat, value), (other, first) in zip(of_processes[rank][1], of_processes[0][1], strict=True):
            assert flat == other and value == first  # ranks agree bit for bit
        for (flat, _), (threaded, _) in zip(of_processes[rank][1], of_threads[rank][1], strict=True):
            assert flat == pytest.approx(threaded, rel=1e-5, abs=1e-6)


PIECE = 64  # values


def pieces_of_all_sizes(comm):
    """What differs from a sum, or from rank 1's values, by size and kind; and the hash of the sums."""
    process_group.WHOLE_BYTES, process_group.PIECE_BYTES = 16, 4 * PIECE
    wrong, hashes = [], []
    for size in (0, 1, 5, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 1, 9 * PIECE - 1):
        for kind in (torch.float32, torch.float64, torch.int64, torch.uint8):
            base = torch.arange(size).remainder(50).to(kind)
            mine = base * (comm.rank + 1)
            reduced, cast, passed = mine.clone(), mine.clone(), mine.clone()
            comm.all_reduce_(reduced)
            comm.broadcast_(cast, src=1)
            comm.send(passed, dst=0) if comm.rank else comm.recv(passed, src=1)
            wrong += [(size, kind)] if not reduced.equal(base * 3) or not cast.equal(base * 2) else []
            wrong += [(size, kind, "sent")] if not passed.equal(base * 2) else []
        uneven = torch.rand(size, generator=torch.Generator().manual_seed(comm.rank))
        comm.all_reduce_(uneven)
        hashes.append(digest(uneven))
    return wrong, hashes


def test_payloads_of_any_size_arrive_whole_in_pieces_with_the_same_bits():
    with Processes(2, pieces_of_all_sizes) as processes:
        (wrong, hashes), other = processes.result(0), processes.result(1)
    assert (wrong, hashes) == other and not wrong


def meet_then_fault(comm, fault):
    comm.all_reduce_(torch.zeros(1))
    if comm.rank == 1 and fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 1 and fault == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(PeerLost, match="rank 0 of 2 lost a peer in all_reduce"):
        comm.all_reduce_(torch.ones(100_000))
    with pytest.raises(PeerLost):
        comm.all_gather(torch.ones(1))
    waited = time.monotonic() - started
    started = time.monotonic()
    comm.close()
    comm.close()
    return waited, time.monotonic() - started


@pytest.mark.parametrize(
    ("fault", "least", "most"), [("kill", 0, 1.5), pytest.param("freeze", 2.9, 5, marks=pytest.mark.slow)]
)
def test_a_lost_peer_is_noticed_and_leaving_is_quick(fault, least, most):
    with Processes(2, meet_then_fault, fault, timeout=3) as processes:
        waited, leaving = processes.result(0)
        assert least <= waited <= most and leaving < 0.5
        processes.processes[0].join(10)  # not before gloo's own time-out
        assert processes.processes[0].exitcode == 0


INTERRUPTED = {
    "all_reduce": lambda group: group.all_reduce_(torch.ones(100_000)),
    "all_gather": lambda group: group.all_gather(torch.ones(1)),
    "receive": lambda group: group.recv(torch.ones(100_000), src=1),
}


def interrupted_beside_a_frozen_peer(comm, port):
    """How long each collective went on after it was interrupted."""
    store, interrupt = join_local_store(port), threading.Event()
    common = {"rank": comm.rank, "world_size": 2, "address": LOOPBACK, "timeout": 30, "interrupted": interrupt.is_set}
    groups = {what: ProcessGroupComm(store=PrefixStore(what, store), **common) for what in INTERRUPTED}
    comm.all_reduce_(torch.zeros(1))
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    waited = {}
    for what, group in groups.items():
        threading.Timer(0.4, interrupt.set).start()
        started = time.monotonic()
        with pytest.raises(PeerLost, match=f"lost a peer in {what}.*: interrupted"):
            INTERRUPTED[what](group)
        group.close()
        waited[what] = time.monotonic() - started - 0.4
        with pytest.raises(PeerLost):
            group.all_reduce_(torch.zeros(1))
        interrupt.clear()
    return waited


@pytest.mark.slow
def test_an_interrupt_ends_the_wait_for_a_frozen_peer_within_a_second():
    store = local_store()
    with Processes(2, interrupted_beside_a_frozen_peer, store.port) as processes:
        waited = processes.result(0)
    assert waited.keys() == INTERRUPTED.keys() and all(0 <= seconds < 1 for seconds in waited.values()), waited


def joined_by_address(comm, port):
    """Whatever another thread does to the environment: one that was left behind may still be joining."""
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    about = {"rank": comm.rank, "world_size": 2, "store": PrefixStore("second", join_local_store(port)), "timeout": 30}
    with pytest.raises(PeerLost, match="could not join"):
        ProcessGroupComm(**about)
    group, one = ProcessGroupComm(**about, address=LOOPBACK), torch.ones(1)
    group.all_reduce_(one)
    return one.item()


@pytest.mark.slow
def test_a_group_that_is_given_an_address_reads_no_interface_from_the_environment():
    store = local_store()
    with Processes(2, joined_by_address, store.port) as processes:
        assert processes.result(0) == processes.result(1) == 2.0


BIG = 4_000_000  # values: more than the kernel holds for a peer that is frozen


def frozen_inside_a_collective(comm, port, in_pieces):
    """Rank 2 freezes in all_reduce. The others give it up, and go on in another group until it has thawed."""
    process_group.WHOLE_BYTES, process_group.PIECE_S = (1 << 20 if in_pieces else 1 << 30), 2.0
    store, old = join_local_store(port), torch.full((BIG,), float(comm.rank + 1))
    if comm.rank == 2:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        with contextlib.suppress(PeerLost):  # of the pieces nobody sends it one any more
            comm.all_reduce_(old)
        store.set("thawed", "")
        return old.unique().tolist()
    time.sleep(0.5)  # it is inside, and asleep
    interrupt = threading.Event()
    comm._interrupted = interrupt.is_set
    threading.Timer(0.3, interrupt.set).start()
    with pytest.raises(PeerLost, match="interrupted"):
        comm.all_reduce_(old)
    comm.close()
    second = ProcessGroupComm(
        rank=comm.rank, world_size=2, store=PrefixStore("second", store), address=LOOPBACK, timeout=30
    )
    old_then, fresh = old.clone(), torch.rand(BIG, generator=torch.Generator().manual_seed(comm.rank))
    second.all_reduce_(fresh)
    result = fresh.clone()
    store.set(f"reduced {comm.rank}", "")
    store.wait(["thawed"])
    time.sleep(0.3)
    again = torch.rand(BIG, generator=torch.Generator().manual_seed(comm.rank))
    second.all_reduce_(again)
    rewritten = (not torch.equal(old, old_then), old.unique().tolist())
    return rewritten, torch.equal(fresh, result), torch.equal(again, result), digest(result)


@pytest.mark.slow
@pytest.mark.parametrize("in_pieces", [False, True])
def test_what_a_thawed_peer_does_late_changes_nothing(in_pieces):
    """It ends the collective that it was in, with the buffers that the others had then: if small, their own."""
    store = local_store()
    with Processes(3, frozen_inside_a_collective, store.port, in_pieces) as processes:
        store.wait(["reduced 0", "reduced 1"])
        os.kill(processes.processes[2].pid, signal.SIGCONT)
        assert processes.result(2) == ([3.0] if in_pieces else [6.0])
        results = [processes.result(rank) for rank in range(2)]
    expected = sum(torch.rand(BIG, generator=torch.Generator().manual_seed(rank)) for rank in range(2))
    for rank, (rewritten, kept, repeated, of_result) in enumerate(results):
        if in_pieces:
            assert rewritten == (False, [rank + 1.0])
        else:
            assert rewritten == (True, [6.0]), "the danger is real: the survivors' old buffers were written to"
        assert kept and repeated and of_result == digest(expected)


def train_then_freeze(comm):
    def events(event):
        if comm.rank == 1 and event["type"] == "step" and event["step"] == 5:
            os.kill(os.getpid(), signal.SIGSTOP)

    points = Points(8)
    source = Steps([[(points.x, points.y)]])
    strategy = DiLoCoStrategy(H=2, lr=0.01)
    try:
        train_node(Line(), comm, strategy, source, max_steps=50, device="cpu", events=events).run()
    except PeerLost:
        return strategy.rounds, strategy.agreed_weights().isfinite().all().item()


@pytest.mark.slow
def test_training_ends_with_peer_lost():
    with Processes(2, train_then_freeze, timeout=2) as processes:
        rounds, whole = processes.result(0)
        assert rounds == 2 and whole  # the third was never agreed


def test_a_peer_that_never_comes():
    store = local_store(timeout=1)
    with pytest.raises(PeerLost, match="could not join"):
        ProcessGroupComm(rank=1, world_size=2, store=join_local_store(store.port, 1), address=LOOPBACK, timeout=1)


def test_threads_notice_a_rank_that_gave_up():
    def rank_main(comm):
        if comm.rank == 1:
            comm.abort()
            return None
        with pytest.raises(PeerLost):
            comm.all_reduce_(torch.zeros(1))

    run_threads(2, rank_main)
    with pytest.raises(ExogymError, match="different collectives"):
        run_threads(2, lambda comm: comm.all_reduce_(torch.ones(1 + comm.rank)))


def test_single_and_counters():
    comm = SingleComm()
    values = torch.ones(3)
    comm.all_reduce_(values)
    comm.broadcast_(values)
    assert values.tolist() == [1, 1, 1] and comm.all_gather(values)[0].tolist() == [1, 1, 1]
    with pytest.raises(ExogymError):
        comm.send(values, 0)
    counted = run_threads(2, lambda c: (c.all_reduce_(torch.ones(10)), c.broadcast_(torch.ones(4)), c.bytes_sent)[-1])
    assert counted == [56, 40]
