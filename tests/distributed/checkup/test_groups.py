"""gloo tried for real between agents of this machine, and by a stand-in for libuv's way to fail."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from distributed.checkup.findings import Finding, Severity
from distributed.checkup.links import Links, form_groups
from distributed.checkup.look import Look, Session
from distributed.hosts.agent_call import group_probe
from distributed.hosts.paths import PROJECT
from distributed.ssh.host import Host
from distributed.ssh.machine import LocalMachine

ERROR, WARNING = Severity.ERROR, Severity.WARNING
NAMES = ["ada", "ben", "cleo"]


@pytest.fixture
def links():
    """Connected hosts whose torch is imported; all of them are this machine."""
    looks = [Look(number, Host(address=name)) for number, name in enumerate(NAMES)]
    for look in looks:
        look.session = Session(LocalMachine(look.name), sys.executable, 60)
    for look in looks:
        look.gather(time.monotonic() + 60, names=["torch"], project=str(PROJECT), folders=[], torch_s=50)
    for look in looks:
        look.await_torch(time.monotonic() + 60)
        assert "version" in look.facts.torch, look.facts.torch
    links = Links(looks, "127.0.0.1", time.monotonic() + 60, "token")
    links.connect_s = 20.0  # this machine may be busy
    links.connect()
    assert all(pair.failed is None for pair in links.pairs.values()), links.pairs
    yield links
    for look in looks:
        look.close()


def problems(links: Links, seconds: float = 20.0) -> list[Finding]:
    begin = time.monotonic()
    found = form_groups(links, begin + seconds)
    assert time.monotonic() - begin < seconds + 2
    return found


def torch_process(look: Look) -> psutil.Process:
    [agent] = [child for child in psutil.Process().children() if child.pid == look.session._process.pid]
    [child] = agent.children()
    return child


def test_healthy_hosts_form_a_group_for_each_pair(links):
    asked = []
    for look in links.looks.values():
        send = look.session.send
        look.session.send = lambda op, send=send, **request: asked.append((op, request)) or send(op, **request)
    assert problems(links) == []
    pairs = [{about["me"], peer} for op, about in asked if op == "begin_groups" for peer in about["peers"]]
    assert sorted(map(sorted, pairs)) == [[0, 1], [0, 1], [0, 2], [0, 2], [1, 2], [1, 2]]


@pytest.mark.slow
def test_gloo_that_fails_where_tcp_connects_names_the_pairs(links):
    links.places[1]["address"] = "192.0.2.77"  # none of this machine's
    (problem,) = problems(links, 4.0)
    assert problem.severity == ERROR and problem.hosts == ("ada", "ben", "cleo")
    assert problem.what.startswith("ada <-> ben, ben <-> cleo: TCP connects, but gloo does not (127.0.0.1 (lo), ")
    assert "192.0.2.77" in problem.what and not problem.what.endswith("no answer")
    assert "multimac hosts setup" in problem.remedy


@pytest.mark.slow
def test_a_peer_that_freezes_in_gloo_is_waited_for_no_longer_than_there_is_time(links):
    os.kill(torch_process(links.looks[2]).pid, signal.SIGSTOP)
    (problem,) = problems(links, 3.0)
    assert problem.severity == WARNING and problem.hosts == ("cleo",)
    assert problem.what == "whether gloo connects was not tried: no answer in time (begin_groups)"


# A group of gloo's over libuv: a refused connection raises nothing, and a killed peer is noticed at the time-out only.
LIKE_UV = """
import sys, time, types
class Store:
    pass
class Work:
    def __init__(self, timeout): self.timeout = timeout
    def wait(self, timeout):
        time.sleep(self.timeout.total_seconds())
        raise RuntimeError("[/gloo/transport/uv/pair.cc:9] Timed out waiting for the operation")
class Options: pass
class Group:
    _Options = Options
    create_device = staticmethod(lambda hostname: hostname)
    def __init__(self, store, rank, size, options):
        store.set("0/0", b"where it listens")
        self.timeout = options._timeout
        if HANGS: time.sleep(3600)
    def allreduce(self, tensors): return Work(self.timeout)
torch, dist = types.ModuleType("torch"), types.ModuleType("torch.distributed")
dist.Store = Store
dist.ProcessGroupGloo = Group
torch.distributed, torch.full = dist, lambda shape, value: [value]
sys.modules.update({"torch": torch, "torch.distributed": dist})
"""


@pytest.mark.parametrize("hangs", [True, False])
def test_over_libuv_a_connection_that_never_ends_does_not_hold_up_the_answer(hangs):
    offer = {"op": "begin_groups", "me": 0, "address": "10.0.0.1", "peers": [1, 2], "seconds": 0.5}
    form = {"op": "form_groups", "told": [[1, "0/1", ""], [2, "0/1", ""]], "seconds": 0.5}
    command = [sys.executable, "-c", f"HANGS = {hangs}\n{LIKE_UV}\n{group_probe()}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        begin = time.monotonic()
        for request in (offer, form):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            assert request is form or [peer for peer, *_ in answer["told"]] == [1, 2]
        assert time.monotonic() - begin < 2
        process.kill()
    assert [peer for peer, _ in answer["groups"]] == [1, 2]
    assert all("no answer" in failed or "Timed out" in failed for _, failed in answer["groups"])
