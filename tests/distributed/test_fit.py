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

PROJECT = Path(__file__).parents[2]


def test_the_hosts_file_says_how_many_nodes_there_are():
    trainer = NetworkTrainer(Hosts(master=Host(address="localhost"), workers=()), None, None)
    with pytest.raises(SettingError, match="num_nodes is the number of hosts"):
        trainer.fit(num_nodes=2)


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
