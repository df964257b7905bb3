"""Facts come back as they were, or not at all, whatever happens to their file."""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from whisper_tuner import fact_store
from whisper_tuner.fact_store import FactStore

PROJECT = Path(__file__).parents[2]
WRITER = """
import sys
from pathlib import Path
from whisper_tuner.fact_store import FactStore
store, first = FactStore(Path(sys.argv[1])), int(sys.argv[2])
print("ready", flush=True)
for number in range(first, int(sys.argv[3])):
    store.keep("number", {str(number): ""}, {str(number): [number] * 500})
"""


def writer(cache: Path, first: int, last: int) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(cache), str(first), str(last)]
    return subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE)


def numbers(cache: Path, every: range) -> dict[str, list[int]]:
    return FactStore(cache).known("number", {str(number): "" for number in every})


def test_values_are_known_by_kind_name_and_stamp(tmp_path):
    store = FactStore(tmp_path / "cache")
    assert store.known("length", {"a": "1"}) == {} and not store.file.exists()
    odd = "b\udcff\n"  # a name on Linux that is no text
    store.keep("length", {"a": "1", odd: "2"}, {"a": 1.5, odd: ["é", None]})
    again = FactStore(tmp_path / "cache")
    assert again.known("length", {"a": "1", odd: "2", "c": "1"}) == {"a": 1.5, odd: ["é", None]}
    assert again.known("length", {"a": "2"}) == again.known("other", {"a": "1"}) == {}
    again.keep("length", {"a": "2"}, {"a": 3})
    assert store.known("length", {"a": "2", odd: "2"}) == {"a": 3, odd: ["é", None]}
    assert store.known("length", {"a": "1"}) == {}
    assert store.file.stat().st_mode & 0o777 == 0o600 and [*tmp_path.glob("cache/*")] == [store.file]


def test_several_processes_write_at_once(tmp_path):
    writers = [writer(tmp_path, first, first + 60) for first in (0, 30, 60)]
    assert [one.wait() for one in writers] == [0] * 3
    assert numbers(tmp_path, range(120)) == {str(number): [number] * 500 for number in range(120)}


def test_a_process_killed_while_it_writes_costs_its_last_value_at_most(tmp_path):
    for attempt in range(4):
        with writer(tmp_path, attempt * 1000, 100_000) as process:
            process.stdout.readline()
            time.sleep(random.Random(attempt).uniform(0.005, 0.1))
            process.send_signal(signal.SIGKILL)
    found = numbers(tmp_path, range(6000))
    assert found and all(value == [int(name)] * 500 for name, value in found.items())
    FactStore(tmp_path).keep("number", {"7": ""}, {"7": 8})
    assert numbers(tmp_path, range(6000)) == found | {"7": 8}


def test_a_changed_value_is_unknown(tmp_path):
    store = FactStore(tmp_path)
    store.keep("text", {"a": "", "b": ""}, {"a": "fr", "b": "fr"})
    with sqlite3.connect(store.file) as database:
        database.execute("UPDATE facts SET value = ? WHERE name = ?", (b'"en"', b"a"))
    assert store.known("text", {"a": "", "b": ""}) == {"b": "fr"}


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"SQLite format 3\0" + bytes(5000), "half", "other tables"])
def test_a_damaged_file_is_made_anew(tmp_path, content):
    store = FactStore(tmp_path)
    names = {str(number): "" for number in range(200)}
    store.keep("text", names, dict.fromkeys(names, "x" * 200))
    if content == "other tables":
        store.file.unlink()
        with sqlite3.connect(store.file) as database:
            database.execute("CREATE TABLE facts (x)")
    else:
        store.file.write_bytes(store.file.read_bytes()[:9000] if content == "half" else content)
    assert set(store.known("text", names).values()) <= {"x" * 200}
    store.keep("text", {"a": ""}, {"a": 1})
    assert store.known("text", {"a": ""}) == {"a": 1}


def test_where_nothing_can_be_kept_it_is_said_once(tmp_path, caplog):
    (tmp_path / "cache").write_text("a file is in the way")
    for _ in range(2):
        store = FactStore(tmp_path / "cache")
        store.keep("text", {"a": ""}, {"a": 1})
        assert store.known("text", {"a": ""}) == {}
    [said] = caplog.messages
    assert str(store.file) in said and "slower" in said


@pytest.mark.parametrize("name", ["SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR_WRITE"])
def test_on_a_full_disk_what_is_there_stays(tmp_path, caplog, monkeypatch, name):
    store = FactStore(tmp_path)
    store.keep("text", {"a": ""}, {"a": 1})

    def full(*_):
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorname = name
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(fact_store, "_digest", full)
        store.keep("text", {"b": ""}, {"b": 1})
    assert len(caplog.messages) == 1 and "disk is full" in caplog.text
    monkeypatch.setattr(fact_store, "UNUSABLE", set())
    assert store.known("text", {"a": "", "b": ""}) == {"a": 1}


def test_a_python_without_sqlite_goes_without(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    for _ in range(2):
        FactStore(tmp_path).keep("text", {"a": ""}, {"a": 1})
    assert not list(tmp_path.iterdir()) and "no sqlite3" in caplog.messages[0] and len(caplog.messages) == 1


def test_a_frozen_process_holds_up_nobody_for_long(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(fact_store, "LOCKED_S", 0.2)
    store = FactStore(tmp_path)
    store.keep("text", {"a": ""}, {"a": 1})
    with sqlite3.connect(store.file, isolation_level=None) as database:
        database.execute("BEGIN EXCLUSIVE")
        began = time.monotonic()
        for _ in range(5):
            store.keep("text", {"b": ""}, {"b": 1})
        assert time.monotonic() - began < 2 and "locked" in caplog.text
    monkeypatch.setattr(fact_store, "UNUSABLE", set())
    assert store.known("text", {"a": "", "b": ""}) == {"a": 1}


def test_the_older_half_goes_once_there_is_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(fact_store, "MOST_BYTES", 200_000)
    store = FactStore(tmp_path)
    names = {str(number): "" for number in range(60)}
    for name in names:
        store.keep("text", names, {name: "x" * 10_000})
    found = store.known("text", names)
    assert 5 < len(found) < 25 and "59" in found and "0" not in found
    assert store.file.stat().st_size < 400_000


def test_a_write_that_fails_does_not_end_what_can_be_read(tmp_path, monkeypatch):
    store = FactStore(tmp_path)
    store.keep("kind", {"a": "1"}, {"a": "known"})
    monkeypatch.setattr(fact_store, "UNUSABLE", {(store.file, True)})
    store.keep("kind", {"b": "1"}, {"b": "not kept"})
    assert store.known("kind", {"a": "1", "b": "1"}) == {"a": "known"}


def test_a_file_that_is_removed_while_it_is_used_is_made_anew_the_next_time(tmp_path):
    class Removes(dict):
        def items(self):
            shutil.rmtree(store.file.parent, ignore_errors=True)
            return super().items()

    store = FactStore(tmp_path / "cache")
    store.keep("kind", {"a": "1"}, {"a": "known"})
    store.keep("kind", {"b": "1"}, Removes(b="lost"))
    store.keep("kind", {"c": "1"}, {"c": "kept"})
    assert store.known("kind", {"a": "1", "b": "1", "c": "1"}) == {"c": "kept"}
