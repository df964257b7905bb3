"""What `--resume` writes down before the launcher starts: a real host over SSH, and the run's own files."""

import hashlib
import json
import pickle
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
from multimac.commands.resume import _bring_up_to_date, resume_run
from whisper_tuner.errors import ConfigError, DataError, RunError

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


@pytest.mark.slow
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


class Trap:
    """Unpickled, it writes a file."""

    def __init__(self, sprung: Path):
        self.sprung = sprung

    def __reduce__(self):
        return Path.write_text, (self.sprung, "")


@pytest.fixture
def given(job, run_dir) -> dict:
    """The run.json of a run of two ranks on this machine, as somebody has sent it with its folder."""
    prepare_run(job, run_dir, local_ranks=2).launch.save(run_dir)
    return json.loads((run_dir / "run.json").read_text())


def refused(folder: Path, run_dir: Path, given: dict) -> str:
    (run_dir / "run.json").write_text(json.dumps(given))
    with pytest.raises(RunError) as error:
        resume_run(folder / "config.ini", str(run_dir))
    return str(error.value)


def test_no_rank_of_a_run_from_elsewhere_unpickles_anything(folder, run_dir, given):
    """Rank 0 is a run's like any other. Without a check of rank 1 its worker opens the pickle."""
    sprung, pickled = folder / "sprung", pickle.dumps(Trap(folder / "sprung"))
    (run_dir / "bundle.pickle").write_bytes(pickled)
    bundle = {"path": str(run_dir / "bundle.pickle"), "sha256": hashlib.sha256(pickled).hexdigest()}
    given["ranks"][1]["spec"] |= {"bundle": bundle, "profile": None, "strategy_settings": None}
    assert "trains a model of your own" in refused(folder, run_dir, given)
    assert not sprung.exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_from_elsewhere_writes_and_removes_in_its_own_folder_alone(folder, run_dir, given, rank):
    """Once it is finished, a rank's checkpoints are removed: `checkpoints` in whatever folder its spec names."""
    kept = folder / "other" / "checkpoints" / "thesis"
    kept.mkdir(parents=True)
    given["ranks"][rank]["spec"]["run_dir"] = str(folder / "other")
    assert f"is of another folder: {folder / 'other'}" in refused(folder, run_dir, given)
    given["ranks"][rank]["spec"] |= {"run_dir": str(run_dir), "run_id": "../.."}  # hosts' folders are named by it
    assert "is of another folder: ../.." in refused(folder, run_dir, given)
    assert kept.exists()
