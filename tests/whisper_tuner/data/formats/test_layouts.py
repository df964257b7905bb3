"""Each layout, as its real releases have it: columns, encodings, and the odd rows that they have."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import soundfile

from whisper_tuner.data.checks import gather
from whisper_tuner.data.dataset import Sample, load_manifest, write_manifest
from whisper_tuner.data.formats.layouts import LAYOUTS, doubtful, parts_of, with_siblings
from whisper_tuner.data.formats.rows import AS_IT_IS, Reading
from whisper_tuner.data.formats.times import NO_TIME
from whisper_tuner.data.importing import import_source
from whisper_tuner.errors import DataError

CV_HEADER = (
    "client_id\tpath\tsentence_id\tsentence\tsentence_domain\tup_votes\tdown_votes\tage\tgender\taccents\tvariant\t"
    "locale\tsegment"
)


@pytest.fixture
def clip(audio_file):
    """Makes a short file of audio, and its folder; each is of other noise."""
    made = [0]

    def make(path: Path, seconds: float = 0.5, rate: int = 16_000) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        made[0] += 1
        return audio_file(path, seconds=seconds, rate=rate, seed=made[0])

    return make


def texts(path: Path, reading: Reading = AS_IT_IS, kind: str = "train") -> dict[str, str]:
    """By the name of the audio."""
    return {sample.audio.name: sample.text for sample in load_manifest(path, reading=reading, kind=kind).samples}


def write(path: Path, text: str | bytes, encoding: str = "utf-8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode(encoding))
    return path


ONE_CASE = "this disk does not tell capitals from small letters"
ROWS = [("a.wav", "Élan, déjà vu"), ("b.wav", 'Er sagt: "ja"')]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_tables_of_any_delimiter_encoding_and_line_end(tmp_path, clip, encoding):
    for audio, _ in ROWS:
        clip(tmp_path / audio)
    names, ends = ("list.csv", "list.tsv", "list.txt"), ("\n", "\r\n", "\r")
    for name, end, mark in itertools.product(names, ends, ",;\t|"):
        quoted = (f'{audio}{mark}"{text.replace(chr(34), chr(34) * 2)}"' for audio, text in ROWS)
        write(tmp_path / name, end.join([f"audio{mark}text", *quoted, ""]), encoding)
        loaded = load_manifest(tmp_path / name)
        assert [(sample.audio.name, sample.text) for sample in loaded.samples] == ROWS, (name, end, mark)
        assert not loaded.problems and bool(loaded.notes) == (encoding == "cp1252")
        if loaded.notes:
            assert "Windows-1252" in loaded.notes[0] and "Élan" in loaded.notes[0]


@pytest.mark.parametrize(
    ("mark", "columns"),
    [(",", "audio, text"), (";", "text, audio"), ("\t", "audio, seconds, text"), ("|", "text, audio")],
)
def test_a_table_without_a_header_is_understood_by_what_is_in_it(tmp_path, clip, mark, columns):
    lines = []
    for number in range(3):
        cells = {"audio": f"{number}.wav", "text": f"words {number}", "seconds": "0.5"}
        clip(tmp_path / cells["audio"])
        lines.append(mark.join(cells[name] for name in columns.split(", ")))
    loaded = load_manifest(write(tmp_path / "list.csv", "\n".join(lines)))
    assert [sample.text for sample in loaded.samples] == ["words 0", "words 1", "words 2"]
    assert [sample.line for sample in loaded.samples] == [1, 2, 3]
    assert "has no header: column" in loaded.notes[0]


def test_columns_may_be_named_or_numbered(tmp_path, clip):
    clip(tmp_path / "a.wav")
    write(tmp_path / "named.csv", "Datei;Satz;Anmerkung\na.wav;hallo;x\n")
    assert texts(tmp_path / "named.csv", Reading(audio_column="Datei", text_column="satz")) == {"a.wav": "hallo"}
    write(tmp_path / "numbered.csv", "anna;hallo;a.wav\n")
    assert texts(tmp_path / "numbered.csv", Reading(audio_column="3", text_column="2")) == {"a.wav": "hallo"}


def test_excel_may_say_the_delimiter_itself(tmp_path, clip):
    clip(tmp_path / "a.wav")
    loaded = load_manifest(write(tmp_path / "list.csv", "sep=;\r\naudio;text\r\na.wav;ja, gut\r\n", "utf-8-sig"))
    assert [(sample.text, sample.line) for sample in loaded.samples] == [("ja, gut", 3)]


def test_a_table_with_tabs_may_be_without_any_quoting(tmp_path, clip):
    for name in ("a.wav", "b.wav"):
        clip(tmp_path / name)
    write(tmp_path / "list.tsv", 'audio\ttext\na.wav\t"Ja" sagte er\nb.wav\t"Nein\n\n')
    assert texts(tmp_path / "list.tsv") == {"a.wav": '"Ja" sagte er', "b.wav": '"Nein'}
    assert "quotes are not closed" in load_manifest(tmp_path / "list.tsv").notes[0]
    write(tmp_path / "list.tsv", 'audio\ttext\tmore\na.wav\t"Ja\tone\nb.wav\tNein"\ttwo\n')
    assert texts(tmp_path / "list.tsv") == {"a.wav": '"Ja', "b.wav": 'Nein"'}


@pytest.mark.parametrize(
    ("name", "file", "how"),
    [
        ("a", "a.flac", "without .flac"),
        ("sub\\a.wav", "sub/a.wav", "with backslashes"),
        ("sub\\a", "sub/a.wav", "with backslashes"),
        (unicodedata.normalize("NFC", "é/ü.wav"), unicodedata.normalize("NFD", "é/ü.wav"), "another form of Unicode"),
        (unicodedata.normalize("NFD", "ü.wav"), unicodedata.normalize("NFC", "ü.wav"), "another form of Unicode"),
        ("a.b", "a.b.wav", "without .wav"),
        ("a.wav", "clips/a.wav", "in clips/"),
        ("a", "wavs/a.wav", "in wavs/"),
        ("a.mp3", "a.wav", "with .mp3, not .wav"),
        ("a.wav", "a.WAV", "in other capitals"),
        ("A.Mp3", "clips/a.flac", "with .Mp3, not .flac"),
        ("Audio/É.WAV", "audio/é.wav", "in other capitals"),
        ("A", "a.ogg", "without .ogg"),
    ],
)
def test_names_of_audio_need_not_be_those_of_the_files(tmp_path, clip, name, file, how):
    clip(tmp_path / file)
    if "capitals" in how and (tmp_path / name).exists():
        pytest.skip(ONE_CASE)
    loaded = load_manifest(write(tmp_path / "list.csv", f"audio,text\n{name},words\n"))
    [sample] = loaded.samples
    assert sample.audio.samefile(tmp_path / file)
    assert any(how in note for note in loaded.notes)


def test_a_name_that_fits_two_files_is_refused(tmp_path, clip):
    for name in ("a.wav", "a.flac", "b.wav", "c.ogg", "c.wav", "D.wav", "d.WAV"):
        clip(tmp_path / name)
    if (tmp_path / "C.WAV").exists():
        pytest.skip(ONE_CASE)
    rows = write(tmp_path / "list.csv", "audio,text\na,one\nb,two\nc.mp3,three\nd.wav,four\n")
    assert [str(problem) for problem in load_manifest(rows).problems] == [
        "line 2: a may be a.flac or a.wav: write its whole name",
        "line 4: c.mp3 may be c.ogg or c.wav: write its whole name",
        "line 5: d.wav may be D.wav or d.WAV: write its whole name",
    ]


def test_the_own_extension_counts_before_another_one(tmp_path, clip):
    for name in ("a.mp3", "clips/a.wav", "b.2.wav"):
        clip(tmp_path / name)
    loaded = load_manifest(write(tmp_path / "list.csv", "audio,text\na.wav,one\nb.2,two\nb.1,three\n"))
    assert [sample.audio.name for sample in loaded.samples] == ["a.wav", "b.2.wav"]
    assert [problem.kind for problem in loaded.problems] == ["missing audio"]


@pytest.mark.parametrize("folder", ["", "clips/"])
def test_a_row_whose_file_is_gone_does_not_take_that_of_another_row(tmp_path, clip, folder):
    clip(tmp_path / folder / "a.wav")
    loaded = load_manifest(write(tmp_path / "list.csv", "audio,text\na.mp3,one\na.wav,two\n"))
    assert [(sample.audio.name, sample.text) for sample in loaded.samples] == [("a.wav", "two")]
    assert [str(problem) for problem in loaded.problems] == ["line 2: there is no a.mp3, and a.wav is another row's"]


def test_json_lines_and_lists(tmp_path, clip):
    rows = [
        {"audio": {"path": "a.wav"}, "sentence": "eins", "speaker_id": 7},
        {"audio": "b.wav", "sentence": "zwei"},
    ]
    for row in ("a.wav", "b.wav"):
        clip(tmp_path / row)
    write(tmp_path / "lines.jsonl", "\n".join(map(json.dumps, rows)))
    write(tmp_path / "list.json", json.dumps(rows, indent=2))
    write(tmp_path / "short.json", json.dumps(rows))
    for name in ("lines.jsonl", "list.json", "short.json"):
        assert texts(tmp_path / name) == {"a.wav": "eins", "b.wav": "zwei"}
        assert load_manifest(tmp_path / name).samples[0].speaker == "7"
    assert [sample.line for sample in load_manifest(tmp_path / "list.json").samples] == [2, 9]


@pytest.fixture
def common_voice(tmp_path, clip) -> Path:
    """A small release, as it is unpacked: no quoting, a speaker as a long hash, columns that nobody needs."""
    folder = tmp_path / "cv-corpus-17.0-2024-03-15" / "fr"
    number = 0
    for part, sentences in {
        "train": ["Il dit « oui ».", '"Non', '"""Jamais"" de la vie, dit-elle."', "Une apostrophe : l'eau"],
        "dev": ["Bonjour."],
        "test": ["Merci.", "De rien."],
        "other": ["Sans votes."],
        "validated": ["Tout."],
    }.items():
        lines = [CV_HEADER]
        for sentence in sentences:
            number += 1
            name = f"common_voice_fr_{17300000 + number}.mp3"
            shutil.copy(clip(folder / "clips" / name.replace(".mp3", ".wav")), folder / "clips" / name)
            (folder / "clips" / name.replace(".mp3", ".wav")).unlink()
            speaker = f"{number % 2:064x}"
            lines.append(f"{speaker}\t{name}\t{number:064x}\t{sentence}\t\t2\t0\ttwenties\t\tFrance\t\tfr\t")
        write(folder / f"{part}.tsv", "\n".join(lines) + "\n")
    write(folder / "reported.tsv", "sentence_id\tsentence\tlocale\treason\n")
    return folder


def test_common_voice(common_voice):
    for path in (common_voice, common_voice.parent, common_voice / "train.tsv"):
        manifest = load_manifest(path)
        assert [sample.text for sample in manifest.samples] == [
            "Il dit « oui ».",
            '"Non',
            '"Jamais" de la vie, dit-elle.',
            "Une apostrophe : l'eau",
        ]
        assert len({sample.speaker for sample in manifest.samples}) == 2 and not manifest.problems
        assert manifest.path == common_voice / "train.tsv" and manifest.language == "fr"
    found = with_siblings(common_voice.parent, Reading())
    assert {kind: path.name for kind, path in found.items()} == {
        "train": "train.tsv",
        "validation": "dev.tsv",
        "test": "test.tsv",
    }
    assert with_siblings(common_voice / "train.tsv", Reading()) == found


def test_common_voice_without_parts(common_voice):
    (common_voice / "train.tsv").unlink()
    manifest = load_manifest(common_voice)
    assert [sample.text for sample in manifest.samples] == ["Tout."] and "validated.tsv is used" in manifest.notes[0]


def test_a_release_of_two_languages_asks_for_one(common_voice):
    shutil.copytree(common_voice, common_voice.parent / "de")
    with pytest.raises(DataError, match="has several languages: de, fr"):
        load_manifest(common_voice.parent)


@pytest.fixture
def librispeech(tmp_path, clip) -> Path:
    root = tmp_path / "LibriSpeech"
    for subset, chapter in (("train-clean-100", "84-121123"), ("dev-clean", "174-50561"), ("test-clean", "61-70968")):
        folder = root / subset / chapter.replace("-", "/")
        for number in range(2):
            clip(folder / f"{chapter}-{number:04d}.flac")
        listed = f"{chapter}-0000 HE BEGAN A CONFUSED COMPLAINT\n{chapter}-0001 GO DO YOU HEAR\n"
        write(folder / f"{chapter}.trans.txt", listed)
    write(root / "SPEAKERS.TXT", "84 | F | dev-clean |  8.02 | Christie Nowak\n")
    return root


def test_librispeech(librispeech):
    manifest = load_manifest(librispeech)
    assert [(s.id, s.speaker, s.text, s.file, s.line) for s in manifest.samples] == [
        ("84-121123-0000", "84", "HE BEGAN A CONFUSED COMPLAINT", "train-clean-100/84/121123/84-121123.trans.txt", 1),
        ("84-121123-0001", "84", "GO DO YOU HEAR", "train-clean-100/84/121123/84-121123.trans.txt", 2),
    ]
    assert any("in capitals" in note for note in manifest.notes)
    found = with_siblings(librispeech, Reading())
    assert {kind: path.name for kind, path in found.items()} == {
        "train": "train-clean-100",
        "validation": "dev-clean",
        "test": "test-clean",
    }
    assert with_siblings(librispeech / "train-clean-100", Reading()) == found
    assert [sample.id for sample in load_manifest(found["test"]).samples] == ["61-70968-0000", "61-70968-0001"]


def test_mls(tmp_path, clip):
    for kind, suffix in (("train", "opus"), ("dev", "flac")):
        made = clip(tmp_path / "mls" / kind / "audio" / "10" / "20" / "10_20_000001.flac")
        made.rename(made.with_suffix(f".{suffix}"))
        write(tmp_path / "mls" / kind / "transcripts.txt", "10_20_000001\tthe first book\n10_20_000002\tgone\n")
        write(tmp_path / "mls" / kind / "segments.txt", "10_20_000001\thttp://x/y.mp3\t1\t2\n")
    manifest = load_manifest(tmp_path / "mls")
    assert [(s.id, s.speaker, s.text) for s in manifest.samples] == [("10_20_000001", "10", "the first book")]
    assert [problem.kind for problem in manifest.problems] == [
        "missing audio"
    ] and "in small letters" in manifest.notes[0]
    found = with_siblings(tmp_path / "mls", Reading())
    assert {kind: path.name for kind, path in found.items()} == {"train": "train", "validation": "dev"}
    assert texts(found["train"] / "transcripts.txt") == {"10_20_000001.opus": "the first book"}


def test_kaldi(tmp_path, clip):
    recipe = tmp_path / "recipe"
    clip(recipe / "wav" / "a.wav", seconds=3)
    clip(recipe / "wav" / "b.wav", seconds=1)
    train, test = recipe / "data" / "train_nodup", recipe / "data" / "test"
    write(train / "wav.scp", "rec  wav/a.wav\n")
    write(train / "segments", "u1 rec 0.5 1.75\nu2 rec 1.75 2.5\nu3 rec one two\n\n")
    write(train / "text", "u1 good  morning\nu2 who is it\nu3 times\nu4 no segment\n")
    write(train / "utt2spk", "u1 anna\nu2 bert\n")
    write(test / "wav.scp", "b wav/b.wav\n")
    write(test / "text", "b yes\n")
    write(recipe / "data" / "eval2000" / "wav.scp", "b wav/b.wav\n")
    write(recipe / "data" / "eval2000" / "text", "b not trained on\n")
    other, one = import_source(recipe / "data", tmp_path / "out", outside=[recipe])
    assert [(s.id, s.speaker, s.text, s.duration_s) for s in one.samples] == [
        ("u1", "anna", "good  morning", 1.25),
        ("u2", "bert", "who is it", 0.75),
    ]
    assert [str(problem) for problem in one.problems] == [
        "train_nodup/text line 3: segments: no times in seconds: one two",
        "train_nodup/text line 4: segments has no u4",
    ]
    assert [(other.kind, s.text, s.audio.name) for s in other.samples] == [("test", "yes", "b.wav")]
    assert any("eval2000 is no part" in note for note in one.notes)
    with pytest.raises(DataError, match="outside"):
        import_source(recipe / "data", tmp_path / "another")
    assert texts(test) == {"b.wav": "yes"}
    write(test / "text", "b yes\nb-2 no\n")
    [problem] = load_manifest(test).problems
    assert str(problem).startswith("text line 2: wav.scp has no b-2, and there is no segments")
    write(test / "wav.scp", "b wav/b.wav\nb-2 wav/b.wav\n")
    with pytest.raises(DataError, match="write their times in a file segments"):
        load_manifest(test)


def test_fleurs(tmp_path, clip):
    for kind, name in (("train", "104"), ("dev", "105")):
        clip(tmp_path / "en_us" / "audio" / kind / f"{name}.wav")
        row = f'1904\t{name}.wav\t"Say" yes, Anna.\tsay yes anna\ts a y | y e s | a n n a |\t8000\tFEMALE\n'
        write(tmp_path / "en_us" / f"{kind}.tsv", row)
    assert texts(tmp_path / "en_us") == {"104.wav": '"Say" yes, Anna.'}
    assert texts(tmp_path / "en_us", kind="validation") == {"105.wav": '"Say" yes, Anna.'}
    assert texts(tmp_path / "en_us" / "train.tsv", Reading(text_column="4")) == {"104.wav": "say yes anna"}
    assert "text_column = 4" in load_manifest(tmp_path / "en_us").notes[0]


def test_libritts(tmp_path, clip):
    name = "train-clean-100/84/121/84_121_000001_000000"
    clip(tmp_path / f"{name}.wav")
    write(tmp_path / f"{name}.normalized.txt", "Number one.\n")
    write(tmp_path / f"{name}.original.txt", "No. 1.\n")
    write(tmp_path / "train-clean-100/84/121/84_121.trans.tsv", "84_121_000001_000000\tNo. 1.\tNumber one.\n")
    manifest = load_manifest(tmp_path)
    assert [(s.text, s.speaker) for s in manifest.samples] == [("Number one.", "84")] and not manifest.problems


def test_several_subsets_of_librispeech_are_one_part(librispeech, clip):
    folder = librispeech / "train-clean-360" / "14" / "208"
    clip(folder / "14-208-0000.flac")
    write(folder / "14-208.trans.txt", "14-208-0000 CHAPTER ONE\n14-208-0001 ITS AUDIO IS GONE\nno utterance\n\n")
    manifest = load_manifest(librispeech)
    assert [sample.text for sample in manifest.samples][-1] == "CHAPTER ONE" and len(manifest.samples) == 3
    where = "train-clean-360/14/208/14-208.trans.txt line"
    assert [str(problem)[: len(where) + 2] for problem in manifest.problems] == [f"{where} 2", f"{where} 3"]


def test_of_two_that_may_be_meant_none_is_used_and_both_are_named(librispeech):
    shutil.copytree(librispeech / "dev-clean", librispeech / "dev-other")
    for train in (librispeech, librispeech / "train-clean-100"):
        assert set(with_siblings(train, Reading())) == {"train", "test"}
        assert doubtful(train, Reading()) == {
            "validation": [librispeech / "dev-clean", librispeech / "dev-other"],
        }
    shutil.copytree(librispeech / "train-clean-100", librispeech / "train-clean-360")
    assert set(doubtful(librispeech, Reading())) == {"validation"}


def test_of_two_lists_of_one_kind_the_other_is_named(tmp_path, clip):
    audio = clip(tmp_path / "a.wav")
    for name in ("train", "dev", "valid", "dev-other"):
        write(tmp_path / f"{name}.csv", f"audio,text\n{audio},{name}\n")
    assert texts(tmp_path, kind="validation") == {"a.wav": "dev"}
    notes = " ".join(load_manifest(tmp_path).notes)
    assert "valid.csv is no part, or not the first" in notes and "dev-other.csv is no part" in notes
    assert [path.name for path in doubtful(tmp_path / "train.csv", Reading())["validation"]] == ["dev.csv", "valid.csv"]


@pytest.fixture
def ljspeech(tmp_path, clip) -> Path:
    folder = tmp_path / "LJSpeech-1.1"
    for number in (1, 2):
        clip(folder / "wavs" / f"LJ001-000{number}.wav", rate=22_050)
    write(
        folder / "metadata.csv",
        "LJ001-0001|Printing, in 1455|Printing, in fourteen fifty-five\n"
        'LJ001-0002|"in being|"in being\n'
        "LJ001-0003|gone|gone\nLJ001-0004|too few\n",
    )
    return folder


def test_ljspeech(ljspeech):
    for path in (ljspeech, ljspeech / "metadata.csv"):
        manifest = load_manifest(path)
        assert [(s.id, s.text) for s in manifest.samples] == [
            ("LJ001-0001", "Printing, in fourteen fifty-five"),
            ("LJ001-0002", '"in being'),
        ]
        assert [problem.line for problem in manifest.problems] == [3, 4]
        assert "text_column = 2" in manifest.notes[0]
    assert texts(ljspeech, Reading(text_column="2"))["LJ001-0001.wav"] == "Printing, in 1455"


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_audiofolder(tmp_path, clip, suffix):
    for part in ("train", "validation", "test"):
        clip(tmp_path / part / "0001.wav")
        row = {"file_name": "0001.wav", "transcription": f"it is {part}", "speaker": "anna"}
        table = f"{','.join(row)}\n{','.join(row.values())}\n"
        write(tmp_path / part / f"metadata.{suffix}", table if suffix == "csv" else json.dumps(row))
    found = with_siblings(tmp_path, Reading())
    assert set(found) == {"train", "validation", "test"} and with_siblings(found["train"], Reading()) == found
    for kind, path in found.items():
        assert texts(path) == texts(tmp_path, kind=kind) == {"0001.wav": f"it is {kind}"}


def test_audiofolder_with_one_list_for_all_parts(tmp_path, clip):
    for name in ("train/a.wav", "test/b.wav"):
        clip(tmp_path / name)
    path = write(tmp_path / "metadata.csv", "file_name,transcription\ntrain/a.wav,one\ntest/b.wav,two\n")
    assert with_siblings(tmp_path, AS_IT_IS) == with_siblings(path, AS_IT_IS) == {"train": path, "test": path}
    assert texts(path) == {"a.wav": "one"} and texts(path, kind="test") == {"b.wav": "two"}
    assert texts(tmp_path) == {"a.wav": "one"} and texts(tmp_path, kind="test") == {"b.wav": "two"}


def test_recordings_with_a_text_beside_each(tmp_path, clip):
    clip(tmp_path / "train" / "a.wav")
    clip(tmp_path / "train" / "anna" / "a.flac")
    clip(tmp_path / "train" / "alone.wav")
    clip(tmp_path / "test" / "c.wav")
    write(tmp_path / "train" / "a.txt", "first line\r\nsecond line\r\n", "utf-8-sig")
    write(tmp_path / "train" / "anna" / "a.txt", "caf\xe9", "cp1252")
    write(tmp_path / "train" / "lost.txt", "no recording")
    write(tmp_path / "test" / "c.txt", "three")
    manifest = load_manifest(tmp_path)
    assert [(s.id, s.text) for s in manifest.samples] == [
        ("train/a", "first line second line"),
        ("train/anna/a", "café"),
    ]
    assert sorted(map(str, manifest.problems)) == [
        "train/alone.wav: there is no alone.txt beside it",
        "train/lost.txt: there is no recording lost beside it",
    ]
    assert texts(tmp_path, kind="test") == {"c.wav": "three"}
    assert {kind: path.name for kind, path in with_siblings(tmp_path, Reading()).items()} == {
        "train": "train",
        "test": "test",
    }


SRT = """\
1
00:00:00,500 --> 00:00:02,000
<i>Hello</i> there,
my friend.

2
00:00:02,200 --> 00:00:04,000
{\\an8}How are you?

3
00:00:20,000 --> 00:00:21,500
Far away &amp; later.

4
00:00:38,000 --> 00:00:48,000
Past its end.

5
00:00:30,000 -> 00:00:31,000
A broken arrow.

6
00:00:33,000 --> 00:00:32,000
Backwards.
"""
VTT = """\
WEBVTT - made by hand
Kind: captions

NOTE
nobody reads this

STYLE
::cue { color: red }

00:01.000 --> 00:02.500 align:start position:0%
one<00:00:01.500><c> word</c>

00:02.510 --> 00:04.000 align:start position:0%
one word
two words
"""


def test_recordings_with_subtitles(tmp_path, clip):
    source, out = tmp_path / "talks", tmp_path / "out"
    clip(source / "talk.wav", seconds=40, rate=22_050)
    write(source / "talk.srt", SRT.replace("\n", "\r\n"), "utf-8-sig")
    clip(source / "two.flac", seconds=5)
    write(source / "two.en.vtt", VTT)
    clip(source / "bare.wav")
    [train] = import_source(source, out)
    assert [(s.id, s.text, round(s.duration_s, 2)) for s in train.samples] == [
        ("talk-00000500", "Hello there, my friend. How are you?", 3.5),
        ("talk-00020000", "Far away & later.", 1.5),
        ("two-00001000", "one word two words", 3.0),
    ]
    assert sorted(str(problem) for problem in train.problems) == [
        "bare.wav: there are no subtitles of this name beside it",
        "talk.srt line 15: its clip ends at 48.00 s, but talk.wav ends at 40.00 s",
        "talk.srt line 19: no times of a cue: 00:00:30,000 -> 00:00:31,000",
        "talk.srt line 23: a cue that ends before it begins: 33 s to 32 s",
    ]
    samples, rate = soundfile.read(train.samples[0].audio)
    whole, _ = soundfile.read(source / "talk.wav")
    assert (rate, len(samples)) == (16_000, 56_000) and train.samples[0].audio.parent == out / "clips"
    assert np.abs(samples).max() == pytest.approx(np.abs(whole).max(), rel=0.1)
    assert load_manifest(out / "train.csv").samples == tuple(
        type(s)(**{**vars(s), "line": number, "file": "", "duration_s": round(s.duration_s, 3)})
        for number, s in enumerate(train.samples, 2)
    )
    with pytest.raises(DataError, match=r"multimac data import .*talks"):
        load_manifest(source)


@pytest.mark.parametrize(("name", "later"), [("talk.mp4", 1.5), ("talk.mkv", 1.5), ("talk.mp4", 0.0)])
def test_the_sound_of_a_video_may_begin_later_than_its_picture(tmp_path, need_program, name, later):
    """A cue is then later too: it goes by the picture."""
    tone = np.sin(np.arange(16_000) / 8)
    sound = np.concatenate([np.zeros(16_000), tone, np.zeros(32_000)])
    soundfile.write(tmp_path / "sound.wav", sound, 16_000)
    picture = ["-f", "lavfi", "-i", "color=c=blue:s=64x64:r=5:d=8"]
    audio = ["-itsoffset", str(later), "-i", str(tmp_path / "sound.wav"), "-ar", "48000", "-ac", "2", "-c:a", "aac"]
    (tmp_path / "talks").mkdir()
    video = tmp_path / "talks" / name
    subprocess.run([need_program("ffmpeg"), "-v", "error", *picture, *audio, "-c:v", "mpeg4", str(video)], check=True)
    begins = 1 + later
    cue = f"00:00:0{begins:.3f} --> 00:00:0{begins + 1:.3f}"
    write(video.with_suffix(".srt"), f"1\n{cue.replace('.', ',')}\nA tone.\n")
    [train] = import_source(video, tmp_path / "out")
    [sample] = train.samples
    samples, _ = soundfile.read(sample.audio)
    assert (
        sample.text == "A tone."
        and len(samples) == 16_000
        and (np.abs(samples[500:-2000].reshape(-1, 500)).max(axis=1) > 0.5).all()
    )


def test_neighbouring_cues_are_joined_up_to_half_a_minute(tmp_path, clip):
    clip(tmp_path / "talks" / "long.wav", seconds=100)
    starts = range(0, 96, 8)
    times = [f"00:{at // 60:02}:{at % 60:02},000 --> 00:{(at + 7) // 60:02}:{(at + 7) % 60:02},500" for at in starts]
    cues = [f"{number + 1}\n{time}\nw{number}\n" for number, time in enumerate(times)]
    write(tmp_path / "talks" / "long.srt", "\n".join(cues))
    [train] = import_source(tmp_path / "talks", tmp_path / "out")
    assert [sample.text for sample in train.samples] == ["w0 w1 w2", "w3 w4 w5", "w6 w7 w8", "w9 w10 w11"]


def test_times_of_joined_cues_are_kept_until_their_text_is_changed(tmp_path, clip):
    clip(tmp_path / "talks" / "talk.wav", seconds=30)
    cues = [("02,000", "04,500", "One."), ("04,400", "06,000", "- Two."), ("04,450", "07,000", "- Three."),
            ("12,000", "13,000", "Alone.")]  # fmt: skip
    written = [f"{n}\n00:00:{start} --> 00:00:{end}\n{text}\n" for n, (start, end, text) in enumerate(cues, 1)]
    write(tmp_path / "talks" / "talk.srt", "\n".join(written))
    [train] = import_source(tmp_path / "talks", tmp_path / "out")
    assert [sample.timed_text for sample in train.samples] == [
        "<|0.00|> One.<|2.40|><|2.40|> - Two. - Three.<|5.00|>",
        "",
    ]
    again = load_manifest(tmp_path / "out" / "train.csv")
    assert [sample.timed_text for sample in again.samples] == [sample.timed_text for sample in train.samples]
    (tmp_path / "out" / "patches.csv").write_text(f"id,text\n{train.samples[0].id},One. Two. Three.\n")
    [train] = import_source(tmp_path / "talks", tmp_path / "out")
    assert train.samples[0].text == "One. Two. Three." and train.samples[0].timed_text == "" and not train.notes


def test_a_recording_or_its_subtitles_may_be_named_alone(tmp_path, clip):
    clip(tmp_path / "talk.wav", seconds=5)
    write(tmp_path / "talk.fr.srt", "1\n00:00:01,000 --> 00:00:02,000\noui\n")
    for number, name in enumerate(("talk.wav", "talk.fr.srt")):
        [train] = import_source(tmp_path / name, tmp_path / f"out{number}")
        assert [sample.text for sample in train.samples] == ["oui"]


def test_nemo_manifests(tmp_path, clip):
    clip(tmp_path / "whole.wav", seconds=2)
    clip(tmp_path / "call.wav", seconds=10)
    rows = [
        {"audio_filepath": "whole.wav", "offset": 0.0, "duration": 2.0, "text": "whole", "speaker": "a"},
        {"audio_filepath": "call.wav", "offset": 1.5, "duration": 2.25, "text": "first", "speaker": "b"},
        {"audio_filepath": "call.wav", "offset": 4, "duration": 3, "text": "second"},
        {"audio_filepath": "call.wav", "offset": 9, "duration": 3, "text": "past the end"},
        {"audio_filepath": "call.wav", "offset": 2, "text": "no duration"},
        {"audio_filepath": "gone.wav", "offset": 1, "duration": 3, "text": "gone"},
    ]
    path = write(tmp_path / "manifest.json", "\n".join(map(json.dumps, rows)))
    [train] = import_source(path, tmp_path / "out")
    assert [(s.text, s.duration_s, s.speaker) for s in train.samples] == [
        ("whole", 2.0, "a"),
        ("first", 2.25, "b"),
        ("second", 3.0, ""),
    ]
    assert [problem.line for problem in train.problems] == [4, 5, 6] and train.written == 3
    with pytest.raises(DataError, match="parts of longer recordings"):
        load_manifest(path)
    write(path, json.dumps(rows[0]))
    assert texts(path) == {"whole.wav": "whole"}


@pytest.mark.parametrize(
    ("columns", "first", "second"),
    [
        ("start,end", "0.5,3", "3.5,7"),
        ("start_time,end_time", "0:00.5,0:03", "00:00:03.500,00:00:07.000"),
        ("begin_ms,stop_ms", "500,3000", "3500,7000"),
        ("Segment_Start,Segment_End", '"0,5","3,0"', '"3,5 s","7 s"'),
        ("offset,duration_ms", "0.5,2500", "3.5,3500"),
        ("start,end,duration", "0.5,3,10", "3.5,7,10"),  # of the whole recording
    ],
)
def test_parts_of_a_recording_are_cut_by_any_columns_of_their_times(tmp_path, clip, columns, first, second):
    clip(tmp_path / "talk.wav", seconds=10)
    path = write(tmp_path / "list.csv", f"audio,{columns},text\ntalk.wav,{first},one\ntalk.wav,{second},two\n")
    [train] = import_source(path, tmp_path / "out")
    assert [(s.id, s.text, s.duration_s) for s in train.samples] == [
        ("talk.wav-00000500", "one", 2.5),
        ("talk.wav-00003500", "two", 3.5),
    ]
    whole, _ = soundfile.read(tmp_path / "talk.wav", dtype="float32")
    cut, rate = soundfile.read(train.samples[1].audio, dtype="float32")
    assert np.abs(cut - whole[int(3.5 * rate) : 7 * rate]).max() < 1e-4
    with pytest.raises(DataError, match="parts of longer recordings"):
        load_manifest(path)


def test_times_that_a_file_cannot_be_cut_by(tmp_path, clip):
    """Clips that were cut before keep the times that they had in their recording. All else is said."""
    for name, seconds in (("a.wav", 2.0), ("b.wav", 3.0), ("c.wav", 10)):
        clip(tmp_path / name, seconds=seconds)
    good = ["a.wav,610.2,612.3,one", "b.wav,0,2.8,two"]
    assert texts(write(tmp_path / "cut.csv", "\n".join(["audio,start,end,text", *good]))) == {
        "a.wav": "one",
        "b.wav": "two",
    }
    bad = {
        "c.wav,3500,7000,in ms": "a part of c.wav lasts 3500.0 s, more than 30 s",
        "c.wav,8,12,past its end": "its clip ends at 12.00 s, but c.wav ends at 10.00 s",
        "c.wav,7,3,the other way round": "a clip that begins at 7 s and lasts -4 s",
        "c.wav,7,,no end": f"its row says where its clip begins, but neither its end nor its duration; {NO_TIME}",
        "c.wav,,7,no start": f"its row says where it ends, but not where it begins; {NO_TIME}",
        "c.wav,2026-11-28 10:15,,a day": f"start '2026-11-28 10:15' is not a number of seconds; {NO_TIME}",
    }
    path = write(tmp_path / "list.csv", "\n".join(["audio,start,end,text", *good, *bad]))
    [train] = import_source(path, tmp_path / "out")
    assert [sample.text for sample in train.samples] == ["one", "two"]
    assert [problem.what for problem in train.problems] == list(bad.values())
    path = write(tmp_path / "two.csv", "audio,start,begin_ms,end,text\nc.wav,1,1040,3,one\nc.wav,1,3500,7,two\n")
    [train] = import_source(path, tmp_path / "out2")
    assert [sample.text for sample in train.samples] == ["one"]
    assert "two columns differ (start = 1 s, begin_ms = 3.5 s)" in train.problems[0].what


def test_spontaneous_speech_of_common_voice(tmp_path, clip):
    """As its README describes it; a transcription that nobody has checked is in no part."""
    lines = [
        "client_id audio_id audio_file duration_ms prompt_id prompt transcription language split".replace(" ", "\t")
    ]
    for number, part in enumerate(("train", "dev", "test", "unassigned", "unassigned"), 1):
        name = f"spontaneous-speech-en-{number}.mp3"
        (tmp_path / "audios").mkdir(exist_ok=True)
        soundfile.write(tmp_path / "audios" / name, np.random.default_rng(number).normal(0, 0.1, 16_000), 16_000)
        lines.append(f"c\t{number}\t{name}\t1000\t7\tWhat now?\ttext {number}\tEnglish\t{part}")
    write(tmp_path / "ss-corpus-en.tsv", "\n".join(lines) + "\n")
    reported = "client_id\taudio_id\taudio_file\tduration_ms\tprompt_id\tprompt\treason\tcomment\tlanguage\n"
    write(tmp_path / "ss-reported-audios-en.tsv", reported + "c\t9\tx.mp3\t1000\t7\tWhat now?\tother\t\tEnglish\n")
    write(tmp_path / "ss-corpus-en.qa-summary.json", "{}")
    found = import_source(tmp_path, tmp_path.parent / "out")
    assert {one.kind: [(s.text, s.speaker, s.language) for s in one.samples] for one in found} == {
        "train": [("text 1", "c", "en")],
        "validation": [("text 2", "c", "en")],
        "test": [("text 3", "c", "en")],
    }
    [note, _] = found[0].notes
    assert note == (
        "ss-corpus-en.tsv: rows are for train or validation or test by their column split "
        "(2 unassigned, 1 train, 1 dev, 1 test); other rows are not used"
    )


@pytest.mark.parametrize("column", ["split", "Subset", "partition", "set"])
@pytest.mark.parametrize("name", ["list.csv", "list.jsonl"])
def test_a_column_says_the_part_of_each_row(tmp_path, clip, name, column):
    """Wherever a list is named: as a source, in config.ini, to be checked or evaluated."""
    words = ("train", "Training", "train-clean-100", "dev", "val", "valid", "testing", "eval", "held out", "")
    rows = [{"audio": f"{number}.wav", "text": word or "none", column: word} for number, word in enumerate(words)]
    for row in rows:
        clip(tmp_path / row["audio"])
    table = [f"audio,text,{column}", *(",".join(row.values()) for row in rows)]
    lines = table if name == "list.csv" else map(json.dumps, rows)
    path = write(tmp_path / name, "\n".join(lines))
    divided = {"train": {*words[:3]}, "validation": {*words[3:6]}, "test": {*words[6:8]}}
    found = import_source(path, tmp_path / "out")
    assert {one.kind: {sample.text for sample in one.samples} for one in found} == divided
    assert with_siblings(path, AS_IT_IS) == gather.parts_of([path]) == dict.fromkeys(divided, path)
    assert {kind: {*texts(path, kind=kind).values()} for kind in divided} == divided


def test_rows_of_another_part_are_not_trained_whatever_their_file_is_called(tmp_path, clip):
    for name in "abcde":
        clip(tmp_path / f"{name}.wav")
    write(tmp_path / "train.csv", "audio,text,split\na.wav,one,train\nb.wav,two,test\nc.wav,three\n,,,,\n")
    write(tmp_path / "dev.csv", "audio,text,split\nd.wav,four,test\n")
    found = import_source(tmp_path, tmp_path.parent / "other")
    assert [[sample.text for sample in one.samples] for one in found] == [["one"], ["four"]]
    assert [problem.kind for problem in found[0].problems] == ["wrong columns"]  # a row that cannot be read is not lost
    for column, words, error in (
        ("split", "test test", "has no part for train; it has test"),
        ("set", "test dev", "has no part for train; it has validation, test"),
        ("split", "treino teste", r"its column split says 1 treino, 1 teste, and none of this is the name of a part"),
        ("split", "unassigned unassigned", None),
        ("subset", "clean other", None),
    ):
        rows = (f"{name}.wav,{name},{word}" for name, word in zip("ab", words.split(), strict=True))
        path = write(tmp_path / "list.csv", "\n".join([f"audio,text,{column}", *rows]))
        if error:
            for read in (load_manifest, lambda path: import_source(path, tmp_path / "no")):
                with pytest.raises(DataError, match=error):
                    read(path)
        else:
            assert texts(path) == {"a.wav": "a", "b.wav": "b"}
    write(path, "audio,text,split\na.wav,one,validation\n")
    assert texts(path, kind="test") == {"a.wav": "one"}  # the user has named it to measure with


def test_left_out_rows_of_every_part_of_one_list_are_listed(tmp_path, clip):
    clip(tmp_path / "a.wav")
    rows = ["a.wav,one,train", "gone.wav,two,train", "gone too.wav,three,test"]
    path = write(tmp_path / "list.csv", "\n".join(["audio,text,split", *rows]))
    import_source(path, tmp_path / "out")
    assert (tmp_path / "out" / "left-out.csv").read_text().count("missing audio") == 2


def test_what_only_ffmpeg_reads_is_cut_too(tmp_path, clip, need_program):
    clip(tmp_path / "a.wav", seconds=4)
    (tmp_path / "talks").mkdir()
    make = [need_program("ffmpeg"), "-v", "error", "-i", str(tmp_path / "a.wav"), str(tmp_path / "talks" / "a.m4a")]
    subprocess.run(make, check=True)
    write(tmp_path / "talks" / "a.srt", "1\n00:00:01,000 --> 00:00:02,000\noui\n")
    [train] = import_source(tmp_path / "talks", tmp_path / "out")
    assert [(sample.text, sample.duration_s) for sample in train.samples] == [("oui", 1.0)]


WHISPER = {
    "txt": "Hello there.\nHow are you?\n",
    "srt": "1\n00:00:00,000 --> 00:00:02,000\nHello there.\n\n2\n00:00:02,500 --> 00:00:05,000\nHow are you?\n\n",
    "vtt": "WEBVTT\n\n00:00.000 --> 00:02.000\nHello there.\n\n00:02.500 --> 00:05.000\nHow are you?\n\n",
    "tsv": "start\tend\ttext\n0\t2000\tHello there.\n2500\t5000\tHow are you?\n",
    "json": '{"text": " Hello there. How are you?", "segments": [{"start": 0, "end": 2.0, "text": " Hello there."},'
    ' {"id": 1, "start": 2.5, "end": 5.0, "text": " How are you?", "avg_logprob": NaN}], "language": "en"}',
}
CPP = (
    '{"transcription": [{"offsets": {"from": 0, "to": 2000}, "text": " Hello there."},'
    ' {"offsets": {"from": 2500, "to": 5000}, "text": " How are you?"}]}'
)


@pytest.mark.parametrize("suffixes", ["txt srt vtt tsv json", "srt vtt", "json", "vtt json", "json txt"])
def test_all_that_whisper_writes_beside_a_recording_is_one_text(tmp_path, clip, suffixes):
    clip(tmp_path / "talks" / "talk.wav", seconds=6)
    for suffix in suffixes.split():
        write(tmp_path / "talks" / f"talk.{suffix}", WHISPER[suffix])
    write(tmp_path / "talks" / "about.json", '{"segments": 3}')
    [train] = import_source(tmp_path / "talks", tmp_path / "out")
    assert [(s.text, s.duration_s, s.timed_text) for s in train.samples] == [
        ("Hello there. How are you?", 5.0, "<|0.00|> Hello there.<|2.00|><|2.50|> How are you?<|5.00|>")
    ]
    assert not train.problems


def test_the_json_of_whisper_cpp_and_a_recording_named_alone(tmp_path, clip):
    clip(tmp_path / "talk.wav", seconds=6)
    write(tmp_path / "talk.wav.json", CPP)
    write(tmp_path / "talk.json", WHISPER["json"].replace("2.0,", "null,"))
    for name, said in (("talk.wav.json", "Hello there. How are you?"), ("talk.json", "How are you?")):
        [train] = import_source(tmp_path / name, tmp_path / f"out-{name}")
        assert [sample.text for sample in train.samples] == [said]
    assert [str(problem) for problem in train.problems] == ["talk.json line 1: segment 1 has no start, end and text"]


@pytest.mark.parametrize(
    ("suffix", "text"),
    [("vtt", WHISPER["vtt"].replace("Hello", "Goodbye")), ("json", WHISPER["json"].replace("5.0", "5.9"))],
)
def test_subtitles_of_one_recording_that_differ_are_named(tmp_path, clip, suffix, text):
    clip(tmp_path / "talks" / "talk.wav", seconds=6)
    write(tmp_path / "talks" / "talk.srt", WHISPER["srt"])
    write(tmp_path / "talks" / f"talk.{suffix}", text)
    [train] = import_source(tmp_path / "talks", tmp_path / "out")
    why = f"several files of this name that differ (talk.srt, talk.{suffix}): move all but one away"
    assert [problem.what for problem in train.problems] == [why] and not train.samples


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("files", [(), ("a.wav",), ("notes.md", "x.csv")], ids=["nothing", "a recording", "others"])
def test_a_folder_that_has_not_the_layout_that_was_said_is_refused(tmp_path, layout, files):
    (tmp_path / "d").mkdir()
    for name in files:
        write(tmp_path / "d" / name, "x,y\n")
    with pytest.raises(DataError, match=rf"d has no data set of the layout {layout}: it (holds|is empty)"):
        parts_of(tmp_path / "d", Reading(layout=layout))
    if layout != "datasets":
        with pytest.raises(DataError, match="no such manifest"):
            parts_of(tmp_path / "gone", Reading(layout=layout))


def test_a_folder_with_subtitles_and_texts_asks_which(tmp_path, clip):
    clip(tmp_path / "talks" / "a.wav", seconds=3)
    write(tmp_path / "talks" / "a.srt", "1\n00:00:01,000 --> 00:00:02,000\noui\n")
    write(tmp_path / "talks" / "a.txt", "oui non")
    with pytest.raises(DataError, match="layout = subtitles or pairs"):
        parts_of(tmp_path / "talks")
    assert texts(tmp_path / "talks", Reading(layout="pairs")) == {"a.wav": "oui non"}
    with pytest.raises(DataError, match="did you mean 'pairs'"):
        parts_of(tmp_path / "talks", Reading(layout="pair"))


def test_a_folder_of_manifests(tmp_path, clip):
    for name in ("a.wav", "b.wav"):
        clip(tmp_path / name)
    write(tmp_path / "train.csv", "audio,text\na.wav,one\n")
    write(tmp_path / "dev.csv", "audio,text\nb.wav,two\n")
    assert {kind: part.path.name for kind, part in parts_of(tmp_path).items()} == {
        "train": "train.csv",
        "validation": "dev.csv",
    }
    (tmp_path / "train.csv").rename(tmp_path / "mine.csv")
    with pytest.raises(DataError, match=r"several lists: dev\.csv, mine\.csv"):
        parts_of(tmp_path)


@pytest.mark.parametrize("header", ["audio,text", "fichier,texte"])
def test_a_table_and_the_parts_that_we_split_it_into_are_that_table(tmp_path, clip, header):
    """Those of somebody else are not ours to leave out."""
    for name in ("a.wav", "b.wav"):
        clip(tmp_path / name)
    write(tmp_path / "texte.csv", f"{header}\na.wav,un mot\nb.wav,deux mots\n")
    for name in ("texte", "texte-2"):
        for kind, file in (("train", "a.wav"), ("test", "b.wav")):
            sample = Sample(id=file, audio=tmp_path / file, text="un", duration_s=1.0, line=1)
            write_manifest(tmp_path / f"{name}-{kind}.csv", [sample])
    assert {kind: part.path.name for kind, part in parts_of(tmp_path).items()} == {"train": "texte.csv"}
    (tmp_path / "texte.csv").rename(tmp_path / "other.csv")
    with pytest.raises(DataError, match=r"several lists: .*texte-2-test\.csv"):
        parts_of(tmp_path)


def test_parts_in_a_folder_below_the_one_that_is_named(tmp_path, clip):
    for name in ("train-clean-100/84/a", "test-clean/61/b"):
        clip(tmp_path / "LibriTTS" / f"{name}.wav")
        write(tmp_path / "LibriTTS" / f"{name}.normalized.txt", f"{name}\n")
    assert [*texts(tmp_path)] == [*texts(tmp_path / "LibriTTS")] == ["a.wav"]
    assert [*texts(tmp_path, kind="test")] == ["b.wav"]
    shutil.rmtree(tmp_path / "LibriTTS" / "train-clean-100")
    with pytest.raises(DataError, match="has no part for train; it has test"):
        load_manifest(tmp_path)


@pytest.mark.parametrize(
    ("columns", "rows", "trained"),
    [
        ("subset,partition", ("clean,train", "other,test"), ["0.wav"]),
        ("subset", ("train1", "test1"), ["0.wav"]),
        ("set", ("trainset", "testset"), ["0.wav"]),
    ],
)
def test_rows_of_other_parts_are_found_by_whatever_column_names_them(tmp_path, clip, columns, rows, trained):
    lines = [f"{clip(tmp_path / f'{number}.wav').name},words,{row}" for number, row in enumerate(rows)]
    assert [*texts(write(tmp_path / "list.csv", "\n".join([f"audio,text,{columns}", *lines])))] == trained


def test_a_part_that_only_later_rows_name_counts(tmp_path, clip):
    rows = [{"audio": clip(tmp_path / "a.wav").name, "text": "one", "split": "test"}, {"audio": "b.wav", "text": "two"}]
    clip(tmp_path / "b.wav")
    lines = [json.dumps({"split": "train"} | rows[1]), json.dumps(rows[0])]
    assert [*texts(write(tmp_path / "list.jsonl", "\n".join(lines)))] == ["b.wav"]


@pytest.mark.parametrize(
    ("rows", "trained"),
    [
        ("a.mp3,one\nA.wav,two\nb.wav,x\n", {"a.wav": "two", "b.wav": "x"}),
        ("a.mp3,one\na,two\n", {"a.wav": "two"}),
    ],
)
def test_a_file_belongs_to_the_row_that_names_it_most_closely(tmp_path, clip, rows, trained):
    for name in ("a.wav", "b.wav"):
        clip(tmp_path / name)
    assert texts(write(tmp_path / "list.csv", f"audio,text\n{rows}")) == trained


def test_a_row_takes_no_file_that_a_row_of_another_part_names(tmp_path, clip):
    for name in ("a.wav", "c.wav"):
        clip(tmp_path / name)
    rows = "a.mp3,one,train\na.wav,two,test\nc.wav,three,train\n"
    assert texts(write(tmp_path / "list.csv", f"audio,text,split\n{rows}")) == {"c.wav": "three"}


def test_clips_cut_already_are_whole_also_where_they_begin_early(tmp_path, clip):
    rows = [f"{clip(tmp_path / f'{n}.wav', seconds=2).name},{2 * n + 0.3},{2 * n + 2.3},word {n}" for n in range(3)]
    loaded = load_manifest(write(tmp_path / "list.csv", "\n".join(["audio,start,end,text", *rows])))
    assert [sample.duration_s for sample in loaded.samples] == pytest.approx([2, 2, 2]) and not loaded.problems


def test_what_is_said_twice_in_whispers_segments_is_kept(tmp_path, clip):
    clip(tmp_path / "a.wav", seconds=4)
    said = [(0, 2, "No."), (2, 2.8, "No."), (2.8, 4, "Yes I do.")]
    segments = [{"start": start, "end": end, "text": text} for start, end, text in said]
    write(tmp_path / "a.json", json.dumps({"text": "", "segments": segments}))
    [row] = parts_of(tmp_path / "a.wav")["train"].rows()
    assert row.cells["text"] == "No. No. Yes I do."


@pytest.mark.parametrize("other", [{"segments": [{"start": 0, "end": 1, "speaker": "x"}]}, {"segments": []}])
def test_a_json_that_is_not_whispers_does_not_count_beside_texts(tmp_path, clip, other):
    clip(tmp_path / "a.normalized.wav")
    write(tmp_path / "a.normalized.txt", "one\n")
    write(tmp_path / "a.json", json.dumps(other))
    assert texts(tmp_path) == {"a.normalized.wav": "one"}


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["texts.csv", "a-texts-test.csv", "a-texts-train.csv", "package.json", "~$texts.xlsx"], "texts.csv"),
        (["dev.tsv", "train.tsv"], "train.tsv"),
        (["dev.tsv", "notes.md"], ""),
        (["other/b.wav", "other-train.csv"], ""),
    ],
)
def test_recordings_without_texts_are_told_of_a_table_in_the_folder_above(tmp_path, names, named):
    """None that is there to validate or test with."""
    for folder in ("voice", "other"):
        (tmp_path / folder).mkdir()
    for name in ("voice/a.wav", *names):
        (tmp_path / name).touch()
    with pytest.raises(DataError) as caught:
        parts_of(tmp_path / "voice")
    said = f"(in the folder above lies {named})"
    assert said in caught.value.remedy if named else "folder above" not in caught.value.remedy
    assert caught.value.remedy.startswith("Put the text of each recording beside it (a.txt), or name the file")


def test_a_model_given_as_data_is_told(tmp_path, clip):
    """But recordings in a folder beside one are found."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match="is a folder with a model, not with recordings"):
        parts_of(tmp_path)
    write(clip(tmp_path / "voice/a.wav").with_suffix(".txt"), "eins")
    assert texts(tmp_path) == {"a.wav": "eins"}


def test_subtitles_of_one_among_many_pairs_do_not_count(tmp_path, clip):
    """As `transcribe --format srt` leaves them beside a recording that has a text."""
    for number in range(3):
        clip(tmp_path / "d" / f"{number}.wav", seconds=2)
        write(tmp_path / "d" / f"{number}.txt", f"text {number}")
    write(tmp_path / "d" / "1.srt", "1\n00:00:00,000 --> 00:00:01,000\nother words\n")
    assert texts(tmp_path / "d") == {"0.wav": "text 0", "1.wav": "text 1", "2.wav": "text 2"}
