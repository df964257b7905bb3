import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from exogym import Checkpoints
from exogym.state import checkpoint as files

FULL_SYNC = 51  # F_FULLFSYNC on macOS


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, str]]:
    """What the system is asked for, in order, with names of files and folders."""
    made: list[tuple[str, str]] = []
    fsync, replace = os.fsync, Path.replace

    def note_sync(descriptor):
        made.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def note_rename(part, path):
        made.append(("rename", path.name))
        return replace(part, path)

    monkeypatch.setattr(files.os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_rename)
    return made


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="descriptors are named in /proc")


@needs_proc
def test_content_first_then_names_then_the_folder(tmp_path, calls):
    renames = [(tmp_path / f"{name}.part", tmp_path / name) for name in "ab"]
    for part, _ in renames:
        part.write_text("new")
    files.rename_durably(*renames)
    synced = [("fsync", "a.part"), ("fsync", "b.part")]
    assert calls == [*synced, ("rename", "a"), ("rename", "b"), ("fsync", tmp_path.name)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@needs_proc
def test_a_checkpoint_and_the_folder_that_it_is_in_survive_a_power_cut(tmp_path, calls):
    Checkpoints(tmp_path / "kept", "rank0").save(4, {"steps": 1})
    synced = [("fsync", "rank0.safetensors.part"), ("fsync", "rank0.json.part")]
    renamed = [("rename", "rank0.safetensors"), ("rename", "rank0.json")]
    assert calls == [*synced, *renamed, ("fsync", "0000004"), ("fsync", "kept"), ("fsync", tmp_path.name)]


@pytest.mark.parametrize("works", [True, False])
def test_on_macos_the_drives_own_cache_is_emptied_too(tmp_path, monkeypatch, works):
    """Where the file system cannot do that, as some network drives, an ordinary sync has to do."""
    asked = []

    def fcntl(descriptor, command):
        asked.append(command)
        if not works:
            raise OSError("Operation not supported")

    monkeypatch.setattr(files.sys, "platform", "darwin")
    monkeypatch.setattr(files, "fcntl", SimpleNamespace(fcntl=fcntl, F_FULLFSYNC=FULL_SYNC), raising=False)
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: asked.append("fsync"))
    (tmp_path / "a").touch()
    files.sync(tmp_path / "a")
    assert asked == ([FULL_SYNC] if works else [FULL_SYNC, "fsync"])
