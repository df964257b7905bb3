"""What is only remembered to save time: damaged, it counts as forgotten."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
from damage import damaged, damaged_json
from fuzzing import fuzz, outcome, parsed
from hypothesis import example

from distributed.hosts.agent import files as host_files
from distributed.hosts.paths import SyncItem
from distributed.hosts.sync import hashed_files
from whisper_tuner.data.audio_check import FACT
from whisper_tuner.data.kept_values import KeptValues
from whisper_tuner.fact_store import FactStore
from whisper_tuner.files import hash_of

SIZE, CHANGED = 1644, 1_763_726_400_000_000_000  # of the clip
HASH = "0" * 64
HERE = "FOLDER"  # where the clip lies, which is known only when the test runs
HASHES = {f"{HERE}/clip.wav": [SIZE, CHANGED, HASH]}
INDEX = {"hashes": {"clip.wav": [SIZE, CHANGED, HASH]}, "managed": {"clip.wav": 1, "gone.wav": 1}}


@pytest.fixture(scope="module")
def clip(folder: Path) -> Path:
    clip = folder / "clip.wav"
    soundfile.write(clip, np.zeros(800, dtype=np.float32), 16_000)
    os.utime(clip, ns=(CHANGED, CHANGED))
    assert clip.stat().st_size == SIZE
    return clip


def written(clip: Path, name: str, data: bytes) -> Path:
    file = clip.parent / name
    file.write_bytes(data.replace(HERE.encode(), bytes(clip.parent)))
    return file


def facts() -> bytes:
    """A file of facts that says what no clip can: damage must not make it of another clip, or another fact."""
    with tempfile.TemporaryDirectory() as name:
        store = FactStore(Path(name))
        for number in range(40):
            store.keep(FACT, {f"/{number}": "1"}, {f"/{number}": [number, "", "", "x" * 200]})
        return store.file.read_bytes()


@fuzz("what is known of files", damaged(facts()), cost=3)
@example(data=b"")
@example(data=b"SQLite format 3\0")
def test_facts(folder: Path, data: bytes):
    """A value is right or unknown, and the file can be used again."""
    store = FactStore(folder / "facts")
    store.file.parent.mkdir(exist_ok=True)
    store.file.write_bytes(data)
    stamps = {f"/{number}": "1" for number in range(40)}
    for name, value in outcome(store.known, FACT, stamps).items():
        assert value == [int(name[1:]), "", "", "x" * 200]
    outcome(store.keep, FACT, {"/new": "1"}, {"/new": [1]})
    assert store.known(FACT, {"/new": "1"}) == {"/new": [1]}


def entry(file: Path, *keys: str) -> list:
    """What a JSON file holds there; [] if nothing, or no list."""
    document = parsed(file.read_bytes())
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document if isinstance(document, list) else []


@fuzz("hashes of what was sent", damaged_json(HASHES))
@example(data=b'{"FOLDER/clip.wav": -1}')
@example(data=b'{"FOLDER/clip.wav": [1644, 1763726400000000000]}')
def test_hashes_on_the_master(clip: Path, data: bytes):
    """The file's own hash, unless an entry of its size and time says another."""
    index = written(clip, "hashes.json", data)
    remembered = entry(index, str(clip))
    [file] = outcome(hashed_files, [SyncItem(local=clip, remote="clip.wav")], index)
    own = hashlib.sha256(clip.read_bytes()).hexdigest()
    assert file.size == SIZE
    assert file.sha256 == own or remembered == [SIZE, CHANGED, file.sha256]


@fuzz("hashes of what arrived", damaged_json(INDEX), cost=2)
@example(data=json.dumps(INDEX).encode())
@example(data=b"\xff")
@example(data=b"[" * 3000)
@example(data=b'{"hashes": {"clip.wav": {"x": 1}}, "managed": {}}')
@example(data=b'{"hashes": {"clip.wav": [1644, 1763726400000000000]}, "managed": {}}')
def test_hashes_on_a_host(clip: Path, data: bytes):
    clip.with_name(".sync").mkdir(exist_ok=True)
    written(clip, ".sync/index.json", data)
    files = [["clip.wav", SIZE, HASH, True], ["new.wav", 1, HASH, False]]
    state = outcome(host_files.check, str(clip.parent), files, ["data"], ["id", "mac"])
    remembered = entry(clip.with_name(".sync") / "index.json", "hashes", "clip.wav") == [SIZE, CHANGED, HASH]
    missing = [position for position, _ in state["missing"]]
    assert missing in ([0, 1], [1]) and (missing == [0, 1] or remembered)
    assert missing == [1] or data != json.dumps(INDEX).encode()
    assert outcome(host_files.check, str(clip.parent), files, ["data"], ["id", "mac"])["missing"] == state["missing"]


VALUES = {hash_of(bytes([number])): bytes([number]) * (40 + number) for number in range(4)}
KEY, *_ = VALUES


def stored(directory: Path) -> dict[bytes, Path]:
    """Keep all values; return the file of each."""
    store, found = KeptValues(directory), {}
    for key, value in VALUES.items():
        before = {*directory.rglob("*")}
        store.put(key, value)
        [found[key]] = (path for path in {*directory.rglob("*")} - before if path.is_file())
    return found


def one_stored() -> bytes:
    with tempfile.TemporaryDirectory() as name:
        return stored(Path(name))[KEY].read_bytes()


ONE = one_stored()


@fuzz("stored log-mels", damaged(ONE), cost=2)
@example(data=ONE)
@example(data=ONE[::-1])
@example(data=ONE[:16])
def test_stored_log_mels(folder: Path, data: bytes):
    """A damaged value is not there, and can be added again; the others are right."""
    directory = folder / "store"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    stored(directory)[KEY].write_bytes(data)
    store = KeptValues(directory)
    found = {key: outcome(store.get, key) for key in VALUES}
    assert found == VALUES | {KEY: VALUES[KEY] if data == ONE else None}
    outcome(store.put, KEY, VALUES[KEY])
    for reader in (store, KeptValues(directory)):
        assert {key: reader.get(key) for key in VALUES} == VALUES
