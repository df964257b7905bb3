import contextlib
import hashlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from loopback_sshd import SshServer
from waiting import wait_until

from distributed.hosts import agent_call as agent_call_module
from distributed.hosts import sync as sync_module
from distributed.hosts.agent_call import agent_call
from distributed.hosts.paths import PACKAGES, PRUNED, SyncItem, code_items, folder_items
from distributed.hosts.sync import checked, hashed_files, lacking, sync
from distributed.ssh import process
from distributed.ssh.connection import Remote
from whisper_tuner.errors import DataError, HostError

NAMES = ["plain.txt", "with space", "-leading", "new\nline", "é ü 日本", "quote'\"", "deep/er/file", "*", "~", "a\\b"]


@pytest.fixture(autouse=True)
def own_index(tmp_path, monkeypatch):
    monkeypatch.setattr(sync_module, "INDEX", tmp_path / "index.json")


@pytest.fixture
def remote(ssh_server: SshServer):
    with Remote.connect(ssh_server.host) as remote:
        yield remote


@pytest.fixture
def there(ssh_server: SshServer) -> Path:
    return Path(ssh_server.host.project_path)


def make(folder: Path, names: dict[str, bytes]) -> list[SyncItem]:
    for name, data in names.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return [SyncItem(local=folder / name, remote=f"data/{name}") for name in names]


def run(remote: Remote, items: list[SyncItem], **options):
    return sync([remote], {remote.name: items}, **options)[0]


def test_awkward_names_arrive_private_and_only_once(remote, there, tmp_path):
    items = make(tmp_path / "src", {name: name.encode() * 3 for name in NAMES})
    report = run(remote, items)
    assert (report.files, report.bytes) == (len(NAMES), sum(3 * len(name.encode()) for name in NAMES))
    for name in NAMES:
        path = there / "data" / name
        assert path.read_bytes() == name.encode() * 3
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not list((there / ".sync").glob("*.part"))
    again = run(remote, items)
    assert (again.files, again.bytes, again.removed) == (0, 0, 0)


def test_only_what_changed_here_or_there_travels(remote, there, tmp_path):
    items = make(tmp_path / "src", {name: name.encode() * 1000 for name in "abc"})
    run(remote, items)
    (tmp_path / "src" / "b").write_bytes(b"3" * 1000)
    (there / "data/c").write_bytes(b"0" * 1000)
    report = run(remote, items)
    assert (report.files, report.bytes) == (2, 2000)
    assert [(there / "data" / name).read_bytes() for name in "bc"] == [b"3" * 1000, b"c" * 1000]


def test_what_would_be_sent_is_told_and_nothing_changed(remote, there, tmp_path):
    items = make(tmp_path / "src", {"a": b"1" * 1000, "b": b"2" * 1000, "same as b": b"2" * 1000})
    assert lacking([remote], {remote.name: items}) == {remote.name: (2, 2000)}
    assert not there.exists()
    run(remote, items)
    assert lacking([remote], {remote.name: items}) == {remote.name: (0, 0)}
    (tmp_path / "src" / "b").write_bytes(b"3" * 1500)
    sent_earlier = there / ".sync" / f"{hashlib.sha256(b'3' * 1500).hexdigest()}.99999999.part"
    sent_earlier.write_bytes(b"3" * 600)
    before = {path: path.stat().st_mtime_ns for path in there.rglob("*")}
    assert lacking([remote], {remote.name: items}) == {remote.name: (1, 900)}
    assert {path: path.stat().st_mtime_ns for path in there.rglob("*")} == before


def test_hashes_that_cannot_be_kept_keep_no_host_away(remote, there, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(sync_module, "INDEX", tmp_path / "file" / "index.json")
    run(remote, make(tmp_path / "src", {"a": b"1"}))
    assert (there / "data/a").read_bytes() == b"1"


def test_same_content_travels_once(remote, there, tmp_path):
    items = make(tmp_path / "src", dict.fromkeys(("a", "b", "c"), b"x" * 5000))
    assert run(remote, items * 2).bytes == 5000
    assert all((there / "data" / name).read_bytes() == b"x" * 5000 for name in ("a", "b", "c"))


def test_two_senders_of_the_same_file_do_not_touch_each_others_parts(remote, there, tmp_path, ssh_server):
    data = os.urandom(3 << 20)
    items = make(tmp_path / "src", {"big": data, "small": b"1"})
    other = []

    def meanwhile(host, done, total, file):
        if done > 1 << 20 and not other:
            wait_until(lambda: any(part.stat().st_size > 1 << 19 for part in (there / ".sync").glob("*.part")))
            other.append(None)
            with Remote.connect(ssh_server.host) as again:
                other[0] = run(again, items)
            assert (there / "data/big").read_bytes() == data

    report = run(remote, items, progress=meanwhile)
    assert (there / "data/big").read_bytes() == data
    assert other[0].bytes >= len(data)  # what the first has sent in full may be taken over
    assert report.bytes == len(data) + 1
    assert not list((there / ".sync").glob("*.part"))


def test_a_sender_that_is_cut_leaves_nothing_of_a_file_that_another_has_brought(remote, there, tmp_path, ssh_server):
    """As a host whose link was cut, and which came back before its end of that link knew."""
    data = os.urandom(3 << 20)
    items = make(tmp_path / "src", {"big": data})

    def meanwhile(host, done, total, file):
        if done > 1 << 20 and not (there / "data/big").exists():
            wait_until(lambda: any(part.stat().st_size for part in (there / ".sync").glob("*.part")))
            with Remote.connect(ssh_server.host) as again:
                run(again, items)
            remote._transport.close()

    with pytest.raises(HostError):
        run(remote, items, progress=meanwhile)
    wait_until(lambda: not list((there / ".sync").glob("*.part")), 20)
    assert (there / "data/big").read_bytes() == data


def test_what_earlier_senders_left_of_a_file_goes_when_it_is_here(remote, there, tmp_path):
    items = make(tmp_path / "src", {"a": b"1" * 100})
    digest = hashlib.sha256(b"1" * 100).hexdigest()
    (there / ".sync").mkdir(parents=True)
    left = {pid: there / ".sync" / f"{digest}.{pid}.part" for pid in (99999997, 99999998, 99999999)}
    for part in left.values():
        part.write_bytes(b"")
        os.utime(part, (time.time() - 70,) * 2)
    left[99999997].write_bytes(b"1" * 40)  # just now: it may be another machine's, on a network disk
    left[99999999].write_bytes(b"1" * 60)  # the largest is taken over
    assert run(remote, items).bytes == 40
    assert list((there / ".sync").glob("*.part")) == [left[99999997]]


def test_many_senders_at_once(there, tmp_path, ssh_server):
    items = make(tmp_path / "src", {str(number): os.urandom(10_000) for number in range(100)})

    def send(_) -> None:
        with Remote.connect(ssh_server.host) as remote:
            run(remote, items)

    with ThreadPoolExecutor() as pool:
        list(pool.map(send, range(4)))
    assert all((there / item.remote).read_bytes() == item.local.read_bytes() for item in items)


def test_empty_file_and_no_items(remote, there, tmp_path):
    assert run(remote, []).files == 0
    run(remote, make(tmp_path / "src", {"empty": b""}))
    assert (there / "data/empty").read_bytes() == b""


def test_an_interrupted_file_goes_on_where_it_stopped(remote, there, tmp_path, ssh_server):
    data = os.urandom(8 << 20)
    items = make(tmp_path / "src", {"big": data})
    seen, agents = [], []

    def cut(host, done, total, file):
        seen.append((host, total, file))
        if done > 5 << 20:
            agents.extend(psutil.Process(ssh_server.process.pid).children(recursive=True))
            wait_until(lambda: any(part.stat().st_size > 2 << 20 for part in (there / ".sync").glob("*.part")))
            remote._transport.close()

    with pytest.raises(HostError):
        run(remote, items, progress=cut)
    assert seen[0] == ("127.0.0.1", 8 << 20, "data/big")
    assert not (there / "data/big").exists()
    psutil.wait_procs(agents, timeout=20)  # its part is left to others once it has ended
    with Remote.connect(ssh_server.host) as again:
        report = run(again, items)
    assert 0 < report.bytes < 8 << 20
    assert (there / "data/big").read_bytes() == data


def test_a_damaged_part_is_thrown_away_and_sent_again(remote, there, tmp_path):
    data = os.urandom(100_000)
    items = make(tmp_path / "src", {"big": data})
    digest = subprocess.run(["sha256sum", tmp_path / "src/big"], capture_output=True, text=True).stdout.split()[0]
    (there / ".sync").mkdir(parents=True)
    (there / ".sync" / f"{digest}.part").write_bytes(b"?" * 50_000)
    assert run(remote, items).bytes == 150_000
    assert (there / "data/big").read_bytes() == data


def test_a_file_that_changes_while_others_are_sent_is_refused(remote, there, tmp_path):
    items = make(tmp_path / "src", {name: os.urandom(900_000) for name in "abc"})

    def change(host, done, total, file):
        (tmp_path / "src/c").write_bytes(os.urandom(900_000))

    with pytest.raises(HostError, match="arrived damaged twice"):
        run(remote, items, progress=change)
    assert (there / "data/a").read_bytes() == (tmp_path / "src/a").read_bytes()
    assert not (there / "data/c").exists()
    assert not list((there / ".sync").glob("*.part"))


def test_small_files_travel_together(remote, there, tmp_path, monkeypatch):
    contents = {f"{number}.wav": os.urandom(number) for number in range(300)}
    operations = []

    def counted(machine, op, **request):
        operations.append(op)
        return agent_call(machine, op, **request)

    monkeypatch.setattr(sync_module, "agent_call", counted)
    assert run(remote, make(tmp_path / "src", contents)).files == 300
    assert operations == ["check", "commit"]
    assert {path.name: path.read_bytes() for path in (there / "data").iterdir()} == contents


def test_where_the_link_is_cut_the_whole_files_are_kept_and_the_rest_goes_on_later(remote, there):
    cut, arrived = os.urandom(3 << 20), 2 << 20
    contents = (b"whole", cut, b"never sent")
    digests = [hashlib.sha256(content).hexdigest() for content in contents]
    names = ("data/whole", "data/cut", "data/never")
    files = [[name, len(content), digest] for name, content, digest in zip(names, contents, digests, strict=True)]
    request = {"root": str(there), "files": files, "stale": []}
    parts = [[digest, 0, size] for _, size, digest in files]
    answer = agent_call(remote, "commit", parts=parts, payload=[b"whole" + cut[:arrived]], **request)
    assert answer == {"damaged": ["data/cut", "data/never"]}
    assert (there / "data/whole").read_bytes() == b"whole"
    assert [part.name.split(".")[0] for part in (there / ".sync").glob("*.part")] == [digests[1]]
    wanted = [[*file, False] for file in files]
    assert agent_call(remote, "check", root=str(there), files=wanted, prune=[], master=["id", "mac"])["missing"] == [
        [1, arrived],
        [2, 0],
    ]
    parts = [[digests[1], arrived, len(cut) - arrived], [digests[2], 0, 10]]
    rest = [cut[arrived:] + b"never sent"]
    assert agent_call(remote, "commit", parts=parts, payload=rest, **request) == {"damaged": []}
    assert (there / "data/cut").read_bytes() == cut
    assert (there / "data/never").read_bytes() == b"never sent"


def test_a_small_part_is_not_kept(remote, there):
    digest = hashlib.sha256(b"1" * 1000).hexdigest()
    request = {"root": str(there), "files": [["data/clip", 1000, digest]], "stale": [], "parts": [[digest, 0, 1000]]}
    assert agent_call(remote, "commit", payload=[b"1" * 999], **request) == {"damaged": ["data/clip"]}
    assert not list((there / ".sync").glob("*.part"))


def test_a_part_that_nobody_goes_on_with_is_removed_after_some_days(remote, there):
    folder = there / ".sync"
    folder.mkdir(parents=True)
    for name, age in (("new", 2 * 24 * 3600), ("old", 4 * 24 * 3600)):
        (folder / f"{name}.part").touch()
        os.utime(folder / f"{name}.part", (time.time() - age,) * 2)
    run(remote, [])
    assert [part.name for part in folder.glob("*.part")] == ["new.part"]


@contextlib.contextmanager
def falling_asleep(ssh_server):
    """Its sessions are suspended, once, by the function that this gives."""
    asleep: list[psutil.Process] = []

    def fall_asleep() -> None:
        if not asleep:
            asleep.extend(psutil.Process(ssh_server.process.pid).children(recursive=True))
            for child in asleep:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                    child.suspend()

    begin = time.monotonic()
    yield fall_asleep
    assert time.monotonic() - begin < 20
    for child in asleep:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.resume()


def test_a_host_that_takes_nothing_more_is_given_up(remote, tmp_path, ssh_server, monkeypatch):
    """It has fallen asleep, or its cable is out: TCP itself would wait for a quarter of an hour."""
    monkeypatch.setattr(process, "STALLED_S", 1.0)
    items = make(tmp_path / "src", {"big": bytes(30 << 20)})
    with (
        falling_asleep(ssh_server) as fall_asleep,
        pytest.raises(HostError, match="has taken no data for 1 s") as caught,
    ):
        run(remote, items, progress=lambda host, done, *_: done and fall_asleep())
    assert "/bin/sh" not in str(caught.value)
    assert "the next sync continues" in str(caught.value)


def test_a_host_that_takes_nothing_more_is_given_up_where_the_socket_is_full_before_the_window(
    remote, tmp_path, ssh_server, monkeypatch
):
    monkeypatch.setattr(process, "STALLED_S", 1.0)
    open_channel = remote._open

    def opened(line, **options):
        channel = open_channel(line, **options)
        channel.out_window_size = 1 << 30
        return channel

    monkeypatch.setattr(remote, "_open", opened)
    items = make(tmp_path / "src", {"big": bytes(30 << 20)})
    with falling_asleep(ssh_server) as fall_asleep, pytest.raises(HostError, match="the connection was lost during"):
        run(remote, items, progress=lambda host, done, *_: done and fall_asleep())


def test_a_host_that_falls_asleep_after_the_last_byte_is_given_up(remote, tmp_path, ssh_server, monkeypatch):
    monkeypatch.setattr(agent_call_module, "ANSWER_S", 1.0)
    items = make(tmp_path / "src", {"big": bytes(1 << 20)})
    with falling_asleep(ssh_server) as fall_asleep, pytest.raises(HostError, match="did not end within 1 s"):
        run(remote, items, progress=lambda host, done, total, _: done == total and fall_asleep())


def test_what_progress_raises_ends_the_sync(remote, tmp_path):
    def progress(host, done, *_):
        if done:
            raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller"):
        run(remote, make(tmp_path / "src", {"big": bytes(1 << 20)}), progress=progress)


def test_a_file_that_is_moved_while_it_is_sent_arrives(remote, there, tmp_path):
    items = make(tmp_path / "src", {"big": b"1" * 2_000_000})
    run(remote, items, progress=lambda host, done, *_: done and (tmp_path / "src/big").unlink(missing_ok=True))
    assert (there / "data/big").read_bytes() == b"1" * 2_000_000


def test_a_file_that_is_moved_before_it_is_sent_is_named(remote, tmp_path, monkeypatch):
    items = make(tmp_path / "src", {"a": b"1"})
    check = sync_module._HostSync.check

    def check_and_move(self):
        state = check(self)
        (tmp_path / "src/a").unlink()
        return state

    monkeypatch.setattr(sync_module._HostSync, "check", check_and_move)
    with pytest.raises(DataError, match="src/a: cannot be read"):
        run(remote, items)


def test_stale_code_is_removed_but_nothing_of_others(remote, there, tmp_path):
    items = make(tmp_path / "src", {"pkg/old.py": b"old", "pkg/new.py": b"new", "other/x": b"x"})
    run(remote, items)
    (there / "data/pkg/mine.py").write_text("the user's own")
    (there / "data/pkg/__pycache__").mkdir()
    (there / "data/pkg/__pycache__/old.cpython-311.pyc").write_text("")
    assert run(remote, items[1:2], prune=["data/pkg"]).removed == 1
    assert sorted(path.name for path in (there / "data/pkg").iterdir()) == ["mine.py", "new.py"]
    assert (there / "data/other/x").exists()


def test_what_version_0_1_sent_and_this_one_does_not_is_removed(remote, there, tmp_path):
    names = ("cli_typer.py", "pyproject.toml", "multimac/view/console.py", "distributed/post.py", "config.ini")
    old = [
        replace(item, remote=item.remote.removeprefix("data/")) for item in make(tmp_path, dict.fromkeys(names, b""))
    ]
    run(remote, old)
    (there / "wizard.py").write_text("the user's own")
    (there / "multimac/view/mine.py").write_text("the user's own")
    report = run(remote, make(tmp_path / "new", {"x": b"1"}), prune=PRUNED)
    assert report.removed == 4
    left = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    assert {name for name in left if not name.startswith(".sync/")} == {
        "wizard.py",
        "multimac/view/mine.py",
        "config.ini",
        "data/x",
    }
    assert not (there / "distributed").exists()


def test_a_folder_with_somebody_elses_code_is_refused(remote, there, tmp_path):
    items = [replace(item, refuse_foreign=True) for item in make(tmp_path / "src", {"a.py": b"ours", "b.py": b"same"})]
    (there / "data").mkdir(parents=True)
    (there / "data/a.py").write_bytes(b"unsaved work")
    (there / "data/b.py").write_bytes(b"same")
    with pytest.raises(HostError, match=r"holds 1 file that no sync put there.*data/a\.py") as caught:
        run(remote, items)
    assert "project_path" in str(caught.value)
    assert (there / "data/a.py").read_bytes() == b"unsaved work"
    (there / "data/a.py").unlink()
    run(remote, items)
    (tmp_path / "src/b.py").write_bytes(b"newer")
    run(remote, items)
    assert (there / "data/b.py").read_bytes() == b"newer"


def test_what_a_checkout_has_of_its_own_is_never_replaced_or_removed(remote, there, tmp_path):
    """Also if it was the same at first: its owner goes on working there."""
    items = [replace(item, refuse_foreign=True) for item in make(tmp_path / "src", {"a.py": b"same", "b.py": b"same"})]
    make(there / "data", {"a.py": b"same", "b.py": b"same", "../cli_typer.py": b""})
    run(remote, items)
    (there / "data/a.py").write_bytes(b"changed by its owner")
    with pytest.raises(HostError, match=r"holds 1 file that no sync put there, and that differ: data/a\.py"):
        run(remote, items)
    run(remote, items[1:], prune=["data"])
    assert (there / "data/a.py").read_bytes() == b"changed by its owner"


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "", "a//b", "./a", "a/.", ".sync/x", "a\0b"])
def test_names_outside_the_project_are_refused(tmp_path, name):
    with pytest.raises(DataError, match="not a name below"):
        checked([SyncItem(local=tmp_path / "x", remote=name)])


def test_a_name_outside_the_project_is_refused_before_anything_is_sent(remote, there, tmp_path):
    (tmp_path / "x").write_text("x")
    with pytest.raises(DataError, match="not a name below"):
        run(remote, [SyncItem(local=tmp_path / "x", remote="../x")])


def test_two_files_for_one_name_and_missing_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="two files for 'a'"):
        checked([SyncItem(local=tmp_path / name, remote="a") for name in "xy"])
    with pytest.raises(DataError, match="none: cannot be read"):
        hashed_files([SyncItem(local=tmp_path / "none", remote="a")], tmp_path / "index.json")


def test_full_disk_is_seen_before_anything_is_sent(remote, tmp_path, monkeypatch, there):
    items = make(tmp_path / "src", {"a": b"1"})
    monkeypatch.setattr(sync_module, "SPARE_BYTES", 1 << 60)
    with pytest.raises(HostError, match=r"MB are free for") as caught:
        run(remote, items)
    assert "project_path" in str(caught.value)
    assert not list((there / ".sync").glob("*.part"))


@contextlib.contextmanager
def small_disk(folder: Path):
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounting a small disk needs root on Linux")
def test_disk_that_fills_up_meanwhile(remote, there, tmp_path, monkeypatch):
    items = make(tmp_path / "src", {"big": os.urandom(3 << 20)})
    monkeypatch.setattr(sync_module, "SPARE_BYTES", -(1 << 40))
    with small_disk(there):
        with pytest.raises(HostError, match="disk is full") as caught:
            run(remote, items)
        assert str(there) in str(caught.value)


def test_all_hosts_are_finished_before_an_error_is_raised(remote, ssh_server, tmp_path):
    (tmp_path / "file").write_text("")
    items = make(tmp_path / "src", {"a": b"1"})
    bad = Remote.connect(replace(ssh_server.host, project_path=str(tmp_path / "file" / "x")))
    bad.name = "bad"
    with pytest.raises(HostError, match=r"bad: .*Not a directory"):
        sync([bad, remote], {"bad": items, remote.name: items})
    bad.close()
    assert Path(ssh_server.host.project_path, "data/a").exists()


def test_local_hashes_are_remembered(remote, tmp_path, monkeypatch):
    items = make(tmp_path / "src", {"a": b"1"})
    run(remote, items)

    def never(*_):
        raise AssertionError("hashed again")

    monkeypatch.setattr(hashlib, "file_digest", never)
    assert run(remote, items).files == 0


def test_code_of_this_project():
    names = [item.remote for item in code_items()]
    assert "distributed/hosts/sync.py" in names
    assert "whisper_tuner/errors.py" in names
    assert "gym/exogym/trainer.py" in names
    assert {name.split("/")[0] for name in names} == {"distributed", "gym", "whisper_tuner"}
    assert not [name for name in names if "__pycache__" in name or not name.endswith((".py", "py.typed"))]
    assert all(name.startswith(tuple(PACKAGES.values())) for name in names)


def test_folder_items_skips_hidden_files_and_a_trainers_and_follows_links(tmp_path):
    make(tmp_path / "model", {"a/b": b"1", ".git/c": b"2", ".hidden": b"3"})
    make(tmp_path / "model", {"optimizer.pt": b"1", "rng_state_0.pth": b"2", "checkpoint-20/model.safetensors": b"3"})
    (tmp_path / "model" / "link").symlink_to(tmp_path / "model" / "a" / "b")
    assert [item.remote for item in folder_items(tmp_path / "model", "m")] == ["m/a/b", "m/link"]
    with pytest.raises(DataError, match="no such folder"):
        folder_items(tmp_path / "none", "m")
