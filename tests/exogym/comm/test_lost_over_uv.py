"""Peers that die where gloo says nothing of it, as on a Mac: the coordinator's word must do."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait

import pytest
import torch
from torch.distributed import PrefixStore
from uv_group import UvGroup, install
from waiting import wait_until

from exogym.comm import process_group
from exogym.comm.elastic import ElasticComm
from exogym.comm.process_group import LOOPBACK, ProcessGroupComm, join_local_store, local_store
from exogym.errors import PeerLost
from exogym.membership import ROUND
from exogym.membership.client import CoordinatorClient
from exogym.membership.coordinator import Coordinator

HOSTS = ("ada", "bob", "cy")
HOUR = 3600.0
LARGE = 3_000_000  # values: more than is sent as a whole


class Member:
    def sync_state(self):
        return 0, False

    def has_synced(self):
        pass


class Rank:
    """A process of a host, as the launcher starts one: it makes rounds until its parent has seen enough."""

    def __init__(self, name, port, pipe, dies):
        install()
        self.name, self.port, self.pipe, self.dies = name, port, pipe, dies
        self.client, self.lock = CoordinatorClient(), threading.Lock()
        threading.Thread(target=self.hear, daemon=True).start()

    def hear(self):
        while True:
            self.client.put(self.pipe.recv())

    def say(self, message):
        with self.lock:
            self.pipe.send(message)

    def connect(self, generation, rank, interrupted):
        about = {"rank": rank, "world_size": len(generation.members), "timeout": HOUR, "interrupted": interrupted}
        store = PrefixStore(generation.prefix, join_local_store(self.port, 30))
        if self.dies == "joining" and len(generation.members) == 3:
            if self.name == "cy":  # the others find its address in the store, and nobody there
                threading.Timer(0.5, os._exit, [9]).start()
            else:
                time.sleep(1.5)
        return ProcessGroupComm(store=store, address=LOOPBACK, **about)

    def exchange(self, number):
        if self.name == "cy" and self.dies == "exchanging" and number == 3:
            os._exit(9)
        payload = torch.ones(LARGE)
        self.comm.all_reduce_(payload)
        return payload[0].item()

    def run(self):
        torch.set_num_threads(1)
        self.comm = ElasticComm(self.name, HOSTS, self.client, self.say, self.connect)
        self.say({"type": "ready"})
        self.comm.join(Member())
        for number in range(1, 9999):
            about = {"round": number, "samples": {}, "position": [], "cut_short": False}
            total = self.comm.commit_together(ROUND, functools.partial(self.exchange, number), lambda _: about)  # noqa: B023
            self.say({"type": "total", "total": total})
            time.sleep(0.1)


def rank_main(*args):
    Rank(*args).run()


class Site:
    """The coordinator, told of a process that has died as a launcher is that hears no heartbeats."""

    def __init__(self, dies):
        context, self.store = multiprocessing.get_context("spawn"), local_store()
        self.pipes, self.processes, self.commits, self.totals = {}, {}, [], []
        for name in HOSTS:
            self.pipes[name], theirs = context.Pipe()
            arguments = (name, self.store.port, theirs, dies)
            self.processes[name] = context.Process(target=rank_main, args=arguments)
            self.processes[name].start()
        self.coordinator = Coordinator(HOSTS, self.send, self.emit, clock=time.monotonic)
        self.lost_at = None

    def send(self, name, message):
        if self.processes[name].is_alive():
            self.pipes[name].send(message)

    def emit(self, event):
        if event["type"] == "commit":
            self.commits.append((time.monotonic(), event["generation"]))

    def run(self, enough, seconds=60):
        deadline = time.monotonic() + seconds
        while not enough():
            assert time.monotonic() < deadline, (self.commits, self.totals)
            for pipe in wait(list(self.pipes.values()), 0.05):
                self.take(next(name for name in HOSTS if self.pipes[name] is pipe))
            for name in HOSTS:
                if self.lost_at is None and self.processes[name].exitcode is not None:
                    self.lost_at = time.monotonic()
                    self.coordinator.lost(name)
            self.coordinator.tick()

    def take(self, name):
        if self.lost_at and name == "cy":
            return
        try:
            message = self.pipes[name].recv()
        except EOFError:
            return
        if message["type"] == "ready":
            self.coordinator.ready(name)
        elif message["type"] == "total":
            self.totals.append(message["total"])
        elif message["type"] in ("vote", "round_end", "trouble"):
            getattr(self.coordinator, message["type"])(name, message)

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.join()


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["joining", pytest.param("exchanging", marks=pytest.mark.slow)])
def test_survivors_go_on_as_soon_as_the_coordinator_says_so(dies):
    site = Site(dies)
    try:
        site.run(lambda: site.lost_at and any(when > site.lost_at for when, _ in site.commits))
        gone_on = next(when for when, _ in site.commits if site.lost_at and when > site.lost_at) - site.lost_at
        site.run(lambda: len(site.commits) >= 6)
    finally:
        site.close()
    print(f"{gone_on:.2f} s from the word that a peer is lost to the next round that counts")
    assert gone_on < 3 and site.totals[-1] == 2.0
    assert set(site.totals) == ({2.0, 3.0} if dies == "exchanging" else {2.0})


@pytest.fixture
def over_uv(monkeypatch):
    real = process_group._gloo
    monkeypatch.setattr(process_group, "_gloo", lambda *about: UvGroup(real(*about), about[3]))
    monkeypatch.setattr(process_group, "_abandoned", [])


def lost_round(port, number, at_piece, exchange=ProcessGroupComm.all_reduce_):
    """Rank 0 begins to exchange a payload, and gives up: rank 1 does not come, or is lost before this piece."""
    given_up, groups = threading.Event(), {}

    def join(rank):
        groups[rank] = ProcessGroupComm(
            rank=rank,
            world_size=2,
            store=PrefixStore(str(number), join_local_store(port)),
            address=LOOPBACK,
            timeout=HOUR,
            interrupted=given_up.is_set,
        )

    threads = [threading.Thread(target=join, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def give_up():
        try:
            if at_piece:
                groups[1].all_reduce_(torch.ones(1))
                # In this order: the work of the meeting is forgotten before there are buffers of a piece.
                wait_until(lambda: any(w and held[0].numel() > 1 for w, held in groups[0]._held.values()), 3)
            time.sleep(0.1)
        finally:
            given_up.set()

    with ThreadPoolExecutor(1) as pool:
        giving_up = pool.submit(give_up)
        with pytest.raises(PeerLost):
            exchange(groups[0], torch.ones(LARGE))
        giving_up.result()
    groups[0].close()
    groups[1].close()  # which ends what waits in gloo itself, so that this process can end


def held() -> int:
    """Bytes of the storages behind the buffers of collectives that were given up."""
    return sum(buffer.untyped_storage().nbytes() for *_, buffers in process_group._abandoned for buffer in buffers)


@pytest.mark.slow
@pytest.mark.parametrize("at_piece", [False, True])
def test_ten_lost_rounds_hold_little_of_their_payloads_and_not_for_an_hour(over_uv, monkeypatch, at_piece):
    monkeypatch.setattr(process_group, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(process_group, "PIECE_S", 4.0)
    store = local_store()
    for number in range(10):
        lost_round(store.port, number, at_piece)
    print(f"{held()} bytes are held after 10 lost rounds of {4 * LARGE}")
    assert held() <= 10 * (process_group.PIECE_BYTES if at_piece else 4)
    if at_piece:  # a peer that came back to a group whose operation has timed out would abort this process
        wait_until(lambda: not process_group._abandoned, 10)


@pytest.mark.parametrize("exchange", [ProcessGroupComm.all_to_all, ProcessGroupComm.all_gather])
def test_what_a_swap_held_that_was_given_up_is_let_go_over_tcp(monkeypatch, exchange):
    monkeypatch.setattr(process_group, "_abandoned", [])
    monkeypatch.setattr(process_group, "PIECE_S", 4.0)
    store = local_store()
    for number in range(3):
        lost_round(store.port, number, True, exchange)
        wait_until(lambda: all(work.is_completed() for _, work, _ in process_group._abandoned), 10)
        assert len(process_group._abandoned) <= 1
