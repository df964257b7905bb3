"""`data check --fix --model` on clips over 30 s: they are cut, the rest of --fix is as ever, and it can go on."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

import cli_typer
from whisper_tuner.data.audio import SAMPLE_RATE, load_audio
from whisper_tuner.data.checks.fix import BLACKLIST, CHANGES, CLIPS, PATCHES
from whisper_tuner.data.dataset import load_manifest
from whisper_tuner.errors import ExitStatus

PROJECT = Path(__file__).parents[3]
sys.path.append(str(PROJECT / "tests" / "whisper_tuner"))

from long_recordings import Long, joined  # noqa: E402

MODEL = str(PROJECT / "bundled" / "model")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("multimac.commands.data_check.PROJECT", tmp_path)
    return tmp_path


def manifest(folder: Path, part: str, *rows: tuple[str, str, str]) -> None:
    with (folder / f"{part}.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("id", "audio", "text", "speaker"), *((*row, "anna") for row in rows)])


def two_long(folder: Path, monkeypatch) -> tuple[Long, Long]:
    """The second with a text that does not fit; what is heard is what is said, by where it lies in the recording."""
    longs = [joined(folder / f"{name}.wav", 40, first=first) for name, first in (("a", 0), ("b", 30))]
    wholes = [(long, load_audio(long.path)) for long in longs]

    def hear(waveforms, language):
        texts = []
        for waveform in waveforms:
            probe = waveform[len(waveform) // 2 :][:400].tobytes()
            long, at = next((long, at) for long, whole in wholes if (at := whole.tobytes().find(probe)) >= 0)
            begin = (at // waveform.itemsize - len(waveform) // 2) / SAMPLE_RATE
            texts.append(long.said(begin, begin + len(waveform) / SAMPLE_RATE))
        return texts

    monkeypatch.setattr("multimac.commands.cut_long._hearing", lambda load, task: hear)
    short = PROJECT / "bundled" / "data" / "train" / "200.ogg"
    rows = [
        ("a", "a.wav", longs[0].text),
        ("a-1", str(short), "Buy &amp; bread."),
        ("b", "b.wav", "Of another book. " * 30),
    ]
    manifest(folder, "train", *rows)
    manifest(folder, "test", ("t", "a.wav", longs[0].text), ("u", str(short.with_name("201.ogg")), "Hello there."))
    return longs[0], longs[1]


def check(*arguments: str) -> int:
    return cli_typer.main(["data", "check", *arguments])


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_long_clips_are_cut_and_what_is_not_is_told(folder, monkeypatch, capsys):
    first, _ = two_long(folder, monkeypatch)
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert check("train.csv", "test.csv", "--language", "en", "--fix", "fixed", "--model", MODEL) == ExitStatus.OK
    said = " ".join(capsys.readouterr().out.split())
    assert {path: path.read_bytes() for path in before} == before
    found = load_manifest(folder / "fixed" / "train.csv")
    assert not found.problems and [sample.id for sample in found.samples] == ["a-cut-1", "a-2", "a-1"]
    assert " ".join(sample.text for sample in found.samples[:2]) == first.text
    assert all(sample.speaker == "anna" and sample.duration_s <= 30 for sample in found.samples)
    assert all(sample.audio.parent == folder / "fixed" / CLIPS for sample in found.samples[:2])
    assert "Too long: 3 clips. Cut at pauses: 1, into 2." in said
    assert "train.csv line 4 was not cut: from 0:0" in said and "test.csv line 2 was not cut: a test set is not" in said
    page = (folder / ".multimac" / "checks").glob("*/report.html")
    assert "train.csv line 4 was not cut" in next(page).read_text(encoding="utf-8")
    changes = {(row["part"], row["line"]): row for row in table(folder / "fixed" / CHANGES)}
    assert changes["train", "2"]["change"] == "cut" and changes["train", "2"]["why"] == "too long; now a-cut-1, a-2"
    assert "; not cut: from 0:0" in changes["train", "4"]["why"] and changes["test", "2"]["change"] == "left out"
    assert changes["train", "3"]["after"] == "Buy & bread."


def test_again_with_the_users_own_corrections(folder, monkeypatch, capsys):
    _, second = two_long(folder, monkeypatch)
    arguments = ("train.csv", "--language", "en", "--fix", "fixed", "--model", MODEL)
    check(*arguments)
    was = {path: path.read_bytes() for path in (folder / "fixed").rglob("*") if path.is_file()}
    check(*arguments)
    now = {path: path.read_bytes() for path in (folder / "fixed").rglob("*") if path.is_file()}
    assert now == was | {folder / "fixed" / CHANGES: now[folder / "fixed" / CHANGES]}
    fixed = folder / "fixed"
    with (fixed / PATCHES).open("a", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("b", second.text), ("a-2", "Another text.")])
    (fixed / BLACKLIST).write_text((fixed / BLACKLIST).read_text() + "a-cut-1\n")
    for _ in range(2):
        capsys.readouterr()
        assert check(*arguments) == ExitStatus.OK
        texts = {sample.id: sample.text for sample in load_manifest(fixed / "train.csv").samples}
        assert [*texts] == ["a-2", "a-1", "b-1", "b-2"] and texts["a-2"] == "Another text."
        assert f"{texts['b-1']} {texts['b-2']}" == second.text
        assert "no row has these ids" not in capsys.readouterr().out
    (fixed / BLACKLIST).write_text("a\n")
    check(*arguments)
    assert "a-2" not in {sample.id for sample in load_manifest(fixed / "train.csv").samples}


def test_a_ctrl_c_and_again(folder, monkeypatch, capsys):
    two_long(folder, monkeypatch)
    from whisper_tuner.eval import long_clips

    def stop(*about):
        raise KeyboardInterrupt

    arguments = ("train.csv", "--language", "en", "--fix", "fixed", "--model", MODEL)
    with monkeypatch.context() as patched:
        patched.setattr("multimac.commands.data_check.fix.write", stop)
        assert check(*arguments) == ExitStatus.INTERRUPTED
    assert [path.name for path in (folder / "fixed").iterdir()] == [CLIPS]
    monkeypatch.setattr(long_clips, "write_flac", stop)  # what is there is not written again
    assert check(*arguments) == ExitStatus.OK
    assert len(load_manifest(folder / "fixed" / "train.csv").samples) == 3


def test_a_set_of_long_clips_only(folder, monkeypatch, capsys):
    first, _ = two_long(folder, monkeypatch)
    manifest(folder, "train", ("", "a.wav", first.text))
    assert check("train.csv", "--language", "en") == ExitStatus.DATA
    assert "--fix with --model cuts it at pauses" in " ".join(capsys.readouterr().out.split())
    assert check("train.csv", "--language", "en", "--fix", "fixed", "--model", MODEL, "--json") == ExitStatus.OK
    told = json.loads(capsys.readouterr().out)
    assert told["counts"]["too long"] == 1 and any(
        "Too long: 1 clip. Cut at pauses: 1," in note for note in told["notes"]
    )
    assert [sample.id for sample in load_manifest(folder / "fixed" / "train.csv").samples] == ["a.wav-1", "a.wav-2"]


def test_what_an_import_leaves_out_can_be_kept_and_cut(folder, monkeypatch, capsys):
    first, _ = two_long(folder, monkeypatch)
    (folder / "pairs").mkdir()
    for name, text in (("a", first.text), ("b", "Of another book. " * 30)):
        (folder / f"{name}.wav").rename(folder / "pairs" / f"{name}.wav")
        (folder / "pairs" / f"{name}.txt").write_text(text)
    assert cli_typer.main(["data", "import", "pairs", "--out", "mine"]) == ExitStatus.DATA  # nothing else is in it
    assert "import with --keep-long" in capsys.readouterr().out
    assert cli_typer.main(["data", "import", "pairs", "--out", "mine", "--keep-long"]) == ExitStatus.OK
    assert "multimac data check mine/train.csv --fix NAME --model MODEL" in capsys.readouterr().out
    assert check("mine/train.csv", "--language", "en", "--fix", "fixed", "--model", MODEL) == ExitStatus.OK
    assert " ".join(s.text for s in load_manifest(folder / "fixed" / "train.csv").samples) == first.text
