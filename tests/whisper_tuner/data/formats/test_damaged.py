"""Damaged and mixed data sets: one message each, with file, line and remedy. No row is lost, and nothing is guessed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from whisper_tuner.data.dataset import load_manifest
from whisper_tuner.data.importing import import_source
from whisper_tuner.errors import DataError, TunerError

# name: (files, source, words of the message, words of the remedy). Where the files have no audio, a.wav and b.wav are
# made beside them.
REFUSED: dict[str, tuple[dict[str, str | bytes], str, str, str]] = {
    "an empty file": ({"l.csv": ""}, "l.csv", "l.csv has no audio column; found: nothing", "audio_path"),
    "two columns of words": (
        {"l.csv": "Datei;Satz;Ort\na.wav;guten Tag;Berlin\nb.wav;gute Nacht;Bonn\n"},
        "l.csv",
        "l.csv: satz and ort may each be its column of text",
        "--text-column satz for `train` and an import",
    ),
    "a sentence of all rows, and a note": (
        {"l.csv": "Datei;Satz;Art\na.wav;hey;laut\nb.wav;hey;laut\na.wav;hey;leise\nb.wav;hey;leise\n"},
        "l.csv",
        "l.csv: satz and art may each be its column of text",
        "--text-column satz for `train` and an import",
    ),
    "an archive": ({"l.zip": "PK"}, "l.zip", "l.zip is an archive", "Unpack it"),
    "two keys of audio": (
        {"l.jsonl": '{"datei": "a.wav", "kopie": "b.wav", "satz": "ja"}'},
        "l.jsonl",
        "datei and kopie may each be its column of audio",
        "--audio-column datei for `train` and an import",
    ),
    "no words": (
        {"l.csv": "Datei;Nr\na.wav;id_1\nb.wav;id_2\n"},
        "l.csv",
        "no text column; found: datei, nr",
        "--text-column nr",
    ),
    "names whose files are gone": (
        {"l.csv": "Datei;Satz\nx.wav;ja\n"},
        "l.csv",
        "found: datei, satz; line 1 was read as: 2 columns between semicolons",
        "--audio-column datei",
    ),
    "an audio column alone": ({"l.csv": "audio,words\na.wav,7\n"}, "l.csv", "no text column", "text_column = words"),
    "neither a header nor its files": (
        {"l.tsv": "10_20_1\tthe first book\n10_20_2\tthe second\n"},
        "l.tsv",
        "no audio column",
        "audio_column = NAME_OR_NUMBER in",
    ),
    "names without their files, no header": (
        {"l.csv": "x.wav,first words\ny.wav,second words\n"},
        "l.csv",
        "no audio column",
        "audio_column = NAME_OR_NUMBER in",
    ),
    "an export of Label Studio": (
        {"l.json": '[{"id": 1, "annotations": [], "data": {"audio": "/data/upload/1/a.wav"}}]'},
        "l.json",
        "what Label Studio exports as JSON",
        "Export JSON-MIN or CSV",
    ),
    "a command of Kaldi": (
        {"d/text": "u1 good morning\n", "d/wav.scp": "u0 a.wav\nu1 flac -dc a.flac |\n"},
        "d",
        "wav.scp line 2 names a command or a part of an archive: flac -dc a.flac |",
        "Write each recording into a file",
    ),
    "a place in an archive of Kaldi": (
        {"d/train/text": "u1 good morning\n", "d/train/wav.scp": "u1 /data/raw_wav.1.ark:17\n"},
        "d",
        "wav.scp line 1 names a command or a part of an archive: /data/raw_wav.1.ark:17",
        "Write each recording into a file",
    ),
    "two columns of text, no header": (
        {"l.csv": "a.wav,anna,hello\nb.wav,bert,good bye\n"},
        "l.csv",
        "its text column cannot be told; line 1 was read as: 1 = a.wav, 2 = anna, 3 = hello",
        "--text-column 2",
    ),
    "a header that is damaged": ({"l.csv": '"audio,text\na.wav,x\n'}, "l.csv", "l.csv line 1: not readable", "quotes"),
    "two delimiters that both fit": (
        {"l.csv": "a.wav,hello there;a.wav\n"},
        "l.csv",
        "its columns may stand between comma or semicolon",
        "--delimiter NAME",
    ),
    "UTF-16 without its mark": (
        {"l.csv": "audio,text\na.wav,words\n".encode("utf-16-le")},
        "l.csv",
        "UTF-16 without the mark",
        "encoding = NAME",
    ),
    "UTF-16 cut short": (
        {"l.csv": "audio,text\na.wav,words\n".encode("utf-16") + b"\x0a"},
        "l.csv",
        "is not UTF-16, as its first bytes say",
        "Save it as UTF-8",
    ),
    "one line in another encoding": (
        {"l.csv": "audio,text\na.wav,déjà\n".encode() + "b.wav,café\n".encode("cp1252")},
        "l.csv",
        "line 3), though other lines are",
        "Mend that line",
    ),
    "Cyrillic of Windows": (
        {"l.csv": "audio,text\na.wav,привет всем\n".encode("cp1251")},
        "l.csv",
        "would be odd as Windows-1252: line 2 says",
        "encoding = NAME",
    ),
    "Japanese": ({"l.csv": "audio,text\na.wav,日本語\n".encode("shift-jis")}, "l.csv", "line 2", "encoding = NAME"),
    "a list that breaks off": (
        {"l.json": '[\n{"audio": "a.wav", "text": "x"},\n{"audio": "b.wav", "te'},
        "l.json",
        "l.json line 3: not JSON",
        "one object a line",
    ),
    "text after a list": (
        {"l.json": '[{"audio": "a.wav", "text": "x"}]\n[{"audio": "b.wav", "text": "y"}]'},
        "l.json",
        "l.json line 2: more text after its list",
        "Remove it",
    ),
    "JSON without audio": ({"l.jsonl": '{"text": "x"}'}, "l.jsonl", "no audio column; found: text", "audio_filepath"),
    "JSON in one object": ({"l.json": '{\n"data": []\n}'}, "l.json", "not JSON", "audio_filepath"),
    "a folder of nothing": ({"d/.hidden": ""}, "d", "it is empty", "name another folder"),
    "a folder of audio alone": ({"d/a.wav": "copy"}, "d", "it holds 1 file (.wav)", "lists your recordings"),
    "a folder of tables that are none": (
        {"d/a.wav": "copy", "d/x.csv": "Tag,Wetter\n1,warm\n", "d/in/y.xlsx": "no zip", "d/z.ods": ""},
        "d",
        "it holds 4 files",
        "\n  in/y.xlsx is no Excel file that can be read: File is not a zip file",
    ),
    "a folder of two data sets": (
        {f"d/{name}/l.csv": "Datei;Satz\n../../a.wav;ja\n" for name in "xy"},
        "d",
        "has several data sets: x, y",
        "Name the folder of one",
    ),
    "a folder of two lists": (
        {"d/x.csv": "audio,text\n", "d/y.csv": "audio,text\n"},
        "d",
        "has several lists: x.csv, y.csv",
        "Name one of these",
    ),
    "two lists for one part": (
        {"d/train/metadata.csv": "file_name,text\na.wav,x\n", "d/metadata.csv": "file_name,text\na.wav,x\n"},
        "d",
        "two lists may be one part",
        "Name one of these",
    ),
    "subtitles and texts": (
        {"d/a.wav": "copy", "d/a.txt": "x", "d/a.srt": "1\n00:00:00,000 --> 00:00:01,000\ny\n"},
        "d",
        "recordings with subtitles, such as a.wav, and others with a text",
        "layout = subtitles or pairs",
    ),
    "a release without any list": (
        {"d/clips/a.wav": "copy", "d/other.tsv": "client_id\tpath\tsentence\n1\ta.wav\tx\n"},
        "d",
        "neither train.tsv nor validated.tsv",
        "Name one of its TSV files",
    ),
    "audio for a list": ({}, "a.wav", "a.wav is not a manifest", "Name the file"),
    "nothing at all": ({}, "gone.csv", "no such manifest: ", "Check the path"),
    "a patch without an id": (
        {"l.csv": "audio,text\na.wav,x\n", "out/patches.csv": "id,text\na.wav\n"},
        "l.csv",
        "patches.csv line 2: not an id and a text",
        "id,text",
    ),
}


@pytest.fixture
def make(tmp_path, audio_file):
    def make(files: dict[str, str | bytes]) -> None:
        for number, name in enumerate(("a.wav", "b.wav")):
            audio_file(tmp_path / name, seconds=1, seed=number)
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            data = (tmp_path / "a.wav").read_bytes() if content == "copy" else content
            path.write_bytes(data if isinstance(data, bytes) else data.encode())

    return make


@pytest.mark.parametrize(("files", "source", "what", "remedy"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_read_is_refused_in_one_message(tmp_path, make, files, source, what, remedy):
    make(files)
    with pytest.raises(DataError) as error:
        import_source(tmp_path / source, tmp_path / "out")
    message, _, advice = str(error.value).partition("\n  ")
    assert what in message and remedy in advice
    assert not (tmp_path / "out" / "train.csv").exists()
    if "out/patches.csv" not in files:
        with pytest.raises(TunerError, match=re.escape(what)):
            load_manifest(tmp_path / source)


# name: (list, its name, {line: words}); the clips that are good are all those that the rows name besides.
LEFT_OUT: dict[str, tuple[str | bytes, str, dict[int, str]]] = {
    "a quote that is never closed": ('audio,text\na.wav,"x\nb.wav,y\n', "l.csv", {2: "check the quotes"}),
    "a comma in the text": (
        "audio,text\na.wav,oui, non\nb.wav,y\n",
        "l.csv",
        {2: "3 fields, but 2 columns: quote text"},
    ),
    "a semicolon in the text": ("audio;text\na.wav;oui; non\nb.wav;y\n", "l.csv", {2: "holds a semicolon"}),
    "too few fields": ("audio,text\na.wav\nb.wav,y\n", "l.csv", {2: "empty text"}),
    "no audio": ("audio,text\n,x\nb.wav,y\n", "l.csv", {2: "no audio path"}),
    "audio that is gone": ("audio,text\nc.wav,x\nb.wav,y\n", "l.csv", {2: "no such audio file"}),
    "a path of another machine": ("audio,text\nC:\\x\\a.wav,x\nb.wav,y\n", "l.csv", {2: "no such audio file"}),
    "two columns that differ": (
        "audio,text,sentence\na.wav,x,y\nb.wav,z,z\n",
        "l.csv",
        {2: "two columns differ (text = x, sentence = y): say which with text_column"},
    ),
    "a line that is no JSON": ('{"audio": "a.wav", "text": "x"}\n{"audio": \n', "l.jsonl", {2: "not JSON"}),
    "an object that is a number": ('[{"audio": "a.wav", "text": "x"}, 7]', "l.json", {1: "not a JSON object"}),
    "a text that is a list": (
        '{"audio": "a.wav", "text": ["x"]}\n{"audio": "b.wav", "text": "y"}',
        "l.jsonl",
        {1: "text is not text"},
    ),
    "a folder for audio": ("audio,text\n.,x\nb.wav,y\n", "l.csv", {2: "."}),
    "a duration that is no number": ("audio,text,duration\na.wav,x,soon\nb.wav,y,1\n", "l.csv", {2: "not a number"}),
    "a duration below zero": ("audio,text,duration\na.wav,x,-1\nb.wav,y,1\n", "l.csv", {2: "lasts -1 s"}),
    "audio that is none": ("audio,text\nl.csv,x\nb.wav,y\n", "l.csv", {2: "cannot be decoded"}),
    "JSON that is no object": (
        '{"audio": "a.wav", "text": "x"}\n[1]\n{"text": "x"}\n',
        "l.jsonl",
        {2: "not a JSON object", 3: "no audio path"},
    ),
    "a duration of another clip": ("audio,text,duration\na.wav,x,9\nb.wav,y,1\n", "l.csv", {2: "says 9 s"}),
    "a language that there is not": ("audio,text,language\na.wav,x,Elvish\nb.wav,y,fr\n", "l.csv", {2: "Elvish"}),
}


@pytest.mark.parametrize(("text", "name", "expected"), LEFT_OUT.values(), ids=LEFT_OUT.keys())
def test_rows_that_cannot_be_used_are_listed_and_the_others_kept(tmp_path, make, text, name, expected):
    make({name: text})
    [train] = import_source(tmp_path / name, tmp_path / "out")
    assert {problem.line for problem in train.problems} == set(expected)
    for problem in train.problems:
        assert expected[problem.line] in problem.what
    assert len(train.samples) == 1
    listed = (tmp_path / "out" / "left-out.csv").read_text()
    assert all(f"{name},{line}," in listed for line in expected)


def test_a_list_of_two_thousand_rows_loses_none(tmp_path, make):
    make({})
    rows = [json.dumps({"audio": f"gone{n}.wav", "text": "x"}) for n in range(2100)]
    Path(tmp_path / "l.jsonl").write_text("\n".join([*rows, json.dumps({"audio": "a.wav", "text": "y"})]))
    manifest = load_manifest(tmp_path / "l.jsonl")
    assert len(manifest.problems) == 2100 and [sample.line for sample in manifest.samples] == [2101]
