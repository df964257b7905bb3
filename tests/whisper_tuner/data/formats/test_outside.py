"""Data sets that name files outside of their folder: an import of them says so, and takes them only where it may."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

import cli_typer
from multimac.wizard.data import bring_in
from multimac.wizard.questions import Questions
from whisper_tuner.data.dataset import load_manifest
from whisper_tuner.data.formats.rows import AS_IT_IS
from whisper_tuner.data.importing import OutsideAudio, import_source
from whisper_tuner.errors import DataError
from whisper_tuner.problems import Kind

CUE = "1\n00:00:00,000 --> 00:00:00,500\nTheirs.\n"


@pytest.fixture
def private(tmp_path, audio_file, monkeypatch) -> Path:
    """A folder beside the data set, which is the user's home, too."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "note.txt").write_text("Nobody else may read this.")
    (tmp_path / "home" / "list.csv").write_text("audio,text\na.wav,Nobody else may read this.\n")
    return audio_file(tmp_path / "home" / "private.wav", seconds=0.5, seed=1).parent


@pytest.fixture
def theirs(tmp_path, audio_file) -> Path:
    (tmp_path / "theirs").mkdir()
    audio_file(tmp_path / "theirs" / "a.wav", seconds=0.5)
    return tmp_path / "theirs"


def table(theirs: Path, name: str) -> Path:
    (theirs / "train.csv").write_text(f"audio,text\na.wav,Ours.\n{name},Theirs.\n")
    return theirs


def by_linked_file(theirs: Path, private: Path) -> Path:
    (theirs / "b.wav").symlink_to(private / "private.wav")
    return table(theirs, "b.wav")


def by_linked_folder(theirs: Path, private: Path) -> Path:
    (theirs / "clips").symlink_to(private)
    return table(theirs, "private")


def by_linked_list(theirs: Path, private: Path) -> Path:
    (theirs / "train.csv").symlink_to(private / "list.csv")
    return theirs


def by_linked_text(theirs: Path, private: Path) -> Path:
    (theirs / "a.txt").symlink_to(private / "note.txt")
    return theirs


def json_lines(theirs: Path, private: Path) -> Path:
    rows = [{"audio": "a.wav", "text": "Ours."}, {"audio": {"path": f"{private}/private.wav"}, "text": "Theirs."}]
    (theirs / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return theirs / "list.jsonl"


def parts_of_recordings(theirs: Path, private: Path) -> Path:
    row = {"audio": "../home/private.wav", "text": "Theirs.", "offset": 0, "duration": 0.4}
    (theirs / "list.jsonl").write_text(json.dumps(row))
    return theirs / "list.jsonl"


def audiofolder(theirs: Path, private: Path) -> Path:
    (theirs / "metadata.csv").write_text("file_name,transcription\na.wav,Ours.\n../home/private.wav,Theirs.\n")
    return theirs


def common_voice(theirs: Path, private: Path) -> Path:
    (theirs / "clips").mkdir()
    (theirs / "train.tsv").write_text("client_id\tpath\tsentence\n1\t../../home/private.wav\tTheirs.\n")
    return theirs


def librispeech(theirs: Path, private: Path) -> Path:
    (theirs / "1-2-0.flac").symlink_to(private / "private.wav")
    (theirs / "1-2.trans.txt").write_text("1-2-0 THEIRS\n")
    return theirs


def subtitles(theirs: Path, private: Path) -> Path:
    (theirs / "talk.wav").symlink_to(private / "private.wav")
    (theirs / "talk.srt").write_text(CUE)
    return theirs


def saved(theirs: Path, private: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    held = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = datasets.Features(audio=held, text=datasets.Value("string"))
    row = {"audio": {"bytes": None, "path": str(private / "private.wav")}, "text": "Theirs."}
    datasets.Dataset.from_list([row], features).to_parquet(theirs / "train.parquet")
    return theirs / "train.parquet"


LAYOUTS = [
    *(by_linked_file, by_linked_folder, by_linked_list, by_linked_text, json_lines, parts_of_recordings, audiofolder),
    *(common_voice, librispeech, subtitles, saved),
]
NAMES = ["../home/private.wav", "~/private.wav", "{private}/private.wav", "..\\home\\private.wav", "../home/private"]
WAYS = [*LAYOUTS, *(lambda theirs, private, n=name: table(theirs, n.format(private=private)) for name in NAMES)]


@pytest.mark.parametrize("make", WAYS, ids=[*(make.__name__ for make in LAYOUTS), *NAMES])
def test_an_import_refuses_it_until_it_is_allowed_by_name(tmp_path, theirs, private, make):
    source, out = make(theirs, private), tmp_path / "out"
    with pytest.raises(
        OutsideAudio, match=rf"(?s)theirs.* outside of it, in {private}\n.*--outside {private}"
    ) as found:
        import_source(source, out)
    assert not [*out.glob("*.csv"), *out.glob("clips/private*"), *out.glob("clips/talk*")]
    [train] = import_source(source, out, outside=found.value.folders)
    assert train.samples and not any("outside" in problem.what for problem in train.problems)


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_of_ones_own_needs_no_word(theirs, private, name):
    loaded = load_manifest(table(theirs, name.format(private=private)) / "train.csv")
    assert len(loaded.samples) == 2 and not loaded.problems


def test_what_is_inside_or_not_there_is_no_matter(tmp_path, theirs, private):
    (theirs / "more").mkdir()
    (theirs / "more" / "link.wav").symlink_to("../a.wav")
    (theirs / "train.csv").write_text("audio,text\nmore/../a.wav,Ours.\n/gone/b.wav,Gone.\nhttp://host/b.wav,Gone.\n")
    [train] = import_source(theirs, tmp_path / "out")
    assert [sample.text for sample in train.samples] == ["Ours."]
    assert all("no such audio file" in problem.what for problem in train.problems) and len(train.problems) == 2
    names = ["nul\0.wav", "x" * 5000]  # which no disk takes
    (theirs / "odd.jsonl").write_text("".join(json.dumps({"audio": name, "text": "No."}) + "\n" for name in names))
    [odd] = import_source(theirs / "odd.jsonl", tmp_path / "odd")
    assert [problem.kind for problem in odd.problems] == [Kind.NO_AUDIO] * 2
    (tmp_path / "link.csv").symlink_to(theirs / "train.csv")  # the user has named it
    (tmp_path / "a.wav").symlink_to(theirs / "a.wav")
    import_source(tmp_path / "link.csv", tmp_path / "out2")


def test_the_command_names_its_option(tmp_path, theirs, private, capsys):
    words = ["data", "import", str(table(theirs, "~/private.wav")), "--out", str(tmp_path / "out")]
    assert cli_typer.main(words) == 4
    assert f"--outside {private}" in capsys.readouterr().err
    assert cli_typer.main([*words, "--outside", str(private)]) == 0
    assert len(load_manifest(tmp_path / "out" / "train.csv").samples) == 2


@pytest.mark.parametrize("answer", ["no", "yes"])
def test_the_wizard_asks(tmp_path, theirs, private, answer):
    source, answers = subtitles(theirs, private), tmp_path / "answers.json"
    answers.write_text(json.dumps({"import": str(tmp_path / "out"), "outside": answer}))
    asking = Questions(answers)
    if answer == "no":
        with pytest.raises(DataError, match="outside of it"):
            bring_in(asking, source, AS_IT_IS, Console(quiet=True))
    else:
        made = bring_in(asking, source, AS_IT_IS, Console(quiet=True))
        assert [sample.text for sample in load_manifest(made["train"]).samples] == ["Theirs."]
    assert asking.taken["outside"] == answer and asking.cut == [tmp_path / "out"]


def test_recordings_below_a_list_come_before_those_of_a_folder_beside_it(tmp_path, audio_file):
    for name in ("mine/list/ton/001.wav", "mine/recordings/001.wav", "mine/recordings/002.wav"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        audio_file(tmp_path / name, seconds=1.0)
    source, out = tmp_path / "mine/list", tmp_path / "out"
    (source / "list.csv").write_text("file,text\n001.wav,One.\n")
    [train] = import_source(source / "list.csv", out)
    assert len(train.samples) == 1
    (source / "more.csv").write_text("file,text\n002.wav,Two.\n")
    with pytest.raises(OutsideAudio):
        import_source(source / "more.csv", tmp_path / "refused")
    import_source(source / "list.csv", tmp_path / "refused")  # nothing was put there
