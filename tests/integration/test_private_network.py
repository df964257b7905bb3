"""Training over WireGuard, the way over networks that one shares with strangers: docs/security.md."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from lab.network import in_namespace
from lab.wireguard import address, interface, private_network

pytestmark = [pytest.mark.lab, pytest.mark.slow]
TEXT = "[distributed:d]\nbase_profile = tiny\nepochs = 1\n"


@pytest.fixture
def tunnel(lab):
    if not shutil.which("wireguard-go"):
        pytest.skip("not installed: wireguard-go")
    with private_network(lab):
        yield


def test_a_run_over_wireguard_sends_nothing_beside_it(runner, tunnel, lab):
    hosts = [{"host": address(lab, name), "interface": interface(name)} for name in ("h1", "h2", "h3")]
    workers = [host | {"project_path": f"~/project-wg{number}"} for number, host in enumerate(hosts[1:])]
    environment = str(Path(sys.executable).parent.parent)
    settings = {"master": hosts[0], "workers": workers, "python_env": environment}
    runner.hosts = lambda *names: written(runner.folder / "hosts.json", settings)
    process = runner.start("d", "h2", "h3", text=TEXT)
    # Where ranks and the store listen, and whom they are connected with.
    for name in lab.hosts:
        ports = [each for each in lab[name].listeners() if "distributed." in " ".join(each.process.command)]
        assert ports and {each.address for each in ports} <= {address(lab, name), "127.0.0.1"}
        peers = in_namespace(name, "ss", "-Htn", "state", "established").split()
        assert not [peer for peer in peers if lab[name].address in peer]
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert len(runner.events("done")) == 3 and not runner.events("lost")


def written(path: Path, settings: dict) -> Path:
    path.write_text(json.dumps(settings))
    return path
