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

from whisper_tuner.data import kept_values
from whisper_tuner.data.kept_values import KeptValues
from whisper_tuner.files import hash_of

PROJECT = Path(__file__).parents[3]
WRITER = """
import sys
from pathlib import Path
from whisper_tuner.data.kept_values import KeptValues
from whisper_tuner.files import hash_of
store, first = KeptValues(Path(sys.argv[1]), sys.exit), int(sys.argv[2])
print("ready", flush=True)
for number in range(first, int(sys.argv[3])):
    store.put(hash_of(b"%d" % number), b"%d " % number * (1000 + number))
"""


def key(number: int) -> bytes:
    return hash_of(b"%d" % number)


def value(number: int) -> bytes:
    return b"%d " % number * (1000 + number)


def filled(directory: Path, count: int) -> KeptValues:
    store = KeptValues(directory)
    for number in range(count):
        store.put(key(number), value(number))
    return store


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def writer(directory: Path, first: int, last: int, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(directory), str(first), str(last)]
    return subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, **options)


def test_values_come_back_also_in_another_process(tmp_path):
    store = filled(tmp_path, 3)
    for reader in (store, KeptValues(tmp_path)):
        assert [reader.get(key(number)) for number in range(4)] == [value(0), value(1), value(2), None]
        assert key(2) in reader and key(3) not in reader


def test_what_others_add_is_seen_and_not_added_again(tmp_path):
    one, other = KeptValues(tmp_path), KeptValues(tmp_path)
    assert other.get(key(1)) is None
    one.put(key(1), value(1))
    [file] = files(tmp_path)
    before = file.stat()
    other.put(key(1), value(1))
    assert other.get(key(1)) == value(1)
    assert files(tmp_path) == [file] and file.stat() == before


def test_several_processes_write_at_once(tmp_path):
    writers = [writer(tmp_path, first, first + 200) for first in (0, 100, 200, 100)]
    assert [one.wait() for one in writers] == [0] * 4
    store = KeptValues(tmp_path)
    assert all(store.get(key(number)) == value(number) for number in range(400))
    assert len(files(tmp_path)) == 400


@pytest.mark.parametrize("seed", range(2))
def test_a_process_killed_while_it_writes_costs_its_last_value_at_most(tmp_path, seed):
    for attempt in range(3):
        with writer(tmp_path, attempt * 1000, 100_000) as process:
            process.stdout.readline()
            time.sleep(random.Random(10 * seed + attempt).uniform(0.005, 0.1))
            process.send_signal(signal.SIGKILL)
    store = KeptValues(tmp_path)
    there = [number for number in range(3000) if key(number) in store]
    assert there and all(store.get(key(number)) == value(number) for number in there)
    filled(tmp_path, 10)
    assert all(KeptValues(tmp_path).get(key(number)) == value(number) for number in [*there, *range(10)])


def test_a_frozen_writer_holds_up_nobody(tmp_path):
    with writer(tmp_path, 0, 100_000) as process:
        process.stdout.readline()
        try:
            for _ in range(20):  # sooner or later while it writes
                time.sleep(0.01)
                process.send_signal(signal.SIGSTOP)
                filled(tmp_path, 5)
                process.send_signal(signal.SIGCONT)
        finally:
            process.kill()
    assert KeptValues(tmp_path).get(key(4)) == value(4)


@pytest.mark.parametrize(
    "damage", [lambda raw: b"", lambda raw: raw[:10], lambda raw: raw[: len(raw) // 2], lambda raw: b"\0" * len(raw)]
)
def test_what_is_damaged_is_not_there_and_can_be_added_again(tmp_path, damage):
    filled(tmp_path, 4)
    path = files(tmp_path)[2]
    path.write_bytes(damage(path.read_bytes()))
    store = KeptValues(tmp_path)
    found = [store.get(key(number)) for number in range(4)]
    assert sum(one == value(number) for number, one in enumerate(found)) == 3 and None in found
    for reader in (filled(tmp_path, 4), store, KeptValues(tmp_path)):
        assert [reader.get(key(number)) for number in range(4)] == [value(number) for number in range(4)]


def test_a_value_that_becomes_shorter_while_it_is_used_is_not_there(tmp_path):
    store = filled(tmp_path, 1)
    assert store.get(key(0)) == value(0)
    [file] = files(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    assert store.get(key(0)) is None and key(0) not in store


def test_a_deleted_folder_is_made_again(tmp_path):
    store = filled(tmp_path / "store", 2)
    shutil.rmtree(tmp_path / "store")
    assert store.get(key(0)) is None
    store.put(key(0), value(0))
    assert store.get(key(0)) == KeptValues(tmp_path / "store").get(key(0)) == value(0)


def test_values_are_compared_with_their_hashes_once(tmp_path, monkeypatch):
    filled(tmp_path, 1)
    store, hashed = KeptValues(tmp_path), []
    monkeypatch.setattr(kept_values, "hash_of", lambda data: hashed.append(data) or hash_of(data))
    assert [store.get(key(0)) for _ in range(3)] == [value(0)] * 3
    assert hashed.count(value(0)) == 1


def test_a_full_disk_is_told_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    filled(tmp_path, 1)
    said = []
    store = KeptValues(tmp_path, said.append)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        for number in (1, 2):
            store.put(key(number), value(number))
    assert said == ["No space left on device"] and not store.is_writable
    assert len(files(tmp_path)) == 1
    assert store.get(key(0)) == value(0) and store.get(key(1)) is None


@pytest.mark.skipif(sys.platform == "darwin", reason="a file that is too large ends the process there")
def test_half_a_value_is_taken_back_when_the_disk_is_full(tmp_path):
    """The largest size of a file ends the third value in its middle."""
    most = len(value(1)) + 16
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))  # noqa: E731
    with writer(tmp_path, 0, 3, preexec_fn=limit, stderr=subprocess.PIPE) as process:
        assert b"File too large" in process.communicate()[1]
    assert len(files(tmp_path)) == 2
    assert [filled(tmp_path, 3).get(key(number)) for number in range(3)] == [value(0), value(1), value(2)]
