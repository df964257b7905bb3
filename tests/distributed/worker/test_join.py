"""How a rank joins the group of a generation."""

import os
import threading
from types import SimpleNamespace

import torch
from torch import nn

from distributed.plan.run_spec import Rendezvous
from distributed.worker import train
from distributed.worker.train import WorkerTrainer
from exogym.membership import Generation
from exogym.membership.client import CoordinatorClient


def test_joining_leaves_the_environment_alone(monkeypatch):
    """A thread that joins in vain is left behind, and must not send a later generation over its own interface."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    spec = SimpleNamespace(rendezvous=Rendezvous(address="127.0.0.1", key="ab" * 32), interface="")
    generation, sums, client = Generation(1, ("ada", "bob"), "first", False), {}, CoordinatorClient()
    monkeypatch.setattr(train, "send_event", lambda event: client.put({**event, "type": "told"}))
    work = SimpleNamespace(model=nn.Linear(1, 1), train=[], validation=None, gather=None, score=None)
    trainer = WorkerTrainer(spec, work, SimpleNamespace(meeting="", coordinator=client))
    client.put(generation.message())

    def rank_main(rank: int) -> None:
        comm, one = trainer._join(generation, rank, lambda: False), torch.ones(1)
        comm.all_reduce_(one)
        sums[rank] = one.item()
        comm.close()

    threads = [threading.Thread(target=rank_main, args=[rank], daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sums == {0: 2.0, 1: 2.0} and os.environ["GLOO_SOCKET_IFNAME"] == "nowhere0"
