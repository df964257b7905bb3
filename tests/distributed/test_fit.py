"""NetworkTrainer on this machine and on a host, which is this machine reached through a real sshd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.fit import NetworkTrainer
from distributed.ssh.host import Host, Hosts
from exogym.errors import SettingError

PROJECT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from distributed.fit import NetworkTrainer
from exogym.strategy import DiLoCoStrategy

class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, batch):
        x, y = batch
        return ((self.layer(x) - y) ** 2).mean()

torch.manual_seed(0)
x = torch.randn(256, 4)
trainer = NetworkTrainer(sys.argv[1], Line(), TensorDataset(x, x.sum(1, keepdim=True)))
strategy = DiLoCoStrategy(inner_optim="sgd", lr=0.1, H=5)
fit = trainer.fit(strategy=strategy, max_steps=40, batch_size=16, device="cpu")
print(fit.result.rounds, [round(w, 2) for w in fit.model.layer.weight[0].tolist()])
"""


def test_the_hosts_file_says_how_many_nodes_there_are():
    trainer = NetworkTrainer(Hosts(master=Host(address="localhost"), workers=()), None, None)
    with pytest.raises(SettingError, match="num_nodes is the number of hosts"):
        trainer.fit(num_nodes=2)


@pytest.mark.slow
def test_a_model_of_the_users_own_is_fitted(tmp_path, ssh_server):
    worker = {
        "host": "127.0.0.1",
        "ssh_port": ssh_server.port,
        "ssh_key_path": str(ssh_server.key),
        "project_path": str(ssh_server.folder / "project"),
        "python_env": sys.executable,
    }
    (tmp_path / "hosts.json").write_text(json.dumps({"master": "localhost", "workers": [worker]}))
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": f"{PROJECT}/gym:{PROJECT}"}
    command = [sys.executable, "script.py", "hosts.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "8 [1.0, 1.0, 1.0, 1.0]"
    [bundle] = tmp_path.glob("runs/*/bundle.pickle")
    assert bundle.stat().st_mode & 0o777 == 0o600
