"""Collectives that run in a thread while their rank computes."""

import os
import signal
import threading
import time

import pytest
import torch
from exogym_toys import Processes, run_threads

from exogym.comm.comm import Background, Comm, SingleComm, in_background
from exogym.comm.elastic import ElasticComm
from exogym.errors import PeerLost
from exogym.membership.client import CoordinatorClient


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "background collectives"]


def test_jobs_run_in_order_in_one_thread():
    background, done = SingleComm().background(), []
    for number in range(100):
        background.put(lambda number=number: done.append((number, threading.get_ident(), in_background())))
    background.wait()
    background.wait()
    assert [number for number, *_ in done] == list(range(100))
    assert len({thread for _, thread, _ in done}) == 1 and done[0][1] != threading.get_ident()
    assert all(inside for *_, inside in done) and not in_background()
    background.close()
    background.close()
    assert not threads()


def test_after_an_error_nothing_more_runs_until_it_was_raised():
    background, done = SingleComm().background(), []

    def fail():
        raise PeerLost("gone")

    for job in (lambda: done.append(1), fail, lambda: done.append(2), fail):
        background.put(job)
    with pytest.raises(PeerLost, match="gone"):
        background.wait()
    background.put(lambda: done.append(3))
    background.wait()
    background.close()
    assert done == [1, 3]


def test_none_that_was_never_used_has_no_thread():
    background = SingleComm().background()
    background.wait()
    background.close()
    assert not threads()


def test_only_the_time_counts_in_which_the_rank_waited():
    def rank_main(comm):
        background, begun = comm.background(), threading.Event()

        def reduce():
            begun.set()
            time.sleep(0.3)
            comm.all_reduce_(torch.ones(10))

        background.put(reduce)
        begun.wait()
        time.sleep(0.2 if comm.rank else 0.5)  # computes
        background.wait()
        background.close()
        return comm.seconds, comm.bytes_sent

    (hidden, sent), (exposed, _) = run_threads(2, rank_main)
    assert hidden < 0.06 < exposed < 0.25 and sent == 40


class Gate(Comm):
    """A group whose collectives take until `opens`."""

    rank, world_size = 0, 2

    def __init__(self):
        super().__init__()
        self.opens, self.is_in = threading.Event(), threading.Event()

    def all_reduce_(self, flat):
        self.is_in.set()
        assert self.opens.wait(10)

    broadcast_ = all_gather = send = recv = all_reduce_


def test_a_rank_waits_for_others_only_while_it_computes_nothing():
    client, group = CoordinatorClient(), Gate()
    client.put({"type": "generation", "number": 1, "members": ["ada", "bob"], "prefix": "", "continues_round": False})

    def say(message):
        if message["type"] == "vote":
            client.put({"type": "commit", "generation": 1, "vote": message["vote"], "regroup": False})

    class Newcomer:
        def sync_state(self):
            return 0, False

        def has_synced(self):
            pass

    comm = ElasticComm("ada", ["ada", "bob"], client, say, lambda *_: group)
    comm.join(Newcomer())
    background = comm.background()
    background.put(lambda: comm.all_reduce_(torch.ones(1)))
    assert group.is_in.wait(10)
    time.sleep(0.05)
    assert comm.wait.read() == (1, 0.0)
    threading.Timer(0.2, lambda: (seen.append(comm.wait.read()), group.opens.set())).start()
    seen = []
    background.wait()
    assert seen[0][1] > 0.1 and comm.wait.read() == (1, 0.0) and 0.1 < comm.seconds < 1
    background.close()


def test_close_does_not_wait_for_a_rank_that_does_not_come():
    def rank_main(comm):
        if comm.rank:
            return 0.0
        background = comm.background()
        for _ in range(3):
            background.put(lambda: comm.all_reduce_(torch.ones(1)))
        time.sleep(0.1)
        started = time.monotonic()
        background.close()
        return time.monotonic() - started

    assert run_threads(2, rank_main)[0] < 1 and not threads()


def close_beside_a_frozen_peer(comm):
    comm.all_reduce_(torch.zeros(1))
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    background = comm.background()
    for _ in range(2):
        background.put(lambda: comm.all_reduce_(torch.ones(1_000_000)))
    time.sleep(0.5)
    started = time.monotonic()
    background.close()
    comm.close()
    left = threads()
    with pytest.raises(PeerLost):
        comm.all_reduce_(torch.ones(1))
    return time.monotonic() - started, len(left)


def test_close_gives_up_what_a_frozen_peer_holds_up():
    with Processes(2, close_beside_a_frozen_peer) as processes:
        seconds, left = processes.result(0)
    assert seconds < 1 and left == 0


def reduce_in_the_background(comm):
    background, flats = comm.background(), [torch.full((size,), comm.rank + 1.0) for size in (3, 700_000, 1)]
    for flat in flats:
        background.put(lambda flat=flat: comm.all_reduce_(flat))
    background.wait()
    background.close()
    after = torch.ones(2)
    comm.all_reduce_(after)
    return [flat.unique().tolist() for flat in (*flats, after)]


def test_real_processes():
    with Processes(3, reduce_in_the_background) as processes:
        assert [processes.result(rank) for rank in range(3)] == [[[6.0], [6.0], [6.0], [3.0]]] * 3


def test_the_one_who_waits_gets_the_error_of_a_job_of_any_kind():
    class Odd(BaseException):
        pass

    def fail():
        raise Odd

    background = Background(SingleComm().waiting, lambda: None)
    background.put(fail)
    with pytest.raises(Odd):
        background.wait()
    background.close()
