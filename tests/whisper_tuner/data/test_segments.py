import errno
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from whisper_tuner.data import segments
from whisper_tuner.data.segments import Segments, hash_of

PROJECT = Path(__file__).parents[3]
WRITER = """
import sys
from pathlib import Path
from whisper_tuner.data.segments import Segments, hash_of
store, first = Segments(Path(sys.argv[1]), sys.exit), int(sys.argv[2])
print("ready", flush=True)
for number in range(first, int(sys.argv[3])):
    while hash_of(b"%d" % number) not in store:  # another process may hold the segment that this one has made
        store.put(hash_of(b"%d" % number), b"%d " % number * (1000 + number))
"""


def key(number: int) -> bytes:
    return hash_of(b"%d" % number)


def value(number: int) -> bytes:
    return b"%d " % number * (1000 + number)


def filled(directory: Path, count: int) -> Segments:
    store = Segments(directory)
    for number in range(count):
        store.put(key(number), value(number))
    return store


def files(directory: Path, kind: str) -> list[Path]:
    return sorted(directory.glob(f"*.{kind}"))


def writer(directory: Path, first: int, last: int, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(directory), str(first), str(last)]
    return subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, **options)


def test_values_come_back_also_in_another_process(tmp_path):
    store = filled(tmp_path, 3)
    for reader in (store, Segments(tmp_path)):
        assert [reader.get(key(number)) for number in range(4)] == [value(0), value(1), value(2), None]
        assert key(2) in reader and key(3) not in reader
    assert len(files(tmp_path, "data")) == len(files(tmp_path, "index")) == 1


def test_what_others_add_is_seen_and_not_added_again(tmp_path):
    one, other = Segments(tmp_path), Segments(tmp_path)
    assert other.get(key(1)) is None
    one.put(key(1), value(1))
    other.put(key(1), value(1))
    assert other.get(key(1)) == value(1)
    assert files(tmp_path, "data")[0].stat().st_size == len(value(1))


def test_several_processes_write_at_once(tmp_path):
    """What two add at the same moment is there twice, and harms nobody."""
    writers = [writer(tmp_path, first, first + 200) for first in (0, 100, 200, 100)]
    assert [one.wait() for one in writers] == [0] * 4
    store = Segments(tmp_path)
    assert all(store.get(key(number)) == value(number) for number in range(400))
    assert len(files(tmp_path, "data")) <= 4


@pytest.mark.parametrize("seed", range(2))
def test_a_process_killed_while_it_writes_costs_its_last_value_at_most(tmp_path, seed):
    for attempt in range(3):
        with writer(tmp_path, attempt * 1000, 100_000) as process:
            process.stdout.readline()
            time.sleep(random.Random(10 * seed + attempt).uniform(0.005, 0.1))
            process.send_signal(signal.SIGKILL)
    store = Segments(tmp_path)
    there = [number for number in range(3000) if key(number) in store]
    assert there and all(store.get(key(number)) == value(number) for number in there)
    filled(tmp_path, 10)
    assert all(Segments(tmp_path).get(key(number)) == value(number) for number in [*there, *range(10)])


def test_half_a_record_is_written_over(tmp_path):
    filled(tmp_path, 2)
    (index,) = files(tmp_path, "index")
    with index.open("ab") as file:
        file.write(index.read_bytes()[:30])
    store = filled(tmp_path, 3)
    assert [Segments(tmp_path).get(key(number)) for number in range(3)] == [value(0), value(1), value(2)]
    assert index.stat().st_size == 3 * 56 and key(2) in store


def test_a_frozen_writer_holds_up_nobody(tmp_path):
    with writer(tmp_path, 0, 100_000) as process:
        process.stdout.readline()
        try:
            for _ in range(20):  # sooner or later while it has a lock
                time.sleep(0.01)
                process.send_signal(signal.SIGSTOP)
                filled(tmp_path, 5)
                process.send_signal(signal.SIGCONT)
        finally:
            process.kill()
    assert Segments(tmp_path).get(key(4)) == value(4)
    assert len(files(tmp_path, "data")) <= 2


@pytest.mark.parametrize("kind", ["data", "index"])
@pytest.mark.parametrize("damage", [lambda raw: b"", lambda raw: raw[: len(raw) // 2], lambda raw: b"\0" * len(raw)])
def test_what_is_damaged_is_not_there_and_can_be_added_again(tmp_path, kind, damage):
    filled(tmp_path, 4)
    (path,) = files(tmp_path, kind)
    path.write_bytes(damage(path.read_bytes()))
    store = Segments(tmp_path)
    assert None in (found := [store.get(key(number)) for number in range(4)])
    assert all(one in (None, value(number)) for number, one in enumerate(found))
    for reader in (filled(tmp_path, 4), store, Segments(tmp_path)):
        assert [reader.get(key(number)) for number in range(4)] == [value(number) for number in range(4)]


@pytest.mark.parametrize("lost", ["data", "index"])
def test_a_lost_file_loses_its_values_only(tmp_path, lost):
    filled(tmp_path, 2)
    (path,) = files(tmp_path, lost)
    path.unlink()
    store = Segments(tmp_path)
    assert store.get(key(0)) is store.get(key(1)) is None
    filled(tmp_path, 2)
    assert store.get(key(1)) == Segments(tmp_path).get(key(1)) == value(1)


def test_a_deleted_folder_is_made_again(tmp_path):
    store = filled(tmp_path / "store", 2)
    shutil.rmtree(tmp_path / "store")
    assert store.get(key(0)) is None
    store.put(key(0), value(0))
    assert store.get(key(0)) == Segments(tmp_path / "store").get(key(0)) == value(0)


def test_values_are_compared_with_their_hashes_once(tmp_path, monkeypatch):
    filled(tmp_path, 1)
    store, hashed = Segments(tmp_path), []
    monkeypatch.setattr(segments, "hash_of", lambda data: hashed.append(data) or hash_of(data))
    assert [store.get(key(0)) for _ in range(3)] == [value(0)] * 3
    assert hashed.count(value(0)) == 1


def test_without_locks_each_process_writes_to_a_segment_of_its_own(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    filled(tmp_path, 1)
    monkeypatch.setattr(segments.fcntl, "flock", refuse)
    one, other = filled(tmp_path, 4), filled(tmp_path, 6)
    assert len(files(tmp_path, "data")) == 3
    assert [reader.get(key(5)) for reader in (one, other, Segments(tmp_path))] == [value(5)] * 3


def test_a_full_segment_is_followed_by_another(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FULL_BYTES", 3000)
    assert filled(tmp_path, 5).get(key(4)) == Segments(tmp_path).get(key(4)) == value(4)
    assert len(files(tmp_path, "data")) == 3


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "._0a1b.data").write_bytes(b"x")
    (tmp_path / "._0a1b.index").write_bytes(b"x" * 200)
    assert filled(tmp_path, 2).get(key(1)) == value(1)
    assert (tmp_path / "._0a1b.data").read_bytes() == b"x"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("kind", ["data", "index"])
def test_a_full_disk_is_told_and_leaves_nothing_behind(tmp_path, kind):
    filled(tmp_path, 1)
    (full,), (other,) = files(tmp_path, kind), files(tmp_path, {"data": "index", "index": "data"}[kind])
    kept, size = full.read_bytes(), other.stat().st_size
    full.unlink()
    full.symlink_to("/dev/full")
    said = []
    store = Segments(tmp_path, said.append)
    for number in (1, 2):
        store.put(key(number), value(number))
    assert said == ["No space left on device"] and not store.is_writable
    full.unlink()
    full.write_bytes(kept)
    store = Segments(tmp_path)
    assert other.stat().st_size == size
    assert store.get(key(0)) == value(0) and store.get(key(1)) is None


@pytest.mark.skipif(sys.platform == "darwin", reason="a file that is too large ends the process there")
def test_half_a_value_is_taken_back_when_the_disk_is_full(tmp_path):
    """The largest size of a file ends the third value in its middle."""
    most = len(value(0) + value(1)) + 100
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))  # noqa: E731
    with writer(tmp_path, 0, 3, preexec_fn=limit, stderr=subprocess.PIPE) as process:
        assert b"File too large" in process.communicate()[1]
    (data,) = files(tmp_path, "data")
    assert data.stat().st_size == len(value(0) + value(1))
    assert [filled(tmp_path, 3).get(key(number)) for number in range(3)] == [value(0), value(1), value(2)]
