"""`transcribe` as a user calls it, on the bundled model."""

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from small_whisper import write_whisper

import cli_typer

PROJECT = Path(__file__).parents[3]
MODEL, CLIPS = PROJECT / "bundled" / "model", PROJECT / "bundled" / "data" / "test"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two clips, one of them below, beside what is no recording."""
    (tmp_path / "in" / "below").mkdir(parents=True)
    shutil.copy(CLIPS / "001.ogg", tmp_path / "in")
    shutil.copy(CLIPS / "002.ogg", tmp_path / "in" / "below")
    (tmp_path / "in" / "notes.txt").write_text("notes")
    (tmp_path / "in" / "._001.ogg").write_bytes(b"what macOS leaves on USB sticks")
    return tmp_path / "in"


def run(*arguments: object) -> int:
    return cli_typer.main(["transcribe", *map(str, arguments), "--model", str(MODEL)])


def test_text_goes_to_the_terminal(capsys):
    assert run(CLIPS / "001.ogg") == 0
    alone = capsys.readouterr().out
    assert alone.strip() and str(CLIPS) not in alone
    assert run(CLIPS / "001.ogg", CLIPS / "002.ogg") == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{CLIPS / '001.ogg'}: {alone.strip()}"


def test_an_english_only_model_is_told_no_language(tmp_path, capsys):
    model = write_whisper(tmp_path / "tiny.en", multilingual=False, seconds=5)
    arguments = ["transcribe", str(CLIPS / "001.ogg"), "--model", str(model)]
    assert cli_typer.main([*arguments, "--language", "fr"]) == 0
    assert "tiny.en is English-only: it is told no language." in capsys.readouterr().err
    assert cli_typer.main(arguments) == 0
    assert "English-only" not in capsys.readouterr().err


def test_a_folder_becomes_a_folder_of_subtitles(folder, tmp_path, capsys):
    assert run(folder, "--format", "srt", "--out", tmp_path / "out") == 0
    written = sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert written == ["001.srt", "below/002.srt"]
    first = (tmp_path / "out" / "001.srt").read_text().splitlines()
    assert first[:2] == ["1", "00:00:00,000 --> 00:00:03,120"] and first[2]
    assert sorted(p.name for p in folder.rglob("*")) == ["._001.ogg", "001.ogg", "002.ogg", "below", "notes.txt"]


def test_files_lie_beside_their_audio_and_are_not_overwritten(folder, capsys):
    audio = folder / "001.ogg"
    shutil.copy(audio, folder / "001.oga")  # the same stem
    assert run(folder, "--format", "json") == 0
    assert json.loads((folder / "001.json").read_text())["segments"][0]["start"] == 0
    assert (folder / "001.ogg.json").is_file() and (folder / "below" / "002.json").is_file()
    (folder / "001.json").write_text("mine")
    assert run(audio, "--format", "json") == 4
    assert "--force" in capsys.readouterr().err and (folder / "001.json").read_text() == "mine"
    assert run(audio, "--format", "json", "--force") == 0
    assert json.loads((folder / "001.json").read_text())["text"]


def test_a_bad_file_is_reported_and_the_others_go_on(folder, capsys):
    (folder / "bad.wav").write_text("no audio")
    (folder / "empty.flac").write_bytes(b"")
    assert run(folder, "--format", "vtt") == 4
    said = capsys.readouterr()
    for name in ("bad.wav", "empty.flac"):
        assert name in said.err
    assert "2 of 4" in said.err and "Traceback" not in said.err
    assert sorted(p.name for p in folder.rglob("*.vtt")) == ["001.vtt", "002.vtt"]
    assert (folder / "001.vtt").stat().st_mode & 0o777 == 0o644
    assert (folder / "001.vtt").read_text().startswith("WEBVTT\n\n00:00:00.000 --> ")


def test_a_long_recording_is_heard_in_pieces_cut_in_pauses(tmp_path, capsys):
    pieces = []
    for number in range(14):
        samples, rate = soundfile.read(CLIPS / f"{number:03}.ogg", dtype="float32")
        pieces += [samples, np.zeros(rate // 2, np.float32)]
    whole = np.concatenate(pieces)
    soundfile.write(tmp_path / "long.wav", whole, rate)
    assert run(tmp_path / "long.wav", "--format", "json") == 0
    stored = json.loads((tmp_path / "long.json").read_text())
    assert stored["duration_s"] == pytest.approx(len(whole) / rate, abs=0.001) and stored["duration_s"] > 30
    times = [time for segment in stored["segments"] for time in (segment["start"], segment["end"])]
    assert len(times) >= 4 and times == sorted(times) and times[-1] <= stored["duration_s"]
    cut = round(times[1] * rate)
    assert np.abs(whole[cut - rate // 50 : cut + rate // 50]).max() < 0.01


@pytest.mark.parametrize(("task", "joint"), [("transcribe", ""), ("translate", " ")])
def test_a_model_does_what_its_run_trained_it_for(tmp_path, capsys, task, joint):
    """The bundled model knows English alone; how its pieces are joined tells what was asked of it."""
    clip, rate = soundfile.read(CLIPS / "001.ogg", dtype="float32")
    soundfile.write(tmp_path / "long.wav", np.tile(clip, 12), rate)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "final").symlink_to(MODEL)
    profile = {"base_model": str(MODEL), "language": "ja", "task": task}
    rank = {"label": "localhost", "spec": {"profile": profile, "strategy": "allreduce"}}
    (tmp_path / "run" / "run.json").write_text(json.dumps({"name": "mine", "ranks": [rank]}))
    model = str(tmp_path / "run" / "final")
    assert cli_typer.main(["transcribe", str(tmp_path / "long.wav"), "--model", model, "--format", "json"]) == 0
    stored = json.loads((tmp_path / "long.json").read_text())
    assert len(stored["segments"]) > 1
    assert stored["text"] == joint.join(segment["text"] for segment in stored["segments"])
    assert "trained on clips" not in capsys.readouterr().err  # how long they were is not known


def test_a_model_of_short_clips_without_times_is_told_of_once(tmp_path, capsys):
    clip, rate = soundfile.read(CLIPS / "001.ogg", dtype="float32")
    long = [tmp_path / "a.wav", tmp_path / "b.wav"]
    for path in long:
        soundfile.write(path, np.tile(clip, 12), rate)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "final").symlink_to(MODEL)
    (tmp_path / "run" / "train.csv").write_text("id,audio_path,duration_s\na,a.wav,3\nb,b.wav,5\n")

    def told(share: float, *recordings: Path) -> int:
        profile = {"base_model": str(MODEL), "task": "transcribe", "timestamps_share": share}
        rank = {"label": "localhost", "spec": {"profile": profile, "strategy": "allreduce"}}
        (tmp_path / "run" / "run.json").write_text(json.dumps({"name": "mine", "ranks": [rank]}))
        model = str(tmp_path / "run" / "final")
        assert cli_typer.main(["transcribe", *map(str, recordings), "--model", model]) == 0
        return capsys.readouterr().err.count("was trained on clips of 4 s on average, without times: in recordings of")

    assert (told(0.0, *long), told(0.0, CLIPS / "001.ogg"), told(0.5, *long)) == (1, 0, 0)


def test_without_a_model_it_says_what_is_missing(capsys):
    assert cli_typer.main(["transcribe", "x.wav"]) == 2
    said = capsys.readouterr().err
    assert "--model" in said and "Traceback" not in said


def piped(audio: bytes, *arguments: object, folder: Path) -> subprocess.CompletedProcess:
    """What a shell does with `cat audio | python cli_typer.py transcribe -`; temporary files go below `folder`."""
    command = [sys.executable, str(PROJECT / "cli_typer.py"), "transcribe", *map(str, arguments), "--model", str(MODEL)]
    environment = os.environ | {"TMPDIR": str(folder)}
    return subprocess.run(command, input=audio, capture_output=True, cwd=folder, env=environment, timeout=120)


def test_audio_from_stdin_is_written_to_stdout_and_leaves_nothing(tmp_path, capsys):
    clip = CLIPS / "001.ogg"
    assert run(clip) == 0
    text = capsys.readouterr().out
    done = piped(clip.read_bytes(), "-", folder=tmp_path)
    assert (done.returncode, done.stdout.decode()) == (0, text), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_audio_of_any_kind_from_stdin_is_written_in_any_format(tmp_path, capsys):
    clip = CLIPS / "001.ogg"
    assert run(clip) == 0
    text = capsys.readouterr().out
    samples, rate = soundfile.read(clip)
    soundfile.write(tmp_path / "a.wav", samples, rate)
    wav = (tmp_path / "a.wav").read_bytes()
    (tmp_path / "a.wav").unlink()
    done = piped(wav, "-", folder=tmp_path)
    assert (done.returncode, done.stdout.decode()) == (0, text), done.stderr
    done = piped(clip.read_bytes(), "-", "--format", "srt", folder=tmp_path)
    assert done.stdout.startswith(b"1\n00:00:00,000 --> 00:00:03,120\n")
    assert list(tmp_path.iterdir()) == []
    done = piped(clip.read_bytes(), "-", clip, "--format", "vtt", "--out", "out", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["001.vtt", "out", "stdin.vtt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("audio", "words"),
    [(b"", "error: no audio came from stdin"), (b"no audio", "not transcribed: stdin cannot be decoded")],
)
def test_stdin_without_audio_is_one_message(tmp_path, audio, words):
    done = piped(audio, "-", folder=tmp_path)
    said = done.stderr.decode()
    assert done.returncode == 4 and done.stdout == b"" and said.startswith(words) and said.count("\n") == 2, said
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_as_stdin_is_one_message(tmp_path):
    command = [sys.executable, str(PROJECT / "cli_typer.py"), "transcribe", "-", "--model", str(MODEL)]
    master, slave = pty.openpty()
    done = subprocess.run(command, stdin=slave, capture_output=True, text=True, timeout=60)
    os.close(master)
    os.close(slave)
    assert done.returncode == 3 and done.stderr.startswith("error: - means audio from stdin") and "cat " in done.stderr


def test_words_need_times_and_a_model_that_can_tell_them(capsys):
    assert run(CLIPS / "001.ogg", "--words") == 3
    assert "--words: plain text has no times" in capsys.readouterr().err
    assert run(CLIPS / "001.ogg", "--words", "--format", "json", "--force") != 0
    assert "Leave out --words" in capsys.readouterr().err and not (CLIPS / "001.json").exists()
