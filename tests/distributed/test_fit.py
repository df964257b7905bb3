"""NetworkTrainer on this machine and on a host, which is this machine reached through a real sshd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from own_model import FITTED, SCRIPT

from distributed.fit import NetworkTrainer
from distributed.ssh.host import Host, Hosts
from exogym.errors import SettingError
from exogym.strategy import DiLoCoStrategy

PROJECT = Path(__file__).parents[2]


def test_the_hosts_file_says_how_many_nodes_there_are():
    trainer = NetworkTrainer(Hosts(master=Host(address="localhost"), workers=()), None, None)
    with pytest.raises(SettingError, match="num_nodes is the number of hosts"):
        trainer.fit(DiLoCoStrategy(), num_nodes=2)


@pytest.mark.slow
def test_a_model_of_the_users_own_is_fitted(tmp_path, ssh_server):
    (tmp_path / "hosts.json").write_text(json.dumps({"master": "localhost", "workers": [ssh_server.worker]}))
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": f"{PROJECT}/gym:{PROJECT}"}
    command = [sys.executable, "script.py", "hosts.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == FITTED
    [bundle] = tmp_path.glob("runs/*/bundle.pickle")
    assert bundle.stat().st_mode & 0o777 == 0o600


BESIDE = """
from exogym.strategy import Strategy
from exogym.strategy.communicate_optimize import CommunicationModule

class Own(Strategy):
    pass

class Quiet(CommunicationModule):
    def exchange(self, *about):
        return None

def factory(rank, num_nodes, train_dataset):
    return [rank, num_nodes, train_dataset]
"""
PICKLE = """
import sys, torch, cloudpickle, beside
from distributed.fit import NetworkTrainer
from distributed.ssh.host import Host, Hosts
from exogym.settings import fit_settings
from exogym.strategy import CommunicateOptimizeStrategy

hosts = Hosts(master=Host(address="localhost"), workers=())
trainer = NetworkTrainer(hosts, torch.nn.Linear(1, 1), beside.factory)
composed = CommunicateOptimizeStrategy(communication_modules=[beside.Quiet()])
for strategy in (beside.Own(), composed):
    sys.stdout.buffer.write(trainer._pickled(fit_settings({"strategy": strategy})))
assert not cloudpickle.list_registry_pickle_by_value()
"""
OPEN = """
import pickle, sys
for number in range(2):
    _, factory, _, settings = pickle.load(sys.stdin.buffer)
    print(type(settings.strategy).__name__, factory(0, 1, True))
"""


def test_what_a_module_beside_the_script_defines_travels_too(tmp_path):
    (tmp_path / "beside.py").write_text(BESIDE)
    environment = os.environ | {"PYTHONPATH": f"{PROJECT}/gym:{PROJECT}"}
    here = {"capture_output": True, "check": True, "timeout": 100}
    sent = subprocess.run(
        [sys.executable, "-c", PICKLE], env=environment | {"PYTHONPATH": f"{tmp_path}:{PROJECT}/gym:{PROJECT}"}, **here
    )
    opened = subprocess.run([sys.executable, "-c", OPEN], input=sent.stdout, env=environment, **here)
    assert opened.stdout.decode().splitlines() == ["Own [0, 1, True]", "CommunicateOptimizeStrategy [0, 1, True]"]
