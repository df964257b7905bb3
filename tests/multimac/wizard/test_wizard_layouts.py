"""The wizard leads from recordings of other layouts to a finished run."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from multimac.wizard.data import typed_path
from whisper_tuner.data.dataset import load_manifest

PROJECT = Path(__file__).parents[3]
CLIPS = 40


@pytest.fixture
def clips() -> list[tuple[Path, str]]:
    with (PROJECT / "bundled/data/train.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[:CLIPS]
    return [(PROJECT / "bundled/data" / row["audio_path"], row["transcription"]) for row in rows]


def pairs(folder: Path, clips) -> None:
    for audio, text in clips:
        shutil.copy(audio, folder)
        (folder / f"{audio.stem}.txt").write_text(f"{text}\n")


def common_voice(folder: Path, clips) -> None:
    (folder / "clips").mkdir()
    lines = ["client_id\tpath\tsentence\tup_votes\tdown_votes\tage\tgender\taccents\tvariant\tlocale\tsegment"]
    for number, (audio, text) in enumerate(clips):
        shutil.copy(audio, folder / "clips")
        lines.append(f"{number % 20:032x}\t{audio.name}\t{text}\t2\t0\t\t\t\t\ten\t")
    (folder / "validated.tsv").write_text("\n".join(lines) + "\n")


def subtitles(folder: Path, clips) -> None:
    """Four recordings of ten sentences, with a pause of two seconds after each."""
    for number in range(0, CLIPS, 10):
        parts, cues, at = [], [], 0.0
        for place, (audio, text) in enumerate(clips[number : number + 10], 1):
            samples, rate = soundfile.read(audio)
            cues.append(f"{place}\n{stamp(at)} --> {stamp(at + len(samples) / rate)}\n{text}\n")
            parts += [samples, np.zeros(2 * rate)]
            at += len(samples) / rate + 2
        soundfile.write(folder / f"talk{number}.wav", np.concatenate(parts), rate)
        (folder / f"talk{number}.srt").write_text("\n".join(cues))


def stamp(seconds: float) -> str:
    return f"00:{int(seconds // 60):02}:{int(seconds % 60):02},{int(seconds % 1 * 1000):03}"


@pytest.mark.parametrize(
    ("make", "by", "answers"),
    [
        pytest.param(pairs, "sentence", {}, marks=pytest.mark.slow),
        pytest.param(common_voice, "speaker", {}, marks=pytest.mark.slow),
        (subtitles, "sentence", {"import": "talks"}),
    ],
)
def test_from_a_folder_to_a_finished_run(tmp_path, clips, make, by, answers):
    home, source = tmp_path / "home", tmp_path / "my recordings"
    home.mkdir()
    source.mkdir()
    make(source, clips)
    (home / "config.ini").write_text(f"[model:small]\nbase_model = {PROJECT}/bundled/model\nnum_threads = 1\n")
    told = {
        "data": f"'{source}'",
        "name": "mine",
        "method": "full",
        "epochs": 1,
        "start": "now",
        "where": "alone",
    } | answers
    (tmp_path / "answers.json").write_text(json.dumps(told))
    command = [sys.executable, str(PROJECT / "wizard.py"), "--answers", str(tmp_path / "answers.json")]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = (home / "runs").iterdir()
    again = "finetune mine   (the same from the beginning)"
    for words in (f"Split by {by}", "before", "WER after", f"transcribe recording.wav --model {run.name}", again):
        assert words in done.stdout
    assert (run / "final" / "model.safetensors").is_file()
    if make is subtitles:
        assert len(list((home / "talks" / "clips").glob("*.flac"))) == CLIPS
        found = [sample for path in sorted((home / "talks").glob("*-t*.csv")) for sample in load_manifest(path).samples]
        assert {sample.text for sample in found} <= {text for _, text in clips}


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        ("recordings/all.csv", "recordings/all.csv"),
        ("'/Users/anna/My Recordings'", "/Users/anna/My Recordings"),
        ('"/Users/anna/My Recordings"', "/Users/anna/My Recordings"),
        (r"/Users/anna/My\ Recordings\ \(new\)/", "/Users/anna/My Recordings (new)"),
        ("/Users/anna/it's", "/Users/anna/it's"),
    ],
)
def test_a_path_may_be_typed_as_the_finder_drops_it_into_a_terminal(typed, path):
    assert typed_path(typed) == Path(path)
