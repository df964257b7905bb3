"""The bytes that a communicator counts: against sums by hand, and against what real processes send."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exogym_toys import run_threads

from exogym import SingleComm
from exogym.comm.comm import ThreadComm, all_gather_bytes, all_reduce_bytes, broadcast_bytes
from exogym.comm.elastic import ElasticComm
from exogym.errors import PeerLost
from exogym.membership import ROUND
from exogym.membership.client import CoordinatorClient

PROJECT = Path(__file__).parents[3]
SIZE = 120  # bytes


@pytest.mark.parametrize(
    ("ranks", "all_reduce", "all_gather", "broadcast"),
    [
        (1, 0, 0, [0]),
        (2, 120, 120, [1, 0]),
        (3, 160, 240, [2, 0, 0]),  # 0 to 1, then 0 to 2
        (4, 180, 360, [2, 1, 0, 0]),  # 0 to 1, then 0 to 2 and 1 to 3
        (5, 192, 480, [3, 1, 0, 0, 0]),  # and then 0 to 4
    ],
)
def test_formulas_by_hand(ranks, all_reduce, all_gather, broadcast):
    assert all_reduce_bytes(SIZE, ranks) == all_reduce
    assert all_gather_bytes(SIZE, ranks) == all_gather
    for src in range(ranks):
        sends = [broadcast_bytes(SIZE, ranks, (src + place) % ranks, src) for place in range(ranks)]
        assert sends == [SIZE * times for times in broadcast]
        assert sum(sends) == SIZE * (ranks - 1)


def each_collective(comm):
    comm.all_reduce_(torch.ones(30))
    comm.all_gather(torch.ones(3))
    comm.broadcast_(torch.ones(30), src=2)
    if comm.rank == 0:
        comm.send(torch.ones(10), 1)
    elif comm.rank == 1:
        comm.recv(torch.ones(10), 0)
    return comm.bytes_sent


def test_threads_and_one_rank_count_by_the_same_formulas():
    assert run_threads(3, each_collective) == [160 + 24 + 40, 160 + 24, 160 + 24 + 240]
    alone = SingleComm()
    alone.all_reduce_(torch.ones(30))
    alone.all_gather(torch.ones(30))
    alone.broadcast_(torch.ones(30))
    assert alone.bytes_sent == 0


class Newcomer:
    def sync_state(self):
        return 0, False

    def has_synced(self):
        pass


def test_an_elastic_communicator_counts_what_each_of_its_groups_sends():
    client, group = CoordinatorClient(), ThreadComm.group(3)
    groups = {1: group[0], 2: SingleComm(), 3: ThreadComm.group(2)[0]}
    votes = []

    def say(message):
        if message["type"] == "vote":
            votes.append(message["generation"])
            about = {"generation": message["generation"], "vote": message["vote"]}
            client.put({"type": "commit", **about, "regroup": message["what"] == ROUND})

    def begin(number):
        members = ["ada", "bob", "cy"][: groups[number].world_size]
        about = {"number": number, "members": members, "prefix": "", "continues_round": number == 2}
        client.put({"type": "generation", **about})

    def reduce():
        comm.all_reduce_(torch.ones(30))

    comm = ElasticComm("ada", ["ada", "bob", "cy"], client, say, lambda generation, *_: groups[generation.number])
    begin(1)
    comm.join(Newcomer())
    comm.send(torch.ones(10), 1)
    assert comm.bytes_sent == 40
    group[1].abort()

    def attempt():
        try:
            reduce()
        except PeerLost:
            begin(2)
            raise

    comm.commit_together(ROUND, attempt)  # in vain among three, then alone
    assert comm.bytes_sent == 40 + 160 and votes == [1, 2, 2]
    begin(3)
    comm.regroup()
    comm.send(torch.ones(10), 1)
    assert comm.bytes_sent == 40 + 160 + 40


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"),
    reason="needs a network namespace",
)
def test_the_count_is_what_real_processes_send():
    """Headers make the rest: a few bytes for each message of gloo's, some 70 for each packet. A busy machine's TCP
    sends some packets again, which are of 64 KiB on the loopback.
    """
    script = [sys.executable, str(Path(__file__).with_name("measure_traffic.py"))]
    paths = {"PYTHONPATH": os.pathsep.join(str(PROJECT / path) for path in ("gym", ".", "tests/exogym"))}
    done = subprocess.run(["unshare", "-n", *script], capture_output=True, text=True, env=os.environ | paths)
    assert done.returncode == 0, done.stderr
    for name, ranks in json.loads(done.stdout).items():
        in_all = sum(counted for counted, *_ in ranks)
        for counted, written, loopback, resent in ranks:
            assert counted <= written <= 1.001 * counted + 2000, (name, ranks)
            assert 0.9 * in_all <= loopback <= 1.1 * in_all + resent * 2**16, (name, ranks)
