"""Manifests: CSV, TSV and JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from damage import damaged, damaged_json
from fuzzing import fuzz, outcome, parsed
from hypothesis import example

from whisper_tuner.config import Profile
from whisper_tuner.data.check import PROBLEMS_FILE, check_data
from whisper_tuner.data.dataset import Manifest, Sample, load_manifest, write_manifest

CSV = b"""\
id,audio_path,transcription,duration_s
one,a.wav,Remove the butter.,1.0
two,b.wav,"Well, no",1.0
three,c.wav,"She said ""yes""
and left",1.0
"""
ROWS = [{"audio": "a.wav", "text": "Remove the butter.", "duration": 1.0}, {"audio": "b.wav", "text": "No", "id": "x"}]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
ODD_LINES = [
    b'a.wav,"two\nlines"\n',
    b"~nobody/a.wav,words\n",
    b"a" * 5000 + b".wav,words\n",
    b'{"audio": "\\ud800.wav", "text": "words"}\n',
    b'{"audio": ["a.wav"], "text": {}, "duration": 1e999}\n',
    b'{"audio": "a.wav", "text": "w", "duration": ' + b"9" * 5000 + b"}\n",
    b"[" * 3000 + b"\n",
    b"\xc2\x85",
]
MODEL = Path(__file__).parents[2] / "bundled/model"


@pytest.fixture(scope="module")
def clips(folder: Path) -> Path:
    for number, name in enumerate(("a.wav", "b.wav", "c.wav")):
        soundfile.write(folder / name, np.full(16_000, 0.1 * number, dtype=np.float32), 16_000)
    return folder


def read(file: Path, data: bytes, *, check_audio: bool = False) -> None:
    """What is left out has its line; what is left can be written, and read back."""
    file.write_bytes(data)
    manifest = outcome(lambda: load_manifest(file, check_audio=check_audio), names=file, of=data)
    if manifest is None:
        return
    lines = len(data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"))
    assert all(1 <= problem.line <= lines and problem.what for problem in manifest.problems)
    every = [one.line for one in (*manifest.samples, *manifest.problems)]
    assert len(set(every)) == len(every)
    assert [s.line for s in manifest.samples] == sorted(s.line for s in manifest.samples)
    assert len({s.id for s in manifest.samples}) == len({s.audio for s in manifest.samples}) == len(manifest.samples)
    again = file.with_name("again.csv")
    write_manifest(again, manifest.samples)
    assert [*map(facts, load_manifest(again, check_audio=False).samples)] == [*map(facts, manifest.samples)]
    if file.suffix == ".jsonl":
        every_row(data, manifest)


def facts(sample: Sample) -> tuple[str, str, str, str]:
    return sample.id, sample.audio.name, sample.text, f"{sample.duration_s:.3f}"


def every_row(data: bytes, manifest: Manifest) -> None:
    """Each line of JSON is used or left out with a reason, and what is used is what it says."""
    rows = {number: line for number, line in enumerate(data.decode("utf-8-sig").split("\n"), 1) if line.strip()}
    assert set(rows) == {one.line for one in (*manifest.samples, *manifest.problems)}
    for sample in manifest.samples:
        row = parsed(rows[sample.line])
        assert sample.text in [str(value).strip() for value in row.values()]
        if row in ROWS:
            assert (sample.text, sample.audio.name) == (row["text"], row["audio"])


@fuzz("manifest.csv", damaged(CSV))
@example(data=b"audio,text,duration\n~\0,hello,1\n")
@example(data=b"audio,text,duration\n" + b'12","34\n' * 12_000)
@example(data=b"audio,text\n" + b"".join(ODD_LINES))
def test_csv(clips: Path, data: bytes):
    read(clips / "manifest.csv", data)


@fuzz("manifest.tsv", damaged(CSV.replace(b",", b"\t")))
def test_tsv(clips: Path, data: bytes):
    read(clips / "manifest.tsv", data)


@fuzz("manifest.jsonl", damaged(LINES) | damaged_json(*ROWS))
@example(data=b'{"audio": "~\\u0000", "text": "hello", "duration": 1}')
@example(data=LINES + b"".join(ODD_LINES))
def test_json_lines(clips: Path, data: bytes):
    read(clips / "manifest.jsonl", data)


@fuzz("manifest.json", damaged(json.dumps(ROWS, indent=2).encode()))
def test_json_list(clips: Path, data: bytes):
    file = clips / "manifest.json"
    file.write_bytes(data)
    manifest = outcome(lambda: load_manifest(file, check_audio=False), names=file, of=data)
    assert manifest is None or all(problem.line >= 1 and problem.what for problem in manifest.problems)


@fuzz("manifest, with its audio", damaged(CSV), cost=4)
def test_with_audio(clips: Path, data: bytes):
    read(clips / "with-audio.csv", data, check_audio=True)


@fuzz("manifest, before a run", damaged(CSV, LINES) | damaged_json(*ROWS), cost=4)
@example(data=CSV)
def test_before_a_run(clips: Path, data: bytes):
    for name in ("train.csv", "train.jsonl"):
        (clips / name).write_bytes(data)
        (clips / PROBLEMS_FILE).unlink(missing_ok=True)
        profile = Profile(base_model=str(MODEL), train=clips / name)
        found = outcome(check_data, profile, clips, clips / "store", names=clips / name)
        for sample in found["train"].samples if found else ():
            assert sample.audio.is_file() and sample.text and 0 < sample.duration_s <= profile.max_duration_s
        if found:
            listed = (clips / PROBLEMS_FILE).read_text().splitlines() if found["train"].problems else ["header"]
            assert len(listed) > len(found["train"].problems)
            assert repr(check_data(profile, clips, clips / "store")) == repr(found)
        if data == CSV and name == "train.csv":
            assert len(found["train"].samples) == 3
