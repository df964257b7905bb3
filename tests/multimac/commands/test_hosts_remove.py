"""What `hosts remove` takes from a host, and what it leaves: over a real sshd, with real files."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from loopback_sshd import SshServer
from waiting import wait_until

import cli_typer
from distributed.hosts import sync as sync_module
from distributed.hosts.agent.holdings import work_in
from distributed.hosts.environment import MADE_BY
from distributed.hosts.paths import SyncItem, code_items
from distributed.hosts.sync import sync
from distributed.plan.run_spec import Bundle, RunSpec
from distributed.ssh.connection import Remote
from whisper_tuner.errors import ExitStatus

PROJECT = Path(__file__).parents[3]
RUN = "runs/20261128-101500-mine/checkpoints"
FOREIGN = {"notes.txt": "mine", "distributed/mine.py": "mine", "runs/paper/checkpoints/best": "mine", "-rf": "mine"}
FOREIGN |= {"runs/20261128-101500-mine/finally.txt": "mine"}
FOREIGN |= {"runs/20261127-101500-own/run.json": "{}", "runs/20261127-101500-own/checkpoints/best": "mine"}


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


class Host:
    """The loopback host, as it is after a sync of code, a model and two clips, a run, and `hosts setup`."""

    def __init__(self, server: SshServer, folder: Path):
        self.server, self.folder = server, folder
        self.project = Path(server.host.project_path)
        self.file = folder / "hosts.json"
        self.worker = {**server.worker}
        del self.worker["python_env"]

    def remove(self, *options: str, workers: list | None = None) -> int:
        self.file.write_text(json.dumps({"master": "localhost", "workers": workers or [self.worker]}))
        return cli_typer.main(["hosts", "remove", "--hosts", str(self.file), *options])

    def fill(self) -> None:
        sources = {".multimac/models/base/model.safetensors": "m" * 3000, "a.wav": "1" * 2000, "b.wav": "2" * 1000}
        write(self.folder / "sent", sources)
        items = [SyncItem(local=self.folder / "sent" / name, remote=name) for name in list(sources)[:1]]
        for name in ("a.wav", "b.wav"):
            items.append(SyncItem(local=self.folder / "sent" / name, remote=f".multimac/data/train-1/{name}"))
        with Remote.connect(self.server.host) as remote:
            sync([remote], {remote.name: [*code_items(), *items]})
        made = {f"{RUN}/1/rank0.json": "{}", ".multimac/cache/features/x": "mel", ".sync/1.2.part": "half a clip"}
        write(self.project, made | {".setup/requirements.txt": "x", "distributed/__pycache__/a.pyc": "x"})
        command = [sys.executable, "-m", "venv", "--without-pip", "--prompt", MADE_BY, self.project / ".venv"]
        subprocess.run(command, check=True)


@pytest.fixture
def host(ssh_server: SshServer, tmp_path, monkeypatch) -> Host:
    monkeypatch.setattr(sync_module, "INDEX", tmp_path / "index.json")
    host = Host(ssh_server, tmp_path)
    host.fill()
    return host


def test_all_that_we_put_there_is_shown_and_removed_and_a_second_call_finds_nothing(host, capsys):
    before = listing(host.project)
    assert host.remove() == ExitStatus.OK
    said = capsys.readouterr().out
    for kind in ("audio", "models", "runs", "environment", "packages", "code", "records"):
        assert f" {kind} " in said
    assert "nothing has been removed yet: repeat the command with --yes" in said
    assert listing(host.project) == before
    assert host.remove("--yes") == ExitStatus.OK
    assert "in all; removed" in capsys.readouterr().out
    assert not host.project.exists() and host.project.parent.exists()
    assert host.remove("--yes") == ExitStatus.OK
    assert capsys.readouterr().out == "127.0.0.1: nothing is left\n"
    assert not host.project.exists()


def test_what_others_put_there_stays_and_is_named(host, tmp_path, capsys):
    """Files between ours, folders with names like ours, an environment of the user, what links lead to."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", host.project / ".venv"], check=True)
    elsewhere = tmp_path / "elsewhere"
    write(
        elsewhere,
        {"data/train-1/a.wav": "precious", "agent/main.py": "precious", "20261128-111500-x/final/m": "precious"},
    )
    write(host.project, FOREIGN)
    agent = host.project / "distributed/hosts/agent"
    agent.rename(tmp_path / "agent")
    agent.symlink_to(elsewhere / "agent")  # a name of the record now leads elsewhere
    (host.project / ".multimac/models/link").symlink_to(elsewhere)
    (host.project / "runs/20261128-111500-x").symlink_to(elsewhere / "20261128-111500-x")
    environment = listing(host.project / ".venv")
    assert host.remove("--yes") == ExitStatus.OK
    said = capsys.readouterr().out
    assert "what others put into " in said and "files: '-rf', '.venv/" in said
    assert {name for name in listing(host.project) if not name.startswith(".venv/")} == {
        *FOREIGN, ".venv", "distributed", "distributed/hosts", "distributed/hosts/agent", "runs", "runs/paper",
        "runs/paper/checkpoints", "runs/20261127-101500-own", "runs/20261127-101500-own/checkpoints",
        "runs/20261128-101500-mine", "runs/20261128-111500-x",
    }  # fmt: skip
    assert listing(host.project / ".venv") == environment
    assert {(elsewhere / name).read_text() for name in listing(elsewhere) if (elsewhere / name).is_file()} == {
        "precious"
    }


def test_only_the_audio_goes_and_the_record_forgets_its_names(host, capsys):
    assert host.remove("--only-audio", "--yes", "--json") == ExitStatus.OK
    [told] = json.loads(capsys.readouterr().out)
    assert told["removed"] and [(row["kind"], row["files"]) for row in told["held"]] == [("audio", 4)]
    assert listing(host.project / ".multimac") == {"models", "models/base", "models/base/model.safetensors"}
    index = (host.project / ".sync/index.json").read_text()
    assert "a.wav" not in index and "model.safetensors" in index
    assert (host.project / ".venv").exists() and (host.project / RUN).exists()


def test_a_host_with_a_run_in_progress_is_refused_by_name(host, capsys):
    """A worker that is just loading torch, frozen, as a Mac that sleeps."""
    run_id = "20261128-101500-mine"
    (host.project / RUN / "0.sock").touch()  # its supervisor's
    spec = RunSpec(run_id=run_id, run_dir=f"runs/{run_id}", cache_dir="", bundle=Bundle(path="none", sha256="0" * 64))
    command = [sys.executable, "-m", "distributed.worker.main", run_id]
    env = {**os.environ, "PYTHONPATH": f"{host.project}/gym:{host.project}"}
    worker = subprocess.Popen(command, cwd=host.project, env=env, stdin=subprocess.PIPE)
    try:
        worker.stdin.write(spec.to_json().encode() + b"\n")
        worker.stdin.flush()
        wait_until(lambda: work_in(host.project), 30)
        worker.send_signal(signal.SIGSTOP)
        before = listing(host.project)
        assert host.remove("--yes") == ExitStatus.HOST
        assert f"127.0.0.1: run {run_id} is in progress in {host.project}" in capsys.readouterr().err
        assert listing(host.project) == before
    finally:
        worker.kill()
        worker.wait()
    assert host.remove("--yes") == ExitStatus.OK and not host.project.exists()


def test_a_checkout_is_never_touched_whoevers_it_is(host, capsys):
    """That of the master on a disk that both have, or under another of its names; or one that is the host's own."""
    write(host.project, {"cli_typer.py": "", "runs/20261128-101500-mine/final/model": "precious"})
    before = listing(host.project)
    assert host.remove("--yes") == ExitStatus.HOST
    assert "is a checkout of this project" in capsys.readouterr().err
    assert listing(host.project) == before


def test_a_disk_that_is_mounted_among_ours_keeps_what_it_holds(host, capsys):
    disk = host.project / ".multimac/data/disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", disk], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        write(disk, {"a.wav": "precious"})
        assert host.remove("--yes") == ExitStatus.OK
        assert (disk / "a.wav").read_text() == "precious"
        assert ".multimac/data/disk/a.wav" in capsys.readouterr().out
    finally:
        subprocess.run(["umount", disk], check=True)


def test_files_that_a_sync_found_there_are_not_ours(host, tmp_path):
    host.remove("--yes")
    write(host.project, {"notes.txt": "mine"})
    (tmp_path / "same").write_text("mine")
    with Remote.connect(host.server.host) as remote:
        sync([remote], {remote.name: [SyncItem(local=tmp_path / "same", remote="notes.txt")]})
    assert host.remove("--yes") == ExitStatus.OK
    assert listing(host.project) == {"notes.txt"}


def test_one_host_that_is_not_reached_does_not_keep_the_others(host, capsys):
    nobody = {"host": "127.0.0.2", "ssh_port": 9}
    assert host.remove("--yes", workers=[nobody, host.worker]) == ExitStatus.HOST
    said = capsys.readouterr()
    assert "127.0.0.2: port 9" in said.err and "in all; removed" in said.out
    assert not host.project.exists()
    assert host.remove("elsewhere") == ExitStatus.CONFIG
    assert "elsewhere is no worker of " in capsys.readouterr().err
