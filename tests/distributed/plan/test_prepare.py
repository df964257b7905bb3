from pathlib import Path

import pytest

from distributed.plan.job import resolve
from distributed.plan.prepare import prepare_run, rehost
from distributed.ssh.host import Host, Hosts
from multimac.commands.resume import _on_the_same
from whisper_tuner.config import ConfigFile

PROJECT = Path(__file__).parents[3]
CONFIG = f"""
[profile:tiny]
base_model = {PROJECT}/bundled/model
train = {PROJECT}/bundled/data/train.csv
"""
MASTER, TWIN, OTHER = (Host(address=name) for name in ("127.0.0.1", "twin", "other"))
PAIR = Hosts(master=MASTER, workers=(TWIN,))


@pytest.fixture
def job(tmp_path):
    (tmp_path / "config.ini").write_text(CONFIG)
    return resolve(ConfigFile(tmp_path / "config.ini"), "tiny")


def told(launch) -> list[int]:
    return [rank.spec.machine_workers for rank in launch.ranks]


def test_local_ranks_are_told_how_many_they_are(job, tmp_path):
    assert told(prepare_run(job, tmp_path, local_ranks=3).launch) == [3, 3, 3]
    assert told(prepare_run(job, tmp_path).launch) == [1]


def test_hosts_are_told_how_many_share_their_machine_also_when_they_change(job, tmp_path):
    launch = prepare_run(job, tmp_path, hosts=PAIR, machine_workers=(2, 2)).launch
    assert told(launch) == [2, 2]
    assert told(_on_the_same(launch, PAIR, (1, 1))) == [1, 1]
    three = Hosts(master=MASTER, workers=(TWIN, OTHER))
    assert told(rehost(launch, three, tmp_path, (2, 2, 1))[0]) == [2, 2, 1]
