"""A post over real SSH, with a worker that only repeats what it is told."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from distributed.hosts import sync as sync_module
from distributed.hosts.code import SyncItem
from distributed.hosts.paths import PROJECT
from distributed.launcher import host_runner as post_module
from distributed.launcher.host_runner import WORKER, HostPost
from distributed.plan.files import save_items
from distributed.plan.launch import Rank
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
def post(ssh_server, tmp_path, there):
    """Its run has a model and the clips 0.wav to 39.wav, of which this host has the first three in its shard."""
    worker = tmp_path / "python"
    worker.write_text("#!/bin/sh\nexec cat\n")
    worker.chmod(0o700)
    there.mkdir()
    host = replace(ssh_server.host, python_env=str(worker))
    items = [SyncItem(local=tmp_path / name, remote=name) for name in (MODEL, *clips(40))]
    for item in items:
        item.local.parent.mkdir(exist_ok=True)
        item.local.write_bytes(item.remote.encode() * 1000)
    save_items(tmp_path, {host.address: items[:4]}, items[1:])
    bundle = Bundle(path="bundle.pickle", sha256="0" * 64)
    spec = RunSpec(run_id="run", run_dir="runs/run", cache_dir="cache", bundle=bundle)
    post = HostPost(Rank(label="host", spec=spec, host=host), tmp_path, None, resume=False)
    yield post
    post.leave()


def clips(count: int) -> list[str]:
    return [f"{number}.wav" for number in range(count)]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.wav")}


def test_a_worker_started_again_finds_its_files_but_a_clip_that_is_gone_here(post, there, tmp_path):
    (tmp_path / "1.wav").unlink()
    process = post.start(again=True)
    assert RunSpec.from_json(next(process.lines())).resume
    process.kill()
    assert (there / MODEL).is_file() and names(there) == {"0.wav", "2.wav"}


def test_no_worker_is_started_again_while_its_model_is_gone_here(post, tmp_path):
    (tmp_path / MODEL).unlink()
    with pytest.raises(DataError, match="weights: cannot be read"):
        post.start(again=True)


def test_clips_are_sent_in_order_and_a_few_at_a_time(post, there, monkeypatch):
    monkeypatch.setattr(post_module, "GROUP_FILES", 16)
    done = post.send(clips(40), lambda: True)
    assert next(done) == (16, []) and names(there) == set(clips(16))
    monkeypatch.setattr(post_module, "GROUP_BYTES", 10_000)
    assert next(done) == (2, [])  # of 6000 bytes each
    assert [count for count, _ in done] == [2] * 11 and names(there) == set(clips(40))


def test_a_clip_that_cannot_be_read_here_does_not_keep_the_others(post, there, tmp_path):
    (tmp_path / "1.wav").unlink()
    (tmp_path / "2.wav").unlink()
    (tmp_path / "2.wav").mkdir()
    assert list(post.send([*clips(4), "unknown.wav"], lambda: True)) == [(5, ["1.wav", "2.wav", "unknown.wav"])]
    assert names(there) == {"0.wav", "3.wav"}


def test_nothing_is_sent_that_nobody_waits_for(post, there):
    with pytest.raises(HostError, match="nobody waits"):
        list(post.send(clips(4), lambda: False))
    assert not names(there)


def test_parts_of_clips_whose_sending_broke_off_are_removed(post, there, tmp_path):
    process = post.start(again=True)
    (tmp_path / "20.wav").write_bytes(bytes(3 << 20))  # too long to travel with the others
    asked = iter([True, True])
    with pytest.raises(HostError, match="nobody waits"):
        list(post.send(clips(40), lambda: next(asked, False)))
    (there / ".sync" / "another-run.part").touch()
    assert len(list((there / ".sync").glob("*.part"))) > 1
    post.leave()
    assert [part.name for part in (there / ".sync").glob("*.part")] == ["another-run.part"]
    process.kill()


def test_a_folder_that_finds_no_place_here_is_an_error_of_its_own(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match="cannot be copied"):
        post_module.fetch_folder(LocalMachine("host"), str(tmp_path), tmp_path / "file" / "final")


def test_a_worker_that_is_there_is_gone_on_with_over_another_connection(post, tmp_path):
    repeats = Path(__file__).with_name("toy_echo.py")
    (tmp_path / "python").write_text(f"""#!/bin/sh
export PYTHONPATH={PROJECT}:{PROJECT}/gym
case "$2" in
    {WORKER}) read -r spec; exec {sys.executable} {repeats} "$4" {WORKER};;
    *) exec {sys.executable} "$@";;
esac
""")
    process = post.start(again=False)
    lines = process.lines()
    assert "beat" in next(lines)
    with pytest.raises(HostError, match="has not answered yet"):
        post.start(again=True, may_replace=lambda is_there: not is_there)
    process.write(b'{"type": "number", "n": 7}\n')
    assert any("echo" in line for line in lines)
    process.kill()
    assert process.wait(5) is not None
    replaced = []
    again = post.start(again=True, may_replace=lambda is_there: replaced.append(is_there) or True)
    assert replaced == [False] and again is not process and "beat" in next(again.lines())
    again.kill()
