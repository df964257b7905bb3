"""`multimac data import`, and training on what it writes and on data sets as they are."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

import cli_typer
from distributed.plan.job import resolve
from multimac.commands.data import data_import
from whisper_tuner.config import ConfigFile
from whisper_tuner.data import audio_check
from whisper_tuner.data.audio import quiet_mp3
from whisper_tuner.data.dataset import load_manifest
from whisper_tuner.errors import ConfigError, DataError

PROJECT = Path(__file__).parents[3]
CONFIG = f"""
[profile:mine]
base_model = {PROJECT}/bundled/model
dataset = mine
batch_size = 2
max_steps = 2
num_threads = 1
"""


def bundled(count: int) -> list[tuple[Path, str]]:
    """Some of the bundled clips, with what is said in them."""
    with (PROJECT / "bundled/data/train.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[:count]
    return [(PROJECT / "bundled/data" / row["audio_path"], row["transcription"]) for row in rows]


@pytest.fixture
def common_voice(tmp_path) -> Path:
    """A release with parts; one row of train has no audio."""
    release, clips = tmp_path / "cv", bundled(8)
    (release / "clips").mkdir(parents=True)
    for name, part in {"train": clips[:4], "dev": clips[4:6], "test": clips[6:]}.items():
        lines = ["client_id\tpath\tsentence\tup_votes\tdown_votes\tage\tgender\taccents\tvariant\tlocale\tsegment"]
        for audio, text in part:
            shutil.copy(audio, release / "clips")
            lines.append(f"{len(lines) % 2:032x}\t{audio.name}\t{text}\t2\t0\t\t\t\t\ten\t")
        lines += ["0\tgone.mp3\tNobody.\t2\t0\t\t\t\t\ten\t"] if name == "train" else []
        (release / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return release


@pytest.fixture
def subtitles(tmp_path) -> Path:
    """A recording of eight sentences, and where each is said; every other one follows after a pause."""
    talks, parts, cues, at = tmp_path / "talks", [], [], 0.0
    talks.mkdir()
    for number, (audio, text) in enumerate(bundled(8), 1):
        samples, rate = soundfile.read(audio)
        end = at + len(samples) / rate
        cues.append(f"{number}\n{stamp(at)} --> {stamp(end)}\n{text}\n")
        pause = np.zeros(rate * (2 if number % 2 else 1) - rate // 2)
        parts += [samples, pause]
        at = end + len(pause) / rate
    soundfile.write(talks / "talk.wav", np.concatenate(parts), rate)
    (talks / "talk.srt").write_text("\n".join(cues))
    return talks


def stamp(seconds: float) -> str:
    return f"00:{int(seconds // 60):02}:{int(seconds % 60):02},{int(seconds % 1 * 1000):03}"


def run(*words: str) -> int:
    return int(cli_typer.main([*words]))


def config(folder: Path, dataset: str) -> Path:
    path = folder / "config.ini"
    path.write_text(f"{CONFIG}\n{dataset}\n")
    return path


def finished(folder: Path) -> dict:
    [path] = (folder / "runs").glob("*/wer.json")
    return json.loads(path.read_text())


def test_it_shows_what_was_understood_and_writes_the_lines_for_config_ini(common_voice, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("data", "import", "cv", "--out", "mine", "--language", "English") == 0
    shown = capsys.readouterr().out
    for words in (
        "cv: Common Voice",
        "encoding: UTF-8",
        "columns between: tab, without quoting",
        "speaker column: client_id",
        "4 clips, ",
        "2 speakers",
        "1 row left out: 1 missing audio",
        "train.tsv line 6: no such audio file",
        "[dataset:mine]",
        "train = mine/train.csv",
        "validation = mine/validation.csv",
        "test = mine/test.csv",
        "language = en",
    ):
        assert words in shown, f"{words!r} is not in:\n{shown}"
    manifest = load_manifest(tmp_path / "mine" / "train.csv")
    assert len(manifest.samples) == 4 and {sample.speaker for sample in manifest.samples} == {
        f"{n:032x}" for n in (0, 1)
    }
    assert not (tmp_path / "mine" / "clips").exists()  # its audio is named where it lies


def test_json(common_voice, tmp_path, capsys):
    assert run("data", "import", str(common_voice), "--out", str(tmp_path / "mine"), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [(part["kind"], part["clips"], part["speakers"]) for part in told["parts"]] == [
        ("train", 4, 2),
        ("validation", 2, 2),
        ("test", 2, 2),
    ]
    assert told["parts"][0]["left out"][0]["place"] == "train.tsv:6"


def test_a_common_voice_folder_trains_as_it_is(common_voice, tmp_path, capsys):
    path = config(tmp_path, "[dataset:mine]\ntrain = cv")
    assert run("finetune", "mine", "--config", str(path)) == 0
    shown = capsys.readouterr().out
    assert "cv/test.tsv, found beside train" in shown.replace("\n", "") and "gone.mp3" in shown
    assert finished(tmp_path)["after"]["clips"] == 2


def test_siblings_are_used_unless_the_dataset_says_otherwise(common_voice, tmp_path):
    for text, test in (("", common_voice / "test.tsv"), ("test =\n", None), ("test = x.csv\n", tmp_path / "x.csv")):
        path = config(tmp_path, f"[dataset:mine]\ntrain = cv/train.tsv\n{text}")
        assert resolve(ConfigFile(path), "mine").profile.test == test


@pytest.mark.slow
def test_a_run_says_which_siblings_it_does_not_use(tmp_path, capsys):
    rows = "".join(f"{audio},{text}\n" for audio, text in bundled(4))
    for name in ("train", "dev", "valid"):
        (tmp_path / f"{name}.csv").write_text(f"audio,text\n{rows}")
    told = "validation: dev.csv or valid.csv may be meant, so none is used: set validation = "
    for keys, said in (("", True), ("validation =\n", False), ("validation = dev.csv\n", False)):
        path = config(tmp_path, f"[dataset:mine]\ntrain = train.csv\n{keys}")
        assert run("finetune", "mine", "--config", str(path), "--set", "max_steps=1") == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert (told in shown) == said, shown


@pytest.mark.slow
def test_columns_may_be_named_in_the_dataset(tmp_path, capsys):
    clips = bundled(4)
    rows = "".join(f"{audio};{text}\n" for audio, text in clips)
    (tmp_path / "liste.csv").write_text(f"Datei;Satz\n{rows}")
    keys = "audio_column = Datei\ntext_column = Satz"
    path = config(tmp_path, f"[dataset:mine]\ntrain = liste.csv\ntest = liste.csv\n{keys}")
    assert run("finetune", "mine", "--config", str(path)) == 0
    assert finished(tmp_path)["after"]["clips"] == 4
    path = config(tmp_path, "[dataset:mine]\ntrain = liste.csv")
    assert run("finetune", "mine", "--config", str(path)) == 0
    assert "column datei is audio, column satz is text" in " ".join(capsys.readouterr().out.split())


def test_importing_again_goes_on_and_keeps_what_its_user_has_done(subtitles, tmp_path, capsys):
    out = tmp_path / "mine"
    data_import(str(subtitles), out)
    first = {path.name: path.stat().st_mtime_ns for path in (out / "clips").iterdir()}
    ids = [sample.id for sample in load_manifest(out / "train.csv").samples]
    (out / "blacklist.txt").write_text(f"{ids[0]}\nnobody\n")
    (out / "patches.csv").write_text(f'id,text\n{ids[1]},"Right, then."\n')
    (out / "clips" / sorted(first)[-1]).unlink()
    (out / "train.csv").write_text("id,audio_path,transcription\n")
    capsys.readouterr()
    data_import(str(subtitles), out)
    shown = capsys.readouterr().out
    assert f"1 clip cut to FLAC; {len(first) - 1} that an earlier import has cut are kept" in shown
    assert "1 left out by blacklist.txt, 1 texts from patches.csv" in shown and "no row has: nobody" in shown
    assert "it is kept as train-changed-1.csv" in shown
    assert (out / "train-changed-1.csv").read_text() == "id,audio_path,transcription\n"
    samples = load_manifest(out / "train.csv").samples
    assert [sample.id for sample in samples] == ids[1:] and samples[0].text == "Right, then."
    assert (out / "blacklist.txt").read_text() == f"{ids[0]}\nnobody\n"
    again = {path.name: path.stat().st_mtime_ns for path in (out / "clips").iterdir()}
    assert {name for name, when in again.items() if first[name] != when} == {sorted(first)[-1]}


def test_an_out_that_is_something_else_is_refused(common_voice, subtitles, tmp_path):
    out = tmp_path / "mine"
    data_import(str(subtitles), out)
    with pytest.raises(ConfigError, match=r"holds the import of .*talks"):
        data_import(str(common_voice), out)
    with pytest.raises(ConfigError, match="with other things in it"):
        data_import(str(subtitles), common_voice)
    with pytest.raises(ConfigError, match="lies inside of the source"):
        data_import(str(subtitles), subtitles / "mine")
    with pytest.raises(ConfigError, match="did you mean 'semicolon'"):
        data_import(str(subtitles), tmp_path / "x", delimiter="semicolons")


def test_no_usable_row_is_an_error_that_names_the_first(tmp_path):
    (tmp_path / "l.csv").write_text("audio,text\ngone.wav,x\n")
    with pytest.raises(DataError, match=r"no usable row\n  l\.csv:2: no such audio file"):
        data_import(str(tmp_path / "l.csv"), tmp_path / "mine")


def manifest(folder: Path, clips: list[tuple[Path, str]]) -> Path:
    path = folder / "all.csv"
    path.write_text("audio,text\n" + "".join(f'{audio},"{text}"\n' for audio, text in clips))
    return path


def test_an_import_splits_off_the_parts_that_are_missing_and_keeps_doing_so(tmp_path, capsys):
    source, out = manifest(tmp_path, bundled(40)), tmp_path / "mine"
    words = ["data", "import", str(source), "--out", str(out), "--outside", str(bundled(1)[0][0].parent)]

    def parts() -> dict[str, set[str]]:
        return {path.stem: {s.id for s in load_manifest(path).samples} for path in out.glob("t*.csv")} | {
            "validation": {s.id for s in load_manifest(out / "validation.csv").samples}
        }

    assert run(*words) == 0
    assert "There is no test set" in capsys.readouterr().out and not (out / "test.csv").exists()
    assert run(*words, "--split") == 0
    shown = capsys.readouterr().out
    assert "split by sentence" in shown and "test = " in shown and "There is no test set" not in shown
    first = parts()
    assert sorted(map(len, first.values())) == [4, 4, 32] and len(set().union(*first.values())) == 40
    assert run(*words) == 0
    assert parts() == first


def test_too_few_clips_to_split_are_refused_and_nothing_is_written(tmp_path):
    source, outside = manifest(tmp_path, bundled(2)), [bundled(1)[0][0].parent]
    with pytest.raises(DataError, match="can be made of 2 different texts in 2 clips"):
        data_import(str(source), tmp_path / "mine", split_off=True, outside=outside)
    assert not (tmp_path / "mine" / "train.csv").exists()


@pytest.mark.slow
def test_a_run_says_that_it_has_no_test_set_and_what_a_test_set_has_of_train(tmp_path, capsys):
    source = manifest(tmp_path, bundled(6))
    path = config(tmp_path, f"[dataset:mine]\ntrain = {source}")
    assert run("finetune", "mine", "--config", str(path), "--set", "max_steps=1") == 0
    shown = " ".join(capsys.readouterr().out.split())
    command = re.search(r"there is no test set, so WER is not measured; to split one off: multimac (.*) --split", shown)
    words = shlex.split(command[1].replace("NAME", str(tmp_path / "out")))
    assert words[:3] == ["data", "import", str(source)]
    assert run(*words) == 0 and "6 clips" in capsys.readouterr().out
    test = tmp_path / "other.csv"
    test.write_text(source.read_text().splitlines()[0] + "\n" + "\n".join(source.read_text().splitlines()[3:5]) + "\n")
    path = config(tmp_path, f"[dataset:mine]\ntrain = {source}\ntest = {test}")
    assert run("finetune", "mine", "--config", str(path), "--set", "max_steps=1") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "other.csv shares 2 clips of 2 with all.csv" in shown and "no test set" not in shown


def test_an_import_is_saved_as_a_section_and_headers_are_read_once(common_voice, tmp_path, monkeypatch, capsys):
    read = []
    examine = audio_check.examine
    monkeypatch.setattr(audio_check, "examine", lambda path: read.append(path) or examine(path))
    monkeypatch.setattr("multimac.commands.data.STORE", tmp_path / "store")
    monkeypatch.setattr("multimac.commands.data_check.STORE", tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    Path("config.ini").write_text("# mine\n[DEFAULT]\nseed = 2\n")
    words = ["data", "import", "cv", "--out", "mine", "--save", "meins"]
    assert run(*words) == 0
    saved = dict(ConfigFile("config.ini").section("dataset", "meins").values)
    kinds = ("train", "validation", "test")
    assert saved == {kind: str(tmp_path / "mine" / f"{kind}.csv") for kind in kinds} | {"language": "en"}
    assert "Written to config.ini:\n" in capsys.readouterr().out
    with Path("config.ini").open("a") as file:
        file.write("bad_rows = refuse\n")
    assert run(*words, "--language", "fr") == 0
    assert "Written to config.ini in place of language = en:" in capsys.readouterr().out
    again = dict(ConfigFile("config.ini").section("dataset", "meins").values)
    assert again == saved | {"language": "fr", "bad_rows": "refuse"}
    assert Path("config.ini").read_text().startswith("# mine\n[DEFAULT]\nseed = 2\n")
    before = Path("config.ini").read_text()
    assert run("data", "import", "cv", "--out", "other", "--save", "meins") == 3
    assert "[dataset:meins] has other recordings in config.ini" in capsys.readouterr().err
    assert Path("config.ini").read_text() == before and not Path("other").exists()
    assert run("data", "check", *(str(tmp_path / "mine" / f"{kind}.csv") for kind in kinds)) in (0, 4)
    assert sorted(path.name for path in read) == sorted(path.name for path in (common_voice / "clips").iterdir())


def test_sets_without_clips_are_said_and_what_many_rows_have_is_said_once(tmp_path, monkeypatch, capsys):
    rows = "".join(f'{audio},"{text}",train\n' for audio, text in bundled(30))
    gone = "".join(f",Nobody {number},train\n" for number in range(9)) + ",Nobody,test\n"
    (tmp_path / "all.csv").write_text(f"audio,text,split\n{rows}{gone}")
    words = ["data", "import", str(tmp_path / "all.csv"), "--out", str(tmp_path / "mine")]
    words += ["--outside", str(bundled(1)[0][0].parent)]
    assert run(*words) == 0
    shown = capsys.readouterr().out
    assert "There is no test set and no validation set" in shown and "--split makes both" in shown
    assert shown.count("no audio path") == 2 and "all.csv line 32: no audio path (and 8 more)" in shown
    assert "test = " not in shown and not (tmp_path / "mine" / "test.csv").exists()
    assert shown.count("rows are for train or test by their column split") == 1
    assert run(*words, "--split") == 0
    shown = capsys.readouterr().out
    assert "There is no" not in shown and len(load_manifest(tmp_path / "mine" / "test.csv").samples) == 3


def test_the_mp3_decoder_writes_nothing_on_the_screen_and_others_do(tmp_path, capfd):
    whole = tmp_path / "a.mp3"
    soundfile.write(whole, np.sin(np.arange(48_000) / 20).astype("float32") * 0.3, 16_000)
    damaged = bytearray(whole.read_bytes())
    for place in range(400, len(damaged) - 400, 97):
        damaged[place] ^= 0x5A
    (tmp_path / "b.mp3").write_bytes(damaged)
    (tmp_path / "l.csv").write_text("audio,text\na.mp3,eins\nb.mp3,zwei\n")
    load_manifest(tmp_path / "l.csv")
    assert "Trying to resync" in capfd.readouterr().err  # else there is nothing to keep off
    assert run("data", "import", str(tmp_path / "l.csv"), "--out", str(tmp_path / "mine")) == 0
    told = capfd.readouterr()
    assert told.err == "" and "1 row left out: 1 truncated audio" in told.out
    with quiet_mp3():
        os.write(2, b"Note: Illegal Audio-MPEG-Header\nout of memory\n")
        print("Python's own", file=sys.stderr)
    assert sorted(capfd.readouterr().err.splitlines()) == ["Python's own", "out of memory"]
