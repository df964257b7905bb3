"""The order in which a file gets to the disk, and what is left when something fails on the way."""

import csv
import errno
import fcntl
import hashlib
import io
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from distributed.hosts.agent.files import commit
from whisper_tuner import files
from whisper_tuner.data.cutting import write_flac
from whisper_tuner.data.dataset import Sample, write_manifest
from whisper_tuner.data.importing import import_source
from whisper_tuner.data.kept_values import KeptValues
from whisper_tuner.eval.long_clips import HeardPieces
from whisper_tuner.fact_store import FactStore
from whisper_tuner.files import (
    atomic_folder,
    atomic_path,
    like,
    read_table,
    write_atomically,
    write_shared,
    write_table,
)

F_FULLFSYNC = 51  # Linux's fcntl has none


@pytest.fixture
def calls(monkeypatch, tmp_path) -> list[tuple[str, str]]:
    """What was asked of the disk, as (call, name of the file); a temporary file has the name `part`."""
    made, opened = [], {}

    def name(path) -> str:
        path = Path(path)
        return "part" if path.name.startswith(".") or path.name.endswith(".part") else path.name

    def record(module, call: str, of):
        real = getattr(module, call)

        def recorded(*arguments, **named):
            made.append((call, of(*arguments)))
            return real(*arguments, **named)

        monkeypatch.setattr(module, call, recorded)

    real_open = os.open

    def open_(path, *arguments, **named):
        handle = real_open(path, *arguments, **named)
        opened[handle] = path
        return handle

    monkeypatch.setattr(os, "open", open_)
    record(os, "fsync", lambda handle: name(opened[handle]))
    record(Path, "replace", lambda _, target: name(target))
    record(Path, "rename", lambda _, target: name(target))
    monkeypatch.setattr(
        fcntl, "fcntl", lambda handle, command: made.append((f"fcntl {command}", name(opened[handle]))), raising=False
    )
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
    return made


def test_a_file_is_on_the_disk_before_its_name_and_the_name_before_anything_else(calls, tmp_path):
    write_atomically(tmp_path / "run.json", "{}")
    assert calls == [("fsync", "part"), ("replace", "run.json"), ("fsync", tmp_path.name)]


def test_a_mac_empties_the_memory_of_the_drive(calls, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    write_atomically(tmp_path / "run.json", "{}")
    full = f"fcntl {F_FULLFSYNC}"
    assert calls == [(full, "part"), ("replace", "run.json"), (full, tmp_path.name)]


def test_a_network_drive_on_a_mac_gets_an_ordinary_sync(calls, tmp_path, monkeypatch):
    def refuse(handle, command):
        calls.append(("refused", ""))
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    write_atomically(tmp_path / "run.json", "{}")
    refused = ("refused", "")
    assert calls == [refused, ("fsync", "part"), ("replace", "run.json"), refused, ("fsync", tmp_path.name)]


def test_a_cache_waits_for_no_disk(calls, tmp_path):
    write_atomically(tmp_path / "index.json", "{}", durable=False)
    assert calls == [("replace", "index.json")]


def test_a_folder_is_on_the_disk_with_all_that_is_in_it_before_it_gets_its_name(calls, tmp_path):
    with atomic_folder(tmp_path / "final") as part:
        (part / "deep").mkdir()
        (part / "deep" / "weights").write_text("1")
    assert calls == [
        ("fsync", "weights"),
        ("fsync", "deep"),
        ("fsync", "part"),
        ("rename", "final"),
        ("fsync", tmp_path.name),
    ]


def test_a_mac_empties_it_once_for_a_folder_of_many_files(calls, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with atomic_folder(tmp_path / "final") as part:
        for number in range(20):
            (part / str(number)).write_text("1")
    full = f"fcntl {F_FULLFSYNC}"
    assert calls[-3:] == [(full, "part"), ("rename", "final"), (full, tmp_path.name)]
    assert len(calls) == 23 and {call for call, _ in calls[:-3]} == {"fsync"}


def test_a_mac_empties_it_once_for_all_that_a_sync_has_brought(calls, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    digest = hashlib.sha256(b"1").hexdigest()
    names = [[f"{number}/{number}.wav", 1, digest] for number in range(20)]  # as many folders
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"1")))
    assert commit(str(tmp_path), names, [], [[digest, 0, 1]]) == {"damaged": []}
    full = [name for call, name in calls if call.startswith("fcntl")]
    assert full == ["part", "part"]  # the index, and its folder, whose name begins with a dot
    last = max(position for position, (call, _) in enumerate(calls) if call == "fsync")
    assert calls.index((f"fcntl {F_FULLFSYNC}", "part")) > last


def test_a_folder_that_syncs_no_folders_keeps_nothing_away(tmp_path, monkeypatch):
    real = os.fsync

    def fsync(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "a network drive")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(tmp_path / "run.json", "{}")
    assert (tmp_path / "run.json").read_text() == "{}"


def test_after_an_error_the_old_file_is_there_and_nothing_else(tmp_path):
    path = tmp_path / "run.json"
    write_atomically(path, "old")
    with pytest.raises(KeyboardInterrupt), atomic_path(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("run.json", "old")]


def test_a_full_disk_is_told_and_leaves_the_old_file(tmp_path, monkeypatch):
    write_atomically(tmp_path / "run.json", "old")

    def fsync(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "run.json", "new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("run.json", "old")]


def test_after_an_error_the_old_folder_is_there_and_nothing_else(tmp_path):
    final = tmp_path / "final"
    for text in ("1", "2"):
        with atomic_folder(final) as part:
            (part / "weights").write_text(text)
    with pytest.raises(OSError, match="full"), atomic_folder(final) as part:
        (part / "weights").write_text("3")
        raise OSError("full")
    assert list(tmp_path.iterdir()) == [final]
    assert (final / "weights").read_text() == "2"


def test_an_old_folder_stays_until_the_new_one_has_its_name(tmp_path):
    """As a power cut leaves it between the two renames: `.old` may be the only model that there is."""
    (tmp_path / "final.old").mkdir()
    (tmp_path / "final.old" / "weights").write_text("1")
    with pytest.raises(OSError, match="full"), atomic_folder(tmp_path / "final"):
        raise OSError("full")
    assert (tmp_path / "final.old" / "weights").read_text() == "1"
    with atomic_folder(tmp_path / "final"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_what_others_may_read_keeps_its_mode_and_its_link(tmp_path):
    write_atomically(tmp_path / "private", "1")
    write_shared(tmp_path / "shared", "1")
    (tmp_path / "shared").chmod(0o664)
    (tmp_path / "link").symlink_to("shared")
    write_shared(tmp_path / "link", "2")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "shared").read_text() == "2"
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("private", "shared")] == [0o600, 0o664]


def test_no_other_file_of_these_packages_renames_into_place():
    project = Path(files.__file__).parents[1]
    found = {
        path.relative_to(project).as_posix()
        for package in ("whisper_tuner", "distributed", "multimac")
        for path in (project / package).rglob("*.py")
        if any(word in path.read_text(encoding="utf-8") for word in ("os.replace(", "os.fsync(", "mkstemp("))
    }
    # The agent's parts arrive under names of their own; the self-test asks whether a disk can sync at all.
    found = {name for name in found if "/hosts/agent/" not in name and "/probes/" not in name}
    assert found == {"whisper_tuner/files.py"}


TEXTS = ["=HYPERLINK(1)", "+1", "-x", "@SUM(1)", "\tx", "\rx", "\n=x", "'=x", "''-x", "'tis", "a=b", "", "- yes", "é"]


def test_a_table_for_people_holds_no_formula_and_comes_back_as_it_was(tmp_path):
    write_table(tmp_path / "people.csv", ["id", "level"], [[text, -2.5] for text in TEXTS])
    with (tmp_path / "people.csv").open(newline="", encoding="utf-8") as file:
        shown = [row["id"] for row in csv.DictReader(file)]
    assert not [cell for cell in shown if cell[:1] in {*"=+-@\t\r\n"}] and shown[0] == "'=HYPERLINK(1)"
    with (tmp_path / "people.csv").open(newline="", encoding="utf-8") as file:
        assert list(read_table(file)) == [{"id": text, "level": "-2.5"} for text in TEXTS]


def test_a_list_that_is_read_back_holds_each_text_as_it_is(tmp_path):
    """Ids of videos begin with a dash, and so do the turns of a dialogue."""
    samples = [
        Sample(id=str(n), audio=tmp_path / f"{n}.wav", text=text, duration_s=1.0) for n, text in enumerate(TEXTS[:4])
    ]
    write_manifest(tmp_path / "train.csv", samples)
    write_table(tmp_path / "patches.csv", ("id", "text"), [[text, text] for text in TEXTS[:4]], exact=True)
    for name, column in (("train.csv", "transcription"), ("patches.csv", "text")):
        with (tmp_path / name).open(newline="", encoding="utf-8") as file:
            assert [row[column] for row in csv.DictReader(file)] == TEXTS[:4]


def test_what_is_kept_of_somebodys_speech_is_for_its_owner_alone(tmp_path):
    """With the umask that most systems have, which lets all others read."""
    before = os.umask(0o022)
    try:
        write_manifest(tmp_path / "train.csv", [Sample(id="1", audio=tmp_path / "1.wav", text="text", duration_s=1.0)])
        write_flac(tmp_path / "clips" / "1.flac", np.zeros(1600, np.float32))
        KeptValues(tmp_path / "features").put(b"k" * 16, b"value")
        HeardPieces(FactStore(tmp_path / "features"), "model").keep(tmp_path / "train.csv", [], None, ["text"])
        with atomic_folder(tmp_path / "run" / "final") as part:
            (part / "weights").touch()
        import_source(tmp_path / "train.csv", tmp_path / "imported")
    finally:
        os.umask(before)
    folders = (tmp_path / name for name in ("clips", "features", "imported"))
    found = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    found.append(tmp_path / "train.csv")
    assert len(found) == 7 and {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}
    assert stat.S_IMODE((tmp_path / "run" / "final").stat().st_mode) == 0o700


def test_a_list_to_train_on_is_never_meant_by_the_name_of_a_test_set(tmp_path):
    (tmp_path / "mine-train.csv").touch()
    assert "mine-train.csv" in like(tmp_path / "mine-trian.csv") and not like(tmp_path / "mine-test.csv")
    (tmp_path / "mine-tests.csv").touch()
    assert "mine-tests.csv" in like(tmp_path / "mine-test.csv")
