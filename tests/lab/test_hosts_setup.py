import json
import os
import sys
from pathlib import Path

import pytest

from distributed.hosts import environment, wheelhouse
from distributed.hosts.agent.facts import facts
from lab import Lab

PROJECT = Path(__file__).parents[2]
ABLE = sys.platform == "linux" and os.geteuid() == 0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.lab,
    pytest.mark.skipif(not ABLE, reason="the lab needs Linux and root"),
]
SETUP = """
import sys
from distributed.hosts.environment import setup
from distributed.plan.hosts_file import load_hosts
from distributed.ssh.connection import Remote

remotes = [Remote.connect(host) for host in load_hosts(sys.argv[1]).workers]
for done in setup(remotes, lambda host, text: print(f"{host}: {text}", file=sys.stderr)):
    print(done.host, done.source, round(done.seconds, 1))
"""


def test_bare_hosts_without_a_registry_get_the_whole_environment(tmp_path):
    """The real dependencies, from a wheelhouse, over 100 Mbit/s."""
    target = wheelhouse.target_of(facts([], str(PROJECT)))
    wheelhouse.fill("lab", target, *environment.write_lists(environment.own_pins()))
    hosts = tmp_path / "hosts.json"
    with Lab(hosts=3, cpus=0.5, rate="100mbit") as lab:
        h1, h2, h3 = (lab[name].address for name in ("h1", "h2", "h3"))
        hosts.write_text(json.dumps({"master": h1, "workers": [h2, h3]}))

        def setup() -> dict[str, list[str]]:
            command = [sys.executable, "-c", SETUP, str(hosts)]
            done = lab.exec("h1", command, env={"PYTHONPATH": str(PROJECT)}, cwd=str(PROJECT), timeout=900)
            assert done.returncode == 0, done.stderr
            return {host: rest for host, *rest in map(str.split, done.stdout.splitlines())}

        assert [source for source, _ in setup().values()] == ["wheelhouse", "wheelhouse"]
        again = setup()
        assert all(source == "unchanged" and float(seconds) < 3 for source, seconds in again.values())
        code = "import torch, transformers, peft, soundfile; print(torch.ones(2).sum())"
        loads = f"~/multimac-whisper/.venv/bin/python -c '{code}'"
        assert lab.exec("h1", ["ssh", h3, loads], timeout=300).stdout == "tensor(2.)\n"
