"""A process that is killed while weights travel over gloo, and others that make steps meanwhile."""

import multiprocessing
import os
import threading
import time
from collections import Counter
from multiprocessing.connection import wait

import torch
from exogym_toys import train_node
from simulation import Clips, Tiny
from torch import nn
from torch.distributed import PrefixStore

from exogym import DiLoCoStrategy, ElasticSampler
from exogym.comm.elastic import ElasticComm
from exogym.comm.process_group import LOOPBACK, ProcessGroupComm, join_local_store, local_store
from exogym.membership.client import CoordinatorClient
from exogym.membership.coordinator import Coordinator

HOSTS = ("ada", "bob", "cy")
LARGE = 3_000_000  # values: they travel in pieces
CLIPS, EPOCHS = 60, 2


class Large(Tiny):
    def __init__(self):
        super().__init__()
        self.more = nn.Parameter(torch.zeros(LARGE))

    def forward(self, batch):
        time.sleep(0.02)
        loss, weight = super().forward(batch)
        return loss + self.more.square().mean(), weight


class DiesAsItSends(ElasticComm):
    """In its exchange number 2, of which some has been sent."""

    sent = 0

    def all_reduce_(self, flat):
        self.sent += flat.numel() > LARGE
        if self.sent == 2:
            threading.Timer(0.005, os._exit, [9]).start()
        super().all_reduce_(flat)


def rank_main(name, port, pipe, dies):
    torch.set_num_threads(1)
    client, lock = CoordinatorClient(), threading.Lock()

    def hear():
        while True:
            client.put(pipe.recv())

    def say(message):
        with lock:
            pipe.send(message)

    def connect(generation, rank, interrupted):
        store = PrefixStore(generation.prefix, join_local_store(port, 30))
        about = {"rank": rank, "world_size": len(generation.members), "timeout": 60.0, "interrupted": interrupted}
        return ProcessGroupComm(store=store, address=LOOPBACK, **about)

    threading.Thread(target=hear, daemon=True).start()
    comm = (DiesAsItSends if dies else ElasticComm)(name, HOSTS, client, say, connect)
    clips = Clips(CLIPS, batch_size=2, seed=0, hashed=False)
    strategy = DiLoCoStrategy(lr=0.01, H=4, overlap_steps=3, outer_momentum=0)
    say({"type": "ready"})
    node = train_node(Large(), comm, strategy, ElasticSampler(clips, HOSTS, name), epochs=EPOCHS)
    result = node.run()
    say({"type": "result", "digest": result.digest, "steps": result.steps})
    time.sleep(60)  # until its parent ends it


class Site:
    """The coordinator, told of a process that has ended."""

    def __init__(self, dies):
        context, self.store = multiprocessing.get_context("spawn"), local_store()
        self.events, self.results, self.lost = [], {}, set()
        self.pipes, self.processes = {}, {}
        for name in HOSTS:
            self.pipes[name], theirs = context.Pipe()
            arguments = (name, self.store.port, theirs, name == dies)
            self.processes[name] = context.Process(target=rank_main, args=arguments)
            self.processes[name].start()
            theirs.close()
        self.coordinator = Coordinator(HOSTS, self.send, self.events.append, clock=time.monotonic)

    def send(self, name, message):
        if self.processes[name].is_alive():
            self.pipes[name].send(message)

    def run(self, seconds=240):
        deadline = time.monotonic() + seconds
        while len(self.results) < len(HOSTS) - len(self.lost):
            assert time.monotonic() < deadline, self.events[-5:]
            for pipe in wait([self.pipes[name] for name in HOSTS if name not in self.lost], 0.05):
                self.take(next(name for name in HOSTS if self.pipes[name] is pipe))
            self.coordinator.tick()

    def take(self, name):
        try:
            message = self.pipes[name].recv()
        except EOFError:
            self.lost.add(name)
            self.coordinator.lost(name)
            return
        if message["type"] == "ready":
            self.coordinator.ready(name)
        elif message["type"] == "result":
            self.results[name] = message
        elif message["type"] in ("vote", "round_end", "trouble"):
            getattr(self.coordinator, message["type"])(name, message)

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.join()

    def trained(self):
        """How often each clip of each epoch counted."""
        commits = [event["samples"] for event in self.events if event["type"] == "commit"]
        each = (of_epochs for samples in commits for of_epochs in samples.values())
        return Counter((int(epoch), name) for ids in each for epoch, names in ids.items() for name in names)


def test_one_dies_while_weights_travel():
    site = Site("cy")
    try:
        site.run()
    finally:
        site.close()
    assert site.trained() == {(epoch, f"c{number}"): 1 for epoch in range(EPOCHS) for number in range(CLIPS)}
    assert len({result["digest"] for result in site.results.values()}) == 1
    assert site.lost == {"cy"} and set(site.results) == {"ada", "bob"}
