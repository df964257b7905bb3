"""One rank of `strategies.py --wire`, in a lab host: python -m benchmarks.wire_rank SPEC, a WireSpec as JSON.

Votes travel as in `distributed-train`, as lines of JSON to whoever has the coordinator, but over plain TCP.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from benchmarks.digits import BATCH, load_digits, new_net
from benchmarks.strategy_settings import BY_KEY
from exogym.comm.comm import Comm
from exogym.comm.elastic import ElasticComm
from exogym.comm.process_group import ProcessGroupComm
from exogym.membership.client import CoordinatorClient
from exogym.membership.messages import Generation
from exogym.settings import FitSettings
from exogym.trainer import Trainer

WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class WireSpec:
    """meeting: the address that store and coordinator are at; address: this host's own, for gloo."""

    name: str
    hosts: tuple[str, ...]
    address: str
    meeting: str
    store_port: int
    control_port: int
    key: str
    net: str
    steps: int


class Control:
    """The connection to the coordinator; counts what this rank says. A line is a message."""

    def __init__(self, spec: WireSpec):
        self._socket = socket.create_connection((spec.meeting, spec.control_port), timeout=WAIT_S)
        self._socket.settimeout(None)
        self.client, self.said, self._lock = CoordinatorClient(), 0, threading.Lock()
        threading.Thread(target=self._hear, daemon=True).start()

    def say(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            self.said += len(line)
            self._socket.sendall(line)

    def _hear(self) -> None:
        for line in self._socket.makefile("rb"):
            self.client.put(json.loads(line))


class WireTrainer(Trainer):
    def __init__(self, spec: WireSpec, control: Control):
        super().__init__(new_net(spec.net, seed=0), load_digits()["train"])
        self.spec, self.control = spec, control

    def _build_connection(self, rank: int) -> Comm:
        return ElasticComm(self.spec.name, self.spec.hosts, self.control.client, self.control.say, self._join)

    def _join(self, generation: Generation, rank: int, interrupted: Callable[[], bool]) -> Comm:
        wait = timedelta(seconds=WAIT_S)
        store = TCPStore(self.spec.meeting, self.spec.store_port, is_master=False, timeout=wait)
        return ProcessGroupComm(
            rank=rank,
            world_size=len(generation.members),
            store=PrefixStore(generation.prefix, store),
            address=self.spec.address,
            timeout=WAIT_S,
            interrupted=interrupted,
        )


def main() -> None:
    spec = WireSpec(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    control, entry = Control(spec), BY_KEY[spec.key]
    trainer = WireTrainer(spec, control)
    control.say({"type": "ready", "name": spec.name})
    settings = FitSettings(
        strategy=entry.build(entry.lr),
        num_nodes=len(spec.hosts),
        num_epochs=spec.steps,
        max_steps=spec.steps,
        batch_size=BATCH,
        minibatch_size=BATCH,
        device="cpu",
    )
    result = trainer.run_rank(spec.hosts.index(spec.name), settings)
    control.say({"type": "result", "sent": result.bytes_sent, "said": control.said, "steps": result.steps})
    sys.stdin.read()  # until the interfaces have been read


if __name__ == "__main__":
    main()
