"""What `--resume` writes down before the launcher starts: a real host over SSH, and the run's own files."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from distributed.hosts import sync as sync_module
from distributed.plan.launch import Launch
from distributed.plan.prepare import prepare_run
from distributed.ssh.host import Host, Hosts
from exogym.state.checkpoint import Checkpoints
from multimac.commands.resume import _bring_up_to_date
from whisper_tuner.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("no_torch")


@pytest.fixture
def hosts(ssh_server, tmp_path, monkeypatch) -> Hosts:
    monkeypatch.setattr(sync_module, "INDEX", tmp_path / "index.json")
    worker = replace(ssh_server.host, python_env=sys.executable)
    return Hosts(master=Host(address="localhost"), workers=(worker,))


@pytest.fixture
def launch(job, run_dir, hosts) -> Launch:
    """A run that was stopped after its fourth round."""
    launch = prepare_run(job, run_dir, hosts=hosts, machine_workers=(2, 2)).launch
    launch.save(run_dir)
    Checkpoints(run_dir / "checkpoints", "localhost").save(8, {"round": 4})
    return launch


def hosts_file(folder: Path, hosts: Hosts, master: str = "localhost", **changes: object) -> Path:
    [host] = hosts.workers
    said = {
        "host": host.address,
        "ssh_user": host.user,
        "ssh_port": host.port,
        "ssh_key_path": str(host.key_path),
        "project_path": host.project_path,
        "python_env": host.python_env,
    }
    (folder / "hosts.json").write_text(json.dumps({"master": master, "workers": [said | changes]}))
    return folder / "hosts.json"


def resumed(run_dir: Path, launch: Launch, hosts_file: Path | None = None, *, no_sync: bool = False) -> Launch:
    console = Console(quiet=True)
    found = _bring_up_to_date(console, run_dir, launch, hosts_file, no_sync)
    assert Launch.load(run_dir) == found
    return found


def test_the_same_hosts_with_other_settings(folder, run_dir, launch, hosts):
    elsewhere = f"{hosts.workers[0].project_path}-2"
    file = hosts_file(folder, hosts, interface="lo", device="cpu", project_path=elsewhere)
    found = resumed(run_dir, launch, file)
    spec = found.ranks[1].spec
    assert (spec.interface, spec.wanted_device, spec.hosts) == ("lo", "cpu", launch.ranks[1].spec.hosts)
    assert found.ranks[1].host.project_path == elsewhere
    assert Path(elsewhere, spec.profile.train).is_file() and Path(elsewhere, "distributed/worker/main.py").is_file()


def test_without_a_sync_nothing_is_sent(folder, run_dir, launch, hosts):
    there = Path(hosts.workers[0].project_path, resumed(run_dir, launch).ranks[1].spec.profile.train)
    there.unlink()
    assert resumed(run_dir, launch, hosts_file(folder, hosts, device="cpu"), no_sync=True).ranks[1].spec.device == "cpu"
    assert not there.exists()
    with pytest.raises(ConfigError, match="--no-sync"):
        resumed(run_dir, launch, hosts_file(folder, hosts, master="LOCALHOST"), no_sync=True)


def test_a_sync_that_fails_leaves_the_run_as_it_was(folder, run_dir, launch, hosts):
    other = hosts_file(folder, hosts, master="LOCALHOST")
    (folder / "train").rename(folder / "away")
    with pytest.raises(DataError, match="cannot be read"):
        resumed(run_dir, launch, other)
    assert Launch.load(run_dir) == launch
    assert Checkpoints(run_dir / "checkpoints", "localhost").load(8) == {"round": 4}
    (folder / "away").rename(folder / "train")
    resumed(run_dir, launch)  # with the hosts that it had
    found = resumed(run_dir, launch, other)
    assert Checkpoints(run_dir / "checkpoints", found.ranks[0].label).load(8) == {"round": 4}
