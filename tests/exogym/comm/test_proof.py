"""Whoever lacks the run's key is left out before anything of the run is sent: real processes, and a real stranger."""

import json
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has one loopback address, and gloo over libuv")
STRANGER = Path(__file__).parents[2] / "lab" / "stranger.py"
RANK = """
import json, sys
import torch
from exogym.comm.process_group import ProcessGroupComm
from exogym.comm.relayed_store import RelayedStore
from exogym.errors import PeerLost
rank, size, key = json.loads(sys.argv[1])
told = {}

def tell(name, value):
    print(json.dumps([name, value]), flush=True)

def hear(name):
    while name not in told:
        told.update([json.loads(sys.stdin.readline())])
    return told[name]

weights, about = torch.full((4096,), 1.0 + rank), {"address": f"127.0.0.{rank + 1}", "timeout": 20}
try:
    comm = ProcessGroupComm(rank=rank, world_size=size, store=RelayedStore(tell, hear), key=bytes.fromhex(key), **about)
    comm.all_reduce_(weights)
    outcome = f"sum {weights[0].item():g}"
except PeerLost as error:
    outcome = f"{type(error).__name__}: {error}"
print(json.dumps(["outcome", outcome]), flush=True)
"""


class Ranks:
    """Ranks whose values this process relays; each as it was started with a key."""

    def __init__(self, *keys: str):
        about = [json.dumps([rank, len(keys), key]) for rank, key in enumerate(keys)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.processes = [subprocess.Popen([sys.executable, "-c", RANK, each], **pipes) for each in about]
        self.values, self.outcomes = queue.SimpleQueue(), {}
        for rank in range(len(keys)):
            threading.Thread(target=self.listen, args=[rank], daemon=True).start()

    def listen(self, rank: int) -> None:
        for line in self.processes[rank].stdout:
            name, value = json.loads(line)
            if name == "outcome":
                self.outcomes[rank] = value
            else:
                self.values.put((rank, line))

    def relay(self) -> None:
        """Once all have told where they listen."""
        for rank, line in [self.values.get(timeout=60) for _ in self.processes]:
            for other, process in enumerate(self.processes):
                if other != rank:
                    process.stdin.write(line)
                    process.stdin.flush()

    def ports(self, rank: int) -> list[str]:
        found = psutil.Process(self.processes[rank].pid).net_connections()
        return [f"{one.laddr.ip}:{one.laddr.port}" for one in found if one.status == psutil.CONN_LISTEN]

    def end(self) -> list[str | int]:
        """What came of each, or its exit status."""
        for process in self.processes:
            process.wait(60)
        wait_until(lambda: all(rank in self.outcomes or p.returncode for rank, p in enumerate(self.processes)))
        return [self.outcomes.get(rank, process.returncode) for rank, process in enumerate(self.processes)]


@pytest.fixture
def ranks():
    started = []
    yield lambda *keys: started.append(Ranks(*keys)) or started[-1]
    for process in (process for each in started for process in each.processes):
        process.kill()


@pytest.fixture
def stranger():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(STRANGER), "gloo"], **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def in_the_place_of_rank_1(stranger: subprocess.Popen, ranks: Ranks, what: str) -> list[str | int]:
    """It is there before rank 1, by a number that it only guesses."""
    wait_until(lambda: ranks.values.qsize() == 2, 60)
    [port] = ranks.ports(0)
    stranger.stdin.write(f"{what} {port}\n")
    stranger.stdin.flush()
    wait_until(lambda: len(psutil.Process(stranger.pid).net_connections()) == 4)
    ranks.relay()
    return ranks.end()


def test_ranks_with_one_key_train_together(ranks):
    group = ranks("ab" * 32, "ab" * 32, "ab" * 32)
    group.relay()
    assert group.end() == ["sum 6"] * 3


def test_a_rank_with_another_key_is_left_out_by_each_of_the_others(ranks):
    group = ranks("ab" * 32, "ab" * 32, "cd" * 32)
    group.relay()
    ada, bob, other = group.end()
    assert ada == "Stranger: who answers rank 0 of 3 as rank 2 does not have the run's key"
    assert bob == "Stranger: who answers rank 1 of 3 as rank 2 does not have the run's key"
    assert other.startswith("Stranger")


@pytest.mark.slow
def test_a_stranger_who_takes_a_peers_connection_reads_nothing_of_the_run(ranks, stranger):
    ada, bob = in_the_place_of_rank_1(stranger, ranks("ab" * 32, "ab" * 32), "join")
    assert ada == "Stranger: who answers rank 0 of 2 as rank 1 does not have the run's key"
    assert bob.startswith("PeerLost")
    stranger.stdin.close()
    assert {json.loads(line)["read"] for line in stranger.stdout} == {32}  # a nonce, and a proof for nobody else


@pytest.mark.slow
def test_a_message_of_a_nonsense_length_still_aborts_who_waits_for_a_peer(ranks, stranger):
    """gloo does that: what it costs is a worker's restart, see Event.ABORTED."""
    ada, bob = in_the_place_of_rank_1(stranger, ranks("ab" * 32, "ab" * 32), "abort")
    assert ada == -signal.SIGABRT and bob.startswith("PeerLost")
