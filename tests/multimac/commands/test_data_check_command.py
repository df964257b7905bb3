"""`data check` as a user calls it: terminal, report, --json, --fix and --model, on copies of the bundled clips."""

from __future__ import annotations

import csv
import json
import re
import shutil
import signal
from pathlib import Path

import pytest

import cli_typer
from whisper_tuner.data.checks.fix import BLACKLIST, CHANGES, PATCHES
from whisper_tuner.data.dataset import load_manifest
from whisper_tuner.errors import ExitStatus

PROJECT = Path(__file__).parents[3]
DATA = PROJECT / "bundled" / "data"
CLIPS = {"train": 30, "validation": 6, "test": 6}
CONFIG = """
[profile:mine]
base_model = {model}
train = {folder}/train.csv
validation = {folder}/validation.csv
test = {folder}/test.csv
batch_size = 4
epochs = 1
max_steps = 2
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Clips with a name that is to be escaped in HTML, and manifests of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("multimac.commands.data_check.PROJECT", tmp_path)
    for part, count in CLIPS.items():
        rows = read(DATA / f"{part}.csv")[:count]
        (tmp_path / part).mkdir()
        for row in rows:
            shutil.copy(DATA / row["audio_path"], tmp_path / part)
        save(tmp_path / f"{part}.csv", rows)
    (tmp_path / "config.ini").write_text(CONFIG.format(model=PROJECT / "bundled" / "model", folder="."))
    return tmp_path


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def save(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def spoil(path: Path, **texts: str) -> None:
    """Texts by number of the row."""
    rows = read(path)
    for name, text in texts.items():
        rows[int(name[1:])]["transcription"] = text
    save(path, rows)


def check(*arguments: str) -> int:
    return cli_typer.main(["data", "check", *arguments])


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_a_clean_set(folder, capsys):
    assert check("mine") == ExitStatus.OK
    shown = capsys.readouterr().out
    assert "train: 30 rows" in shown and "nothing found in 42 rows" in shown
    page = (folder / ".multimac" / "checks" / "mine" / "report.html").read_text(encoding="utf-8")
    assert "No check has found anything" in page


def test_last_is_the_profile_of_the_newest_run(folder, capsys):
    assert check("last") == ExitStatus.CONFIG
    assert f"There is no run in {folder / 'runs'}." in unwrapped(capsys.readouterr().err)
    run = folder / "runs" / "20261130-054436-mine"
    run.mkdir(parents=True)
    asked = {"name": "mine", "ranks": [{"label": "localhost", "spec": {"strategy": "allreduce"}}]}
    (run / "run.json").write_text(json.dumps(asked))
    assert check("last") == ExitStatus.OK
    assert "train: 30 rows" in capsys.readouterr().out


@pytest.mark.parametrize("width", ["60", "80", "200"])
def test_what_is_found_is_told_with_its_place_and_what_to_do(folder, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", width)
    spoil(folder / "train.csv", _3="", _5="N/A", _7="Buy bread &amp; butter for me.")
    assert check("train.csv", "test.csv", "--language", "en") == ExitStatus.DATA
    out = capsys.readouterr().out
    shown = unwrapped(out)
    assert "error: no text, 1 row train.csv line 5: empty text Write what is said." in shown
    assert "error: placeholder, 1 row train.csv line 7: 'N/A' is no transcript" in shown
    assert "warning: markup, 1 row train.csv line 9: '&amp;'" in shown and "2 errors, 1 warning in 36 rows" in shown
    assert all(
        len(line) <= int(width) for line in out.splitlines() if not line.startswith(("report:", "train", "test"))
    )


def test_a_folder_as_import_makes_it_is_checked_and_every_row_of_the_rarer_way_is_named(folder, capsys):
    texts = [row["transcription"] for row in read(folder / "train.csv")]
    rows = [number for number, text in enumerate(texts) if len(text.split()) >= 3][:8]
    spoil(folder / "train.csv", **{f"_{number}": texts[number].upper() for number in rows})
    check(str(folder))
    out = capsys.readouterr().out
    said, lines = unwrapped(out), [str(number + 2) for number in rows]
    assert all(f"{part}: {count} rows" in said for part, count in CLIPS.items())
    named = f"train.csv, lines {', '.join(lines[:5])} and 3 more"
    assert re.search(rf"8 of \d+ rows of three words or more have capitals only, \d+ have small letters: {named}", said)
    assert "…" not in out and max(len(line) for line in out.splitlines() if not line.startswith("report:")) <= 80
    report = next(folder.glob(".multimac/checks/*/findings.csv")).parent
    found = [row for row in read(report / "findings.csv") if row["kind"] == "two ways of casing"]
    assert [row["line"] for row in found] == lines and all(row["text"].isupper() for row in found)
    told = [row["line"] for row in json.loads((report / "findings.json").read_text())["findings"]]
    assert {*map(int, lines)} <= {*told}
    page = (report / "report.html").read_text(encoding="utf-8")
    assert all(f"train.csv line {line}<" in page for line in lines)
    (folder / "mine").mkdir()
    shutil.copy(folder / "test.csv", folder / "mine" / "train.csv")
    check("mine")  # also the name of a profile, which goes first
    assert "train: 30 rows" in unwrapped(capsys.readouterr().out)


def test_the_report_is_whole_and_everything_in_it_is_escaped(folder, capsys):
    spoil(folder / "train.csv", _5='<script>alert("x")</script> &amp; [laughter]')
    check("mine", "--out", "there")
    page = (folder / "there" / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page and "&lt;script&gt;" in page and "default-src 'none'" in page
    assert "data:audio/" in page and 'class="wave"' in page and str(folder) not in page
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)
    listed = read(folder / "there" / "findings.csv")
    assert {row["kind"] for row in listed} >= {"described sound", "markup"} and listed[0]["line"] == "7"
    assert json.loads((folder / "there" / "findings.json").read_text())["counts"]["described sound"] == 1


def test_the_help_says_whose_folder_has_the_report(capsys):
    check("--help")
    assert ".multimac/checks/NAME in the program's folder" in unwrapped(capsys.readouterr().out)


def test_json(folder, capsys):
    spoil(folder / "train.csv", _5="N/A")
    assert check("mine", "--json") == ExitStatus.DATA
    told = json.loads(capsys.readouterr().out)
    assert told["counts"] == {"placeholder": 1}
    assert told["findings"][0]["line"] == 7 and told["findings"][0]["id"] == "train-005"


def test_fix_writes_new_manifests_and_says_what_it_did(folder, capsys):
    rows = read(folder / "train.csv")
    test = read(folder / "test.csv")
    rows[9] |= {"audio_path": test[2]["audio_path"], "duration_s": "", "transcription": test[2]["transcription"]}
    save(folder / "train.csv", rows)
    spoil(folder / "train.csv", _3="", _5="N/A", _7="Buy bread &amp; butter for me.")
    spoil(folder / "test.csv", _0="Buy bread &amp; butter for you.")
    before = {path: path.read_bytes() for path in folder.glob("*.csv")}
    assert check("mine", "--fix", "fixed") == ExitStatus.OK
    assert {path: path.read_bytes() for path in folder.glob("*.csv")} == before
    train, tested = (load_manifest(folder / "fixed" / f"{part}.csv") for part in ("train", "test"))
    assert not train.problems and len(train.samples) == 27 and len(tested.samples) == 6
    texts = {sample.id: sample.text for sample in train.samples}
    assert texts["train-007"] == "Buy bread & butter for me." and not {"train-003", "train-005", "train-009"} & set(
        texts
    )
    assert tested.samples[0].text == "Buy bread &amp; butter for you."  # a test set stays as it is
    changes = {row["line"]: row for row in read(folder / "fixed" / CHANGES)}
    assert (
        changes["5"]["why"].startswith("cannot be used: no text: empty text") and changes["7"]["change"] == "left out"
    )
    assert changes["9"]["before"] == "Buy bread &amp; butter for me." and changes["11"]["why"].startswith(
        "audio in two parts"
    )
    assert read(folder / "fixed" / PATCHES) == [{"id": "train-007", "text": "Buy bread & butter for me."}]
    ids = [line for line in (folder / "fixed" / BLACKLIST).read_text().splitlines() if not line.startswith("#")]
    assert ids == ["train-005", "train-009"]


def test_the_users_own_corrections_survive(folder, capsys):
    spoil(folder / "train.csv", _5="N/A", _7="Buy bread &amp; butter for me.", _8="Buy  milk for me.")
    check("mine", "--fix", "fixed")
    blacklist = folder / "fixed" / BLACKLIST
    blacklist.write_text(blacklist.read_text().replace("train-005", "train-001\nnobody"))
    (folder / "fixed" / PATCHES).write_text("id,text\ntrain-007,Buy bread.\ntrain-002,Another text.\n")
    for _ in range(3):  # again and again
        assert check("mine", "--fix", "fixed") == ExitStatus.OK
        shown = capsys.readouterr().out
        texts = {sample.id: sample.text for sample in load_manifest(folder / "fixed" / "train.csv").samples}
        assert "train-001" not in texts and texts["train-005"] == "N/A" and texts["train-002"] == "Another text."
        assert texts["train-007"] == "Buy bread." and texts["train-008"] == "Buy  milk for me."
        assert "no row has these ids of blacklist.txt or patches.csv: nobody" in unwrapped(shown)
    assert "train-001\n" in blacklist.read_text() and "nobody" in blacklist.read_text()


def test_of_two_rows_with_one_recording_the_good_one_stays(folder):
    rows = read(folder / "train.csv")
    shutil.copy(folder / "train" / "004.ogg", folder / "train" / "copy.ogg")
    rows[12] |= {"audio_path": "train/copy.ogg", "duration_s": "", "transcription": rows[4]["transcription"]}
    rows[4]["transcription"] = "N/A"
    save(folder / "train.csv", rows)
    check("mine", "--fix", "fixed")
    ids = [sample.id for sample in load_manifest(folder / "fixed" / "train.csv").samples]
    assert "train-012" in ids and "train-004" not in ids


def test_an_id_of_two_parts_is_left_out_of_train_alone(folder):
    rows, test = read(folder / "train.csv"), read(folder / "test.csv")
    rows[9] = test[2]
    save(folder / "train.csv", rows)
    for _ in range(2):
        check("mine", "--fix", "fixed")
        ids = {
            part: [s.id for s in load_manifest(folder / "fixed" / f"{part}.csv").samples] for part in ("train", "test")
        }
        assert "test-002" not in ids["train"] and "test-002" in ids["test"] and len(ids["test"]) == 6
    assert "(its id, test-002, is also in another part)" in (folder / "fixed" / BLACKLIST).read_text()


@pytest.mark.parametrize(
    ("arguments", "message", "remedy"),
    [
        (["nowhere.csv"], "no such manifest: nowhere.csv", "Name manifests"),
        (["trian.csv"], "no such manifest: trian.csv, did you mean 'train.csv'?", "Name manifests"),
        (["min"], "there is neither a [distributed:min] nor a [profile:min], did you mean 'mine'?", "Known: mine"),
        (["train.csv", "mine"], "no such manifest: mine", "Name manifests"),
        (["train.csv", "--set", "epochs=3"], "--set changes a profile, not manifests", "--language"),
        (["mine", "--fix", "."], "--fix .: the manifests to fix are in this folder", "Name a new folder."),
        (["mine", "--fix", "train.csv"], "--fix train.csv is a file", "Name a new folder."),
        (["mine", "--fix", "test"], "--fix test: the folder holds something else", "Name a new folder."),
        (["train.csv", "--language", "Klingonish"], "unknown language 'Klingonish'", "code"),
    ],
)
def test_mistakes(folder, arguments, message, remedy, capsys):
    assert check(*arguments) in (ExitStatus.DATA, ExitStatus.CONFIG)
    told = capsys.readouterr()
    assert message in told.err and remedy in told.err, told.err


def test_one_bad_line_of_the_users_patches_is_named(folder, capsys):
    (folder / "fixed").mkdir()
    (folder / "fixed" / PATCHES).write_text("id,text\ntrain-001\n")
    assert check("mine", "--fix", "fixed") == ExitStatus.DATA
    assert "patches.csv line 2: not an id and a text: train-001" in capsys.readouterr().err


def test_a_model_tells_what_it_hears_otherwise(folder, capsys):
    """The bundled model does not know this voice well; of two transcripts that were exchanged it contradicts both."""
    rows = read(folder / "train.csv")
    spoil(folder / "train.csv", _3=rows[10]["transcription"], _10=rows[3]["transcription"])
    save(folder / "few.csv", read(folder / "train.csv")[:12])
    check("few.csv", "--language", "en", "--model", str(PROJECT / "bundled" / "model"), "--out", "there")
    assert "The model does not know this speech well" in unwrapped(capsys.readouterr().out)
    page = (folder / "there" / "report.html").read_text(encoding="utf-8")
    listed = page[page.index("What the model contradicts most") :]
    assert "train-003" in listed and "train-010" in listed and "<dt>heard, CER" in listed
    check("few.csv", "--language", "en", "--model", str(PROJECT / "bundled" / "model"), "--out", "there")
    assert "hears few.csv" not in capsys.readouterr().out  # it is known from the first time


def test_a_check_that_is_stopped_while_the_model_hears_says_what_is_lost(folder, capsys, monkeypatch):
    monkeypatch.setattr(
        "distributed.launcher.evaluate.hear_together", lambda *_, **__: signal.raise_signal(signal.SIGINT)
    )
    assert check("train.csv", "--model", str(PROJECT / "bundled" / "model")) == ExitStatus.INTERRUPTED
    assert "Stopped: what was heard is not kept" in unwrapped(capsys.readouterr().out)


@pytest.mark.parametrize(
    "content", ["audio,text\n", "audio,text\nno.wav,Hello.\n", "audio,text\r\ntrain/000.ogg,Hello.\r\n"]
)
def test_few_rows_or_none(folder, content, capsys):
    (folder / "small.csv").write_text(content, newline="")
    assert check("small.csv") in (ExitStatus.OK, ExitStatus.DATA)
    assert "rows" in capsys.readouterr().out


def test_a_data_set_of_several_lists_must_be_imported_first(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recs").mkdir()
    for name in ("a", "b"):
        shutil.copy(PROJECT / "bundled/data/train/000.ogg", tmp_path / "recs" / f"{name}.ogg")
        (tmp_path / "recs" / f"{name}.txt").write_text(f"Words {name}.")
    (tmp_path / "config.ini").write_text(f"[profile:recs2]\nbase_model = {PROJECT}/bundled/model\ntrain = recs\n")
    for what in ("recs", "recs2"):
        assert int(cli_typer.main(["data", "check", what])) == 4
        said = capsys.readouterr()
        assert "multimac data import" in said.err + said.out and "recs --out NAME" in said.err + said.out


def test_what_a_fix_leaves_out_and_mends_is_kept_by_an_import(tmp_path):
    from whisper_tuner.data.importing import read_corrections

    (tmp_path / "blacklist.txt").write_text("# Clips to leave out.\n# train line 2: silent\nclip-1\n")
    assert read_corrections(tmp_path).left_out == {"clip-1"}
