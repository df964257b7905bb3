"""What must be on the disk before a name may point to it."""

import fcntl
import os
import stat
from pathlib import Path

import pytest

from whisper_tuner.files import write_atomically


@pytest.fixture
def done(monkeypatch) -> list[str]:
    """Which calls were made on the way, in order."""
    found: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def watched_fsync(handle: int) -> None:
        found.append("sync folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "sync file")
        fsync(handle)

    def watched_replace(path: Path, target: Path) -> None:
        found.append("replace")
        replace(path, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    return found


def test_a_power_cut_finds_the_old_file_or_the_new_one(done, tmp_path, monkeypatch):
    monkeypatch.delattr(fcntl, "F_FULLFSYNC", raising=False)
    write_atomically(tmp_path / "a", "text")
    assert done == ["sync file", "replace", "sync folder"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_on_a_mac_the_drive_empties_its_own_cache(done, tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda handle, command: done.append(f"fcntl {command}"))
    write_atomically(tmp_path / "a", "text")
    assert done == ["fcntl 51", "replace", "sync folder"]


def test_a_disk_in_the_network_is_synced_as_it_can(done, tmp_path, monkeypatch):
    def refuse(handle, command):
        raise OSError(45, "Operation not supported")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    write_atomically(tmp_path / "a", "text")
    assert done == ["sync file", "replace", "sync folder"]
