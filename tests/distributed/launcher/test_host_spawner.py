"""Workers over real SSH: their command is replaced by one that repeats what it is told."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from bsd_tools import bsd_tools
from login_shells import installed
from waiting import wait_until

from distributed.control.messages import send_event, split_line
from distributed.control.timeouts import Timeouts
from distributed.hosts import sync as sync_module
from distributed.hosts.paths import PROJECT, SyncItem
from distributed.launcher import spawner as spawners
from distributed.launcher.spawner import HostSpawner, LocalSpawner
from distributed.plan.launch import Rank, save_items
from distributed.plan.run_spec import Bundle, RunSpec
from distributed.ssh.machine import LocalMachine
from whisper_tuner.errors import DataError, HostError

MODEL = "model/weights"


@pytest.fixture(autouse=True)
def own_index(tmp_path, monkeypatch):
    monkeypatch.setattr(sync_module, "INDEX", tmp_path / "index.json")


@pytest.fixture
def there(ssh_server) -> Path:
    return Path(ssh_server.host.project_path)


@pytest.fixture
def spawner(ssh_server, tmp_path, there, monkeypatch):
    """Its run has a model and the clips 0.wav to 39.wav, of which this host has the first three in its shard."""
    python = tmp_path / "python"
    path = f"{PROJECT}/gym:{PROJECT}:{PROJECT}/tests:{Path(__file__).parent}"
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH={path}\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    there.mkdir()
    host = replace(ssh_server.host, python_env=str(python))
    items = [SyncItem(local=tmp_path / name, remote=name) for name in (MODEL, *clips(40))]
    for item in items:
        item.local.parent.mkdir(exist_ok=True)
        item.local.write_bytes(item.remote.encode() * 1000)
    save_items(tmp_path, {host.address: items[:4]}, items[1:])
    bundle = Bundle(path="bundle.pickle", sha256="0" * 64)
    spec = RunSpec(run_id="run", run_dir="runs/run", cache_dir="cache", bundle=bundle)
    monkeypatch.setattr(spawners, "WORKER", "test_host_spawner")
    spawner = HostSpawner(Rank(label="host", spec=spec, host=host), host, tmp_path, None, resume=False)
    yield spawner
    spawner.leave(finished=False)


def clips(count: int) -> list[str]:
    return [f"{number}.wav" for number in range(count)]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.wav")}


def test_a_worker_started_again_finds_its_files_but_a_clip_that_is_gone_here(spawner, there, tmp_path):
    (tmp_path / "1.wav").unlink()
    process = spawner.start(again=True)
    assert RunSpec.from_json(next(heard(process))["spec"]).resume
    process.kill()
    assert (there / MODEL).is_file() and names(there) == {"0.wav", "2.wav"}


def test_no_worker_is_started_again_while_its_model_is_gone_here(spawner, tmp_path):
    (tmp_path / MODEL).unlink()
    with pytest.raises(DataError, match="weights: cannot be read"):
        spawner.start(again=True)


@pytest.mark.slow
def test_clips_are_sent_in_order_and_a_few_at_a_time(spawner, there, monkeypatch):
    monkeypatch.setattr(spawners, "GROUP_FILES", 16)
    done = spawner.send(clips(40), lambda: True)
    assert next(done) == (16, []) and names(there) == set(clips(16))
    monkeypatch.setattr(spawners, "GROUP_BYTES", 10_000)
    assert next(done) == (2, [])  # of 6000 bytes each
    assert [count for count, _ in done] == [2] * 11 and names(there) == set(clips(40))


def test_a_clip_that_cannot_be_read_here_does_not_keep_the_others(spawner, there, tmp_path):
    (tmp_path / "1.wav").unlink()
    (tmp_path / "2.wav").unlink()
    (tmp_path / "2.wav").mkdir()
    assert list(spawner.send([*clips(4), "unknown.wav"], lambda: True)) == [(5, ["1.wav", "2.wav", "unknown.wav"])]
    assert names(there) == {"0.wav", "3.wav"}


def test_nothing_is_sent_that_nobody_waits_for(spawner, there):
    with pytest.raises(HostError, match="nobody waits"):
        list(spawner.send(clips(4), lambda: False))
    assert not names(there)


def test_a_folder_that_finds_no_place_here_is_an_error_of_its_own(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match="cannot be copied"):
        spawners.fetch_folder(LocalMachine("host"), str(tmp_path), tmp_path / "file" / "final")


def heard(process) -> Iterator[dict]:
    return (event for line in process.lines() if line and (event := split_line(line)[1]))


def test_a_worker_that_is_there_is_reached_over_another_connection(spawner):
    process = spawner.start(again=False)
    events = heard(process)
    assert next(events)["type"] == "spec"
    before = spawner._remote
    assert spawner.reconnect()
    assert spawner._remote is not before and not before.is_open
    process.write(b'{"type": "number", "n": 7}\n')
    assert next(events) == {"type": "echo", "n": 7}
    process.kill()


@pytest.mark.parametrize("shell", ["fish", "tcsh", "busybox"])
def test_a_worker_lives_and_ends_whatever_its_user_s_login_shell_is(spawner, ssh_server, tmp_path, shell):
    ssh_server.log_in_with(installed(shell, tmp_path / "shells"), bsd_tools(tmp_path / "tools"))
    process = spawner.start(again=True)
    events = heard(process)
    assert next(events)["type"] == "spec"
    assert spawner.reconnect()
    process.write(b'{"type": "number", "n": 7}\n')
    assert next(events) == {"type": "echo", "n": 7}
    supervisor = psutil.Process(process._pid)
    group = [supervisor, *supervisor.children(recursive=True)]
    process.kill()
    wait_until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in group))
    spawner.leave(finished=True)
    assert not (Path(ssh_server.host.project_path) / "runs" / "run").exists()


def test_a_connection_that_is_lost_is_told_and_the_worker_goes_on(spawner):
    process = spawner.start(again=False)
    lines = process.lines()
    next(lines)
    spawner._remote.close()
    assert None in lines
    with pytest.raises(HostError):
        process.write(b'{"type": "number", "n": 8}\n')
    assert spawner.reconnect()
    assert any("echo" in line for line in lines if line)
    process.kill()


def test_no_worker_is_there_once_it_has_been_killed(spawner):
    process = spawner.start(again=False)
    process.kill()
    wait_until(lambda: not spawner.reconnect())


def test_a_worker_that_is_frozen_is_there_and_is_not_reached(spawner):
    spawner._timeouts = Timeouts(handshake_s=1.5)
    process = spawner.start(again=False)
    before = spawner._remote
    os.killpg(process._pid, signal.SIGSTOP)
    assert spawner.reconnect() and spawner._remote is before
    os.killpg(process._pid, signal.SIGCONT)
    assert spawner.reconnect() and spawner._remote is not before
    process.kill()


def test_a_host_that_is_cut_off_is_left_soon(spawner, ssh_server, monkeypatch):
    monkeypatch.setattr(spawners, "LEAVE_S", 1.0)
    process = spawner.start(again=False)
    sessions = [one for one in psutil.Process(ssh_server.process.pid).children(True) if one.name().startswith("sshd")]
    for session in sessions:
        session.suspend()
    began = time.monotonic()
    spawner.leave(finished=True)
    assert sessions and time.monotonic() - began < 3
    for session in sessions:
        session.resume()
    os.killpg(process._pid, signal.SIGKILL)


def test_another_start_ends_the_worker_before(spawner):
    """Also that of a launcher which was killed: only the socket's path is known."""
    first = spawner.start(again=False)
    next(first.lines())
    spawner._link = None
    second = spawner.start(again=True)
    assert next(heard(second))["type"] == "spec"
    wait_until(lambda: psutil.pid_exists(first._pid) is False or psutil.Process(first._pid).status() == "zombie")
    second.kill()


CHECKPOINT = ("checkpoints/0000001/{}.json", "checkpoints/0000002/{}.safetensors", "checkpoints/0000002/{}.json.part")
OTHERS = [name.format(rank) for rank in ("localhost.local", "mac.localhost", "master") for name in CHECKPOINT]
OTHERS += ["final/model.safetensors", "final-master/model.safetensors", "run.json", "checkpoints/master.spec.json"]


def write(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("finished", [True, False])
def test_a_worker_that_is_left_takes_along_only_what_bears_its_own_name(spawner, there, finished):
    """The host's folder may be the master's, or that of another host."""
    run, own = there / "runs" / "run", [name.format("localhost") for name in CHECKPOINT]
    own += ["final-localhost/model.safetensors", "final-localhost.part/part", "checkpoints/localhost.spec.json"]
    write(run, [*OTHERS, *own, "checkpoints/0.sock"])
    spawner.start(again=False).kill()
    spawner.leave(finished=finished)
    assert files(run) == set(OTHERS) | (set() if finished else set(own))


def test_a_rank_of_this_machine_leaves_what_others_have_written(tmp_path):
    spec = RunSpec(run_id="run", run_dir=str(tmp_path), cache_dir="cache", bundle=Bundle(path="", sha256=""))
    own = [name.format("localhost") for name in CHECKPOINT]
    write(tmp_path, [*OTHERS, *own])
    LocalSpawner(Rank(label="localhost", spec=spec), None, resume=False).leave(finished=True)
    assert files(tmp_path) == set(OTHERS)


def test_the_model_of_a_host_that_works_in_the_masters_folder_comes_and_stays(spawner, there, tmp_path, monkeypatch):
    run = there / "runs" / "run"
    write(run, ["final/model", f"{spawner._spec.final}/model"])
    monkeypatch.setattr(spawner, "_run_dir", run)
    spawner.start(again=False).kill()
    spawner.fetch("final")
    spawner.leave(finished=True)
    assert files(run) == {"final/model"} and (run / "final" / "model").read_text() == "final-localhost/model"


def main() -> None:
    """What is started here in place of a worker."""
    spec = sys.stdin.readline()
    send_event({"type": "spec", "spec": spec})
    for line in sys.stdin:
        send_event({"type": "echo", "n": json.loads(line)["n"]})


if __name__ == "__main__":
    main()
