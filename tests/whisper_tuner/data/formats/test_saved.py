"""What the datasets library writes and reads. Without it, the message that asks for it."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from fake_hub import hub

from whisper_tuner.data.dataset import load_manifest
from whisper_tuner.data.formats.rows import AS_IT_IS, Reading
from whisper_tuner.data.importing import import_source
from whisper_tuner.errors import DataError, MissingProgram

PROJECT = Path(__file__).parents[4]
INSTALLED = importlib.util.find_spec("datasets") is not None
needs_datasets = pytest.mark.skipif(not INSTALLED, reason="the datasets library is not installed")


def sound(form: str, seed: int, rate: int = 8000) -> bytes:
    held = io.BytesIO()
    soundfile.write(held, np.random.default_rng(seed).normal(0, 0.1, rate), rate, format=form)
    return held.getvalue()


@pytest.fixture
def parts():
    """Two parts as pushed to the hub: audio of several formats inside, a row without audio, one that is damaged."""
    import datasets

    # Without torchcodec the library encodes no audio, but it takes what is encoded.
    held = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = datasets.Features(audio=held, sentence=datasets.Value("string"), speaker_id=datasets.Value("int32"))
    train = [
        {"audio": {"bytes": sound("WAV", 1), "path": "one.wav"}, "sentence": "eins", "speaker_id": 3},
        {"audio": {"bytes": sound("FLAC", 2), "path": None}, "sentence": "zwei", "speaker_id": 4},
        {"audio": {"bytes": sound("OGG", 3), "path": "three.ogg"}, "sentence": "drei", "speaker_id": 4},
        {"audio": None, "sentence": "ohne", "speaker_id": 4},
        {"audio": {"bytes": b"no audio at all", "path": "bad.wav"}, "sentence": "kaputt", "speaker_id": 4},
        {"audio": {"bytes": sound("WAV", 4), "path": "five.wav"}, "sentence": None, "speaker_id": 4},
    ]
    test = [{"audio": {"bytes": sound("WAV", 5), "path": "one.wav"}, "sentence": "neun", "speaker_id": 5}]
    made = {name: datasets.Dataset.from_list(rows, features) for name, rows in {"train": train, "test": test}.items()}
    return datasets.DatasetDict({name: rows.cast_column("audio", datasets.Audio()) for name, rows in made.items()})


def imported(source: Path, out: Path, reading: Reading = AS_IT_IS) -> dict[str, list[tuple[str, str, float]]]:
    found = import_source(source, out, reading)
    assert all(sample.audio.parent == out / "clips" for one in found for sample in one.samples)
    return {one.kind: [(s.text, s.speaker, round(s.duration_s, 2)) for s in one.samples] for one in found}


WHOLE = {"train": [("eins", "3", 1.0), ("zwei", "4", 1.0), ("drei", "4", 1.0)], "test": [("neun", "5", 1.0)]}


@needs_datasets
def test_save_to_disk(tmp_path, parts):
    parts.save_to_disk(tmp_path / "saved")
    assert imported(tmp_path / "saved", tmp_path / "out") == WHOLE
    found = import_source(tmp_path / "saved", tmp_path / "out")
    assert [(one.written, one.kept) for one in found] == [(0, 4), (0, 1)]
    assert [(p.line, p.kind) for p in found[0].problems] == [
        (4, "missing audio"),
        (5, "unreadable audio"),
        (6, "no text"),
    ]
    with pytest.raises(DataError, match=r"inside of its files.*\n.*multimac data import .*saved"):
        load_manifest(tmp_path / "saved")


@needs_datasets
def test_one_part_saved_to_disk(tmp_path, parts):
    parts["test"].save_to_disk(tmp_path / "saved")
    assert imported(tmp_path / "saved", tmp_path / "out") == {"train": WHOLE["test"]}


@needs_datasets
@pytest.mark.parametrize("names", ["data/{}-00000-of-00001.parquet", "fr/{}/0000.parquet"])
def test_parquet_as_on_the_hub(tmp_path, parts, names):
    for name, rows in parts.items():
        path = tmp_path / "repo" / names.format(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows.to_parquet(path)
    assert imported(tmp_path / "repo", tmp_path / "out") == WHOLE
    assert imported(path, tmp_path / "one") == {"train": WHOLE["test"]}


@pytest.mark.slow
@needs_datasets
def test_an_id_on_the_hub(tmp_path, parts):
    """In processes of their own, as the hub's address is read when its client is imported."""
    for name, rows in parts.items():
        (tmp_path / "repo" / "data").mkdir(parents=True, exist_ok=True)
        rows.to_parquet(tmp_path / "repo" / "data" / f"{name}-00000-of-00001.parquet")

    def run(source: str) -> subprocess.CompletedProcess:
        out = str(tmp_path / source.replace("/", "-"))
        command = [sys.executable, str(PROJECT / "cli_typer.py"), "data", "import", source, "--out", out]
        return subprocess.run(command, env=found.env, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    with hub(tmp_path / "home", "anna/dialect", tmp_path / "repo", "datasets") as found:
        done = run("anna/dialect")
        assert done.returncode == 0, done.stderr
        whole = {kind: load_manifest(tmp_path / "anna-dialect" / f"{kind}.csv").samples for kind in WHOLE}
        no_subset = run("anna/dialect:fr")
    assert {kind: [sample.text for sample in samples] for kind, samples in whole.items()} == {
        kind: [text for text, *_ in rows] for kind, rows in WHOLE.items()
    }
    assert "train line 5: its audio cannot be read: cannot be decoded" in done.stdout and "/tmp/" not in done.stdout
    assert "'fr' not found. Available: ['default']" in no_subset.stderr and no_subset.returncode == 4


@needs_datasets
def test_its_columns_may_be_named(tmp_path, parts):
    parts["train"].rename_column("sentence", "satz").to_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no text column; found: audio, satz, speaker_id"):
        import_source(tmp_path / "a.parquet", tmp_path / "out")
    found = imported(tmp_path / "a.parquet", tmp_path / "out", Reading(text_column="satz"))
    assert [text for text, *_ in found["train"]] == ["eins", "zwei", "drei"]


@needs_datasets
def test_damaged_files_are_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"(?s)a\.parquet cannot be opened.*hf auth login"):
        import_source(tmp_path / "a.parquet", tmp_path / "out")


@needs_datasets
def test_metadata_of_an_audiofolder_as_parquet(tmp_path):
    import datasets

    for part in ("train", "test"):
        rows = []
        for number in range(2):
            (tmp_path / "set" / part).mkdir(parents=True, exist_ok=True)
            (tmp_path / "set" / part / f"{number}.wav").write_bytes(sound("WAV", number + len(part)))
            rows.append({"file_name": f"{number}.wav", "transcription": f"{part} {number}"})
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "set" / part / "metadata.parquet")
    for source, kinds in (
        ("set", ["train", "test"]),
        ("set/train", ["train"]),
        ("set/test/metadata.parquet", ["train"]),
    ):
        found = {one.kind: one for one in import_source(tmp_path / source, tmp_path / "out" / source)}
        assert sorted(found) == sorted(kinds) and not any(one.problems for one in found.values())
        part = "test" if source.startswith("set/test") else "train"
        assert [sample.text for sample in found["train"].samples] == [f"{part} 0", f"{part} 1"]
        assert found["train"].samples[0].audio == tmp_path / "set" / part / "0.wav"


@needs_datasets
def test_parts_and_times_in_its_columns(tmp_path):
    """Clips keep the times of their recording. A recording with the times of a part is not taken for the clip."""
    import datasets

    times = [(7.5, 8.5, "train"), (610.0, 611.0, "dev"), (0.1, 0.3, "train"), (3.0, 4.0, "test")]
    rows = [
        {"audio": {"bytes": sound("WAV", at), "path": None}, "text": f"{at}", "start": start, "end": end, "split": part}
        for at, (start, end, part) in enumerate(times)
    ]
    datasets.Dataset.from_list(rows).cast_column("audio", datasets.Audio()).to_parquet(tmp_path / "a.parquet")
    assert imported(tmp_path / "a.parquet", tmp_path / "out") == {
        "train": [("0", "", 1.0)],
        "validation": [("1", "", 1.0)],
        "test": [("3", "", 1.0)],
    }
    again = import_source(tmp_path / "a.parquet", tmp_path / "out")
    assert [(one.written, one.kept, len(one.problems)) for one in again] == [(0, 1, 1), (0, 1, 0), (0, 1, 0)]
    assert again[0].problems[0].what == "its audio lasts 1.00 s, but its row names a part of 0.2 s"


@pytest.mark.parametrize("source", ["a.parquet", "owner/name"])
def test_without_the_library_its_extra_is_named(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingProgram, match=r"pip install -e '\.\[datasets\]'"):
        import_source(Path(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()
