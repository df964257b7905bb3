"""What is only remembered to save time: damaged, it counts as forgotten."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import soundfile
from damage import damaged, damaged_json
from fuzzing import fuzz, outcome, parsed
from hypothesis import example

from distributed.hosts.agent import files as host_files
from distributed.hosts.code import SyncItem
from distributed.hosts.sync import hashed_files
from whisper_tuner.data import features
from whisper_tuner.data.audio_check import AudioIndex
from whisper_tuner.data.problems import Kind

SIZE, SECONDS, CHANGED = 1644, 0.05, 1_763_726_400_000_000_000  # of the clip
HASH = "0" * 64
HERE = "FOLDER"  # where the clip lies, which is known only when the test runs
HEADERS = {"format": 1, "files": {f"{HERE}/clip.wav": [SIZE, CHANGED, SECONDS, "", "", ""]}}
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


@fuzz("headers of audio", damaged_json(HEADERS))
@example(data=b'{"format": 1, "files": {"FOLDER/clip.wav": [1644, 1763726400000000000, "7", "", "", ""]}}')
@example(data=b'{"format": 1, "files": {"FOLDER/clip.wav": [1644, 1763726400000000000, NaN, "", "", ""]}}')
@example(data=b'{"format": 1, "files": {"FOLDER/clip.wav": [1644, 1763726400000000000, 1, "bad luck", "", ""]}}')
def test_headers(clip: Path, data: bytes):
    """The clip's own header, unless a whole entry of its size and time says something else that can be."""
    file = written(clip, "headers.json", data)
    index = outcome(AudioIndex, file)
    header = outcome(lambda: index[clip])
    assert header.seconds >= 0 and header.kind in ("", *Kind)
    remembered = entry(file, "files", str(clip))
    if [header.seconds, header.kind, header.what] != [SECONDS, "", ""]:
        assert remembered[:2] == [SIZE, CHANGED] and remembered[2:5] == [header.seconds, header.kind, header.what]
    index.save()
    assert AudioIndex(file)[clip] == header


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
    state = outcome(host_files.check, str(clip.parent), files, ["data"])
    remembered = entry(clip.with_name(".sync") / "index.json", "hashes", "clip.wav") == [SIZE, CHANGED, HASH]
    missing = [position for position, _ in state["missing"]]
    assert missing in ([0, 1], [1]) and (missing == [0, 1] or remembered)
    assert missing == [1] or data != json.dumps(INDEX).encode()
    assert outcome(host_files.check, str(clip.parent), files, ["data"])["missing"] == state["missing"]


MEL = io.BytesIO()
np.save(MEL, np.arange(12, dtype=np.float32).reshape(3, 4))
ENTRY = hashlib.blake2b(MEL.getvalue(), digest_size=features._DIGEST_BYTES).digest() + MEL.getvalue()


@fuzz("features", damaged(ENTRY))
@example(data=ENTRY)
def test_features(folder: Path, data: bytes):
    (folder / "entry.mel").write_bytes(data)
    found = outcome(features._read, folder / "entry.mel")
    assert (found is not None) == (data == ENTRY)
    assert found is None or np.array_equal(found, np.arange(12, dtype=np.float32).reshape(3, 4))
