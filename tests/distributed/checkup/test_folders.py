"""Hosts whose folders are the same, or one in the other: several names of this machine, reached over a real sshd."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from loopback_sshd import SshServer
from waiting import wait_until

from distributed.checkup.look import Look, Session
from distributed.checkup.preflight import are_nested, folder_problems, preflight, shared_folders
from distributed.hosts import sync as sync_module
from distributed.hosts.agent import files as agent_folders
from distributed.hosts.paths import PROJECT, SyncItem
from distributed.hosts.sync import sync
from distributed.plan.hosts_file import load_hosts
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host, Hosts
from distributed.ssh.machine import LocalMachine
from multimac.commands.hosts import hosts_setup
from whisper_tuner.errors import HostError

MASTER = Host(address="localhost")


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    monkeypatch.setattr(sync_module, "INDEX", tmp_path / "index.json")
    monkeypatch.setattr(sync_module, "MASTER", tmp_path / "master-id")


@pytest.fixture
def hosts_at(ssh_server: SshServer):
    """Workers `one`, `two`, ... with these project folders."""
    names = ("one", "two", "three")
    ssh_server.configure("\n".join(f"Host {name}\n  HostName 127.0.0.1" for name in names))

    def make(*folders: Path) -> Hosts:
        host = replace(ssh_server.host, python_env=sys.executable)
        pairs = zip(names, folders, strict=False)
        workers = tuple(replace(host, address=name, project_path=str(folder)) for name, folder in pairs)
        return Hosts(master=MASTER, workers=workers)

    return make


def said_of(hosts: Hosts) -> str:
    with contextlib.ExitStack() as stack:
        remotes = [stack.enter_context(Remote.connect(host)) for host in hosts.workers]
        return "\n".join(map(str, shared_folders(hosts.master, remotes)))


def marks(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.rglob(agent_folders.MARK + "*")]


def test_folders_of_their_own_are_well_and_nothing_stays_there(hosts_at, tmp_path):
    (tmp_path / "there").mkdir()
    assert said_of(hosts_at(tmp_path / "there", tmp_path / "not yet", tmp_path / "nor this" / "one")) == ""
    wait_until(
        lambda: not marks(tmp_path, PROJECT / "distributed") and not list(PROJECT.glob(agent_folders.MARK + "*"))
    )
    assert not (tmp_path / "not yet").exists() and not list((tmp_path / "there").iterdir())


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("p", "p"),
        ("p", "link"),
        *(pytest.param(*two, marks=pytest.mark.slow) for two in (("p", "p/in/it"), ("p", "above/p"), ("p/in", "link"))),
    ],
)
def test_folders_that_are_one_are_refused_by_name_whatever_they_are_called(hosts_at, tmp_path, one, two, exists):
    (tmp_path / "link").symlink_to("p")
    (tmp_path / "above").symlink_to(".")
    if exists:
        (tmp_path / "p" / "in" / "it").mkdir(parents=True)
    said = said_of(hosts_at(tmp_path / one, tmp_path / two, tmp_path / "other"))
    assert f"one ({tmp_path / one}), two ({tmp_path / two}): these folders are the same, or one is in another" in said
    assert "three" not in said and '"project_path": "~/multimac-whisper-{host}"' in said


def test_a_worker_in_the_masters_own_folder_is_refused(hosts_at, tmp_path):
    (tmp_path / "link").symlink_to(PROJECT)
    assert f"localhost ({PROJECT}), one ({tmp_path / 'link'}): these folders" in said_of(hosts_at(tmp_path / "link"))


def test_names_that_differ_in_what_a_macs_disk_takes_for_the_same_are_the_same():
    assert are_nested(["Folder"], ["folder", "in"])
    assert are_nested(["Caf\u00e9"], ["cafe\u0301"])
    assert not are_nested(["Folder"], ["other"])


def test_a_folder_that_cannot_be_written_is_no_problem_of_this_check():
    """The folder of runs is by default that of the shell, and a Mac's / is read-only; nobody writes in /proc either."""
    found = agent_folders.Folders().mark(["/proc/runs"], ["id", "mac"])
    assert [names for _, names in found["marks"]] == [["runs"]]


def test_no_mark_stays_where_an_agent_ends_by_its_alarm(tmp_path):
    """As after a link was cut, which brings no end of stdin."""
    session = Session(LocalMachine(), sys.executable, life_s=2)
    session.call("mark", time.monotonic() + 10, folders=[str(tmp_path / "there")], master=["id", "mac"])
    assert len(marks(tmp_path)) == 1
    assert session.ended(10) and not marks(tmp_path)


def test_a_host_that_says_it_saw_what_is_nowhere_is_not_believed():
    lies = {
        "mark": {"marks": [["own", []]], "master": "", "busy": False},
        "seen": {"seen": [["none", []], ["own", []]]},
    }
    look = Look(0, MASTER)
    look.session = SimpleNamespace(send=lambda op, **_: op, answer=lambda op, *_: lies[op])
    assert folder_problems([look], 0.0) == []


@pytest.mark.usefixtures("no_torch")
def test_the_preflight_refuses_what_is_shared_the_folder_of_runs_too(hosts_at, tmp_path):
    from test_preflight import tiny

    (tmp_path / "nas" / "runs").mkdir(parents=True)
    (tmp_path / "runs").symlink_to("nas/runs")
    with preflight(tiny(tmp_path), hosts_at(tmp_path / "nas", tmp_path / "two")) as report:
        assert report.seconds < 15
        [shared] = [problem for problem in report.errors if problem.check == "folder"]
    assert shared.hosts == ("localhost", "one") and str(tmp_path / "nas") in shared.what


def test_hosts_setup_changes_nothing_in_a_shared_folder(ssh_server, tmp_path):
    there = tmp_path / "shared"
    ssh_server.configure("Host two\n  HostName 127.0.0.1")
    worker = ssh_server.worker | {"project_path": str(there)}
    (tmp_path / "hosts.json").write_text(
        json.dumps({"master": "localhost", "workers": [worker, worker | {"host": "two"}]})
    )
    with pytest.raises(HostError, match=r"127.0.0.1 \(.*shared\), two \(.*shared\): these folders"):
        hosts_setup(tmp_path / "hosts.json")
    assert not there.exists()


def test_one_line_gives_each_worker_a_folder_of_its_own(tmp_path):
    path = tmp_path / "hosts.json"
    both = '"project_path": "~/p-{host}", "python_env": "~/p-{host}/env"'
    path.write_text('{"master": "a", "workers": ["10.0.0.2", "mini.local"], ' + both + "}")
    hosts = load_hosts(path).workers
    assert [host.project_path for host in hosts] == ["~/p-10.0.0.2", "~/p-mini.local"]
    assert [host.environment for host in hosts] == ["~/p-10.0.0.2/env", "~/p-mini.local/env"]


# Two masters.


def test_a_master_has_one_id_also_if_a_full_disk_took_it():
    number, _ = sync_module.this_master()
    assert number and sync_module.this_master()[0] == number
    sync_module.MASTER.write_text("")
    assert sync_module.this_master()[0] == str(PROJECT)


def item(tmp_path: Path) -> SyncItem:
    (tmp_path / "a.py").write_text("a")
    return SyncItem(local=tmp_path / "a.py", remote="distributed/a.py", refuse_foreign=True)


def be(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sync_module, "this_master", lambda: [f"id of {name}", name])
    monkeypatch.setattr("distributed.checkup.preflight.this_master", lambda: [f"id of {name}", name])


def test_another_master_is_refused_while_the_first_is_at_work_and_not_afterwards(hosts_at, tmp_path, monkeypatch):
    hosts, there = hosts_at(tmp_path / "there"), tmp_path / "there"
    with Remote.connect(hosts.workers[0]) as remote:
        be(monkeypatch, "mac-1")
        sync([remote], {"one": [item(tmp_path)]})
        be(monkeypatch, "mac-2")
        with pytest.raises(HostError, match=f"one: mac-1, another master, is working in {there}"):  # its run may begin
            sync([remote], {"one": []}, prune=["distributed"])
        os.utime(there / ".sync" / "master", (0, 0))
        with (there / ".sync" / "in-use").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            with pytest.raises(HostError, match="mac-1, another master"):
                sync([remote], {"one": []}, prune=["distributed"])
            assert "mac-1, another master, is working" in said_of(hosts)
        assert (there / "distributed" / "a.py").exists() and said_of(hosts) == ""
        sync([remote], {"one": []}, prune=["distributed"])
        assert not (there / "distributed" / "a.py").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("no_torch")
def test_without_a_sync_another_masters_files_are_not_used(hosts_at, tmp_path, monkeypatch):
    hosts, there = hosts_at(tmp_path / "there"), tmp_path / "there"
    be(monkeypatch, "mac-1")
    with Remote.connect(hosts.workers[0]) as remote:
        sync([remote], {"one": [item(tmp_path)]})
    os.utime(there / ".sync" / "master", (0, 0))
    be(monkeypatch, "mac-2")
    for synced, expected in ((True, []), (False, ["mac-1, another master, sent its files last"])):
        with preflight(None, hosts, sync=synced) as report:
            assert [problem.what for problem in report.errors if problem.check == "folder"] == expected


def test_a_worker_holds_its_folder_until_it_ends(tmp_path):
    private = tmp_path / ".sync"
    private.mkdir()
    agent_folders.claim(private, ["id", "mac-1"])
    os.utime(private / "master", (0, 0))
    program = "import pathlib; from distributed.hosts.agent.files import hold; hold(pathlib.Path()); print(); input()"
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", program]
    worker = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    worker.stdout.readline()
    assert agent_folders.other_master(private, ["other", "mac-2"]) == ("mac-1", True)
    worker.kill()
    worker.communicate()
    assert agent_folders.other_master(private, ["other", "mac-2"]) == ("mac-1", False)
    assert agent_folders.other_master(private, ["id", "mac-1"]) == ("", False)
