"""`multimac train`: one command from recordings to a model."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_whisper import write_whisper
from test_wizard_layouts import clips, pairs, subtitles

import cli_typer
from distributed.plan.job import resolve
from multimac.wizard import flow
from whisper_tuner.config import ConfigFile
from whisper_tuner.data.dataset import load_manifest
from whisper_tuner.data.formats.rows import Reading

__all__ = ["clips"]

PROJECT = Path(__file__).parents[3]


@pytest.mark.slow
def test_from_recordings_to_a_model_and_again_under_the_same_profile(tmp_path, clips):
    source = tmp_path / "voice"
    source.mkdir()
    pairs(source, clips)
    command = [
        sys.executable,
        str(PROJECT / "cli_typer.py"),
        "train",
        "voice",
        "--model",
        str(PROJECT / "bundled/model"),
        "--language=en",
    ]
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(r"this will take about \d+ seconds", " ".join(done.stdout.split()))
        assert "WER" in done.stdout and "multimac transcribe" in done.stdout
    config = ConfigFile(tmp_path / "config.ini")
    assert config.names("profile") == ["voice-lora"]  # the second time it is there already, as are its parts
    assert {path.name for path in tmp_path.glob("*.csv")} == {
        f"voice-{kind}.csv" for kind in ("train", "validation", "test")
    }
    assert len(list((tmp_path / "runs").glob("*/final"))) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothere"], "nothere: there is no such file or folder"),
        ([str(PROJECT / "bundled/data"), "--language", "klingon"], "unknown language 'klingon'"),
        ([str(PROJECT / "bundled/data")], "--language is missing"),
        ([str(PROJECT / "bundled/data"), "--model", "nobody"], "--model = nobody: no such folder"),
        ([str(PROJECT / "bundled/data"), "--hosts", "nothere.json"], "nothere.json"),
    ],
)
def test_a_wrong_word_is_named_and_nothing_is_written(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    write_whisper(tmp_path / "model", multilingual=True, seconds=5)
    before = set(tmp_path.iterdir())
    model = ["--model", "model"] if "--model" not in arguments else []
    assert cli_typer.main(["train", *arguments, *model]) == 3
    assert words in " ".join("".join(capsys.readouterr()).split())
    assert set(tmp_path.iterdir()) == before


def test_a_hosts_file_may_be_named_from_here(tmp_path, monkeypatch):
    """What is named relative to this folder is the file of the run, too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.json").write_text('{"master": "127.0.0.1", "workers": []}')
    given = {}
    monkeypatch.setattr(flow, "_ask", lambda *_, hosts_file: given.update(file=hosts_file) or sys.exit(0))
    with pytest.raises(SystemExit):
        cli_typer.main(["train", str(PROJECT / "bundled/data"), "--hosts", "hosts.json"])
    assert given == {"file": tmp_path / "hosts.json"}


@pytest.mark.parametrize(
    ("language", "beside", "words"),
    [
        ("en", "", "Name one that is on this disk with --model FOLDER."),  # the demo's model is nobody's voice
        # Nor is an English-only one a Frenchman's.
        (
            "fr",
            "tiny.en",
            "tiny.en is on this disk, but knows English only. It can learn French all the same, if you choose it.",
        ),
        ("en", "tiny.en", "tiny.en is on this disk"),
        ("fr", "tiny", "tiny is on this disk"),
    ],
)
def test_without_the_hub_a_model_beside_the_recordings_is_taken_if_it_knows_the_language(
    tmp_path, monkeypatch, capsys, clips, language, beside, words
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flow, "_run", lambda *_, **__: 0)
    (tmp_path / "voice").mkdir()
    pairs(tmp_path / "voice", clips)
    if beside:
        write_whisper(tmp_path / beside, multilingual=not beside.endswith(".en"), seconds=5)
    status = cli_typer.main(["train", "voice", "--language", language])
    assert words in " ".join("".join(capsys.readouterr()).split())
    assert status == (0 if words == f"{beside} is on this disk" else 4)


def test_a_slip_in_a_models_name_is_told_before_the_recordings_are_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_whisper(tmp_path / "tiny.en", multilingual=False, seconds=5)
    assert cli_typer.main(["train", str(PROJECT / "bundled/data"), "--model", "tinny.en"]) == 3
    said = " ".join("".join(capsys.readouterr()).split())
    assert "did you mean 'tiny.en'?" in said and "clips" not in said


def test_without_a_language_an_english_only_model_needs_both_options(tmp_path, monkeypatch, capsys, clips):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "voice").mkdir()
    pairs(tmp_path / "voice", clips)
    write_whisper(tmp_path / "tiny.en", multilingual=False, seconds=5)
    assert cli_typer.main(["train", "voice"]) == 3
    said = " ".join("".join(capsys.readouterr()).split())
    assert "Give --language, such as fr. If it is not en, give --model too: tiny.en, which is English-only" in said


def test_too_few_validation_clips_for_the_best_epoch_are_told(tmp_path, monkeypatch, capsys, clips):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flow, "_run", lambda *_, **__: 0)
    (tmp_path / "voice").mkdir()
    pairs(tmp_path / "voice", clips)
    write_whisper(tmp_path / "tiny", multilingual=True, seconds=5)
    assert cli_typer.main(["train", "voice", "--language", "fr", "--model", "tiny"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "4 validation clips are too few to choose the best epoch by: the model is that of the last one." in said


def two_columns(folder: Path, clips) -> Path:
    """Write recordings with a table of which nobody can tell whether the text or the title was said."""
    (folder / "voice").mkdir()
    rows = ["Datei;Satz;Titel"]
    for audio, text in clips:
        shutil.copy(audio, folder / "voice")
        rows.append(f"{audio.name};{text};Aufnahme von {text}")
    (folder / "voice" / "texte.csv").write_text("\n".join(rows) + "\n")
    return folder / "voice"


@pytest.mark.parametrize("given", ["an option", "the section"])
def test_a_column_that_cannot_be_told_may_be_named(tmp_path, monkeypatch, capsys, clips, given):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flow, "_run", lambda *_, **__: 0)
    write_whisper(tmp_path / "tiny", multilingual=True, seconds=5)
    voice = two_columns(tmp_path, clips)
    command = ["train", str(voice), "--language", "en", "--model", "tiny"]
    assert cli_typer.main(command) == 4
    said = " ".join("".join(capsys.readouterr()).split())
    assert "satz and titel may each be its column of text. Call the right one text in the file." in said
    if given == "an option":
        command += ["--text-column", "satz"]
    else:
        Path("config.ini").write_text(f"[dataset:mine]\ntrain = {voice}/texte.csv\ntext_column = satz\n")
        command[1] = "mine"
    assert cli_typer.main(command) == 0
    [name] = ConfigFile(tmp_path / "config.ini").names("profile")
    parts = vars(resolve(ConfigFile(tmp_path / "config.ini"), name).profile)
    read = [load_manifest(parts[kind], reading=Reading.of(parts)).samples for kind in ("train", "validation", "test")]
    assert sorted(sample.text for part in read for sample in part) == sorted(text for _, text in clips)


def test_what_was_left_out_where_audio_is_cut_is_told(tmp_path, monkeypatch, capsys, clips):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flow, "_run", lambda *_, **__: 0)
    write_whisper(tmp_path / "tiny", multilingual=True, seconds=5)
    (tmp_path / "talks").mkdir()
    subtitles(tmp_path / "talks", clips)
    cues = (tmp_path / "talks/talk0.srt").read_text().split("\n\n")
    cues[1:] = [f"2\n{cues[1].splitlines()[1].partition(' -->')[0]} --> 00:00:40,000\nToo much in one."]
    (tmp_path / "talks/talk0.srt").write_text("\n\n".join(cues))
    assert cli_typer.main(["train", "talks", "--language", "en", "--model", "tiny"]) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "1 row left out: 1 too long talk0.srt line 6: a part of talk0.wav lasts" in said
    assert "import with --keep-long first: multimac data import talks --out NAME --keep-long" in said
    with (tmp_path / "talks-clips/left-out.csv").open() as file:
        [row] = csv.DictReader(file)
    assert Path(row["manifest"]) == tmp_path / "talks/talk0.srt"


def test_an_import_of_something_else_is_left_alone(tmp_path, monkeypatch, capsys, clips):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flow, "_run", lambda *_, **__: 0)
    write_whisper(tmp_path / "tiny", multilingual=True, seconds=5)
    (tmp_path / "talks").mkdir()
    subtitles(tmp_path / "talks", clips)
    for source in ("talks/talk0.srt", "talks/talk0.wav", "talks/talk0.wav"):
        assert cli_typer.main(["train", source, "--language", "en", "--model", "tiny"]) == 0
    assert sorted(path.name for path in tmp_path.glob("*-clips*")) == ["talk0-clips", "talk0-clips-2"]


def test_parts_of_recordings_on_a_card_are_written_here(tmp_path, monkeypatch, clips):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flow, "_run", lambda *_, **__: 0)
    write_whisper(tmp_path / "tiny", multilingual=True, seconds=5)
    (tmp_path / "card" / "voice").mkdir(parents=True)
    pairs(tmp_path / "card" / "voice", clips)
    allowed, card = os.access, tmp_path / "card"  # root may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != card and allowed(path, mode))
    assert cli_typer.main(["train", "card/voice", "--language", "en", "--model", "tiny"]) == 0
    assert (tmp_path / "voice-train.csv").exists()


def test_a_folder_for_clips_inside_of_the_recordings_is_refused_at_once(tmp_path, monkeypatch, capsys, clips):
    monkeypatch.chdir(tmp_path)
    write_whisper(tmp_path / "tiny", multilingual=True, seconds=5)
    subtitles(tmp_path, clips)
    assert cli_typer.main(["train", ".", "--language", "en", "--model", "tiny"]) == 3
    assert "lies inside of the source" in " ".join("".join(capsys.readouterr()).split())
