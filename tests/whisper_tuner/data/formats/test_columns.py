"""Lists whose columns have names that nobody knows, or none: what is in them tells, or they are refused by name."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from openpyxl import Workbook

from whisper_tuner.data.dataset import load_manifest
from whisper_tuner.data.formats.rows import AS_IT_IS, AudioNames, Reading, near
from whisper_tuner.data.importing import import_source

ROWS = [["a1.wav", "Guten Tag!", "2.1"], ["a2.wav", "Nein, danke.", "2 s"], ["a3.wav", "ja", "0:03"]]
TEXTS = {name: text for name, text, _ in ROWS}


def table(rows: list[list[str]], mark: str) -> str:
    return "".join(mark.join(row) + "\n" for row in rows)


def workbook(path: Path, *sheets: list[list[str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    book = Workbook()
    for number, rows in enumerate(sheets):
        sheet = book.worksheets[0] if not number else book.create_sheet()
        sheet.title = f"Tab{number}"
        for line, row in enumerate(rows, 1):
            for column, text in enumerate(row, 1):
                if text:  # what is empty is not there
                    sheet.cell(line, column, int(text) if text.isdigit() else text)
    book.save(path)
    return path


@pytest.fixture
def audio(tmp_path, audio_file):
    def make(folder: str = "", names=TEXTS) -> Path:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for number, name in enumerate(names):
            audio_file(tmp_path / folder / name, seconds=1, seed=number)
        return tmp_path

    return make


def texts(path: Path, reading: Reading = AS_IT_IS) -> dict[str, str]:
    return {sample.audio.name: sample.text for sample in load_manifest(path, reading=reading).samples}


# The header of each: file, words, length. None: there is no header.
HEADERS = [
    ["Datei", "Text", "Länge"],
    ["fichier", "phrase", "durée"],
    ["Aufnahme", "Was gesagt wurde", ""],
    ["Файл", "Фраза", "Длина"],
    ["録音", "文", "秒"],
    ["filename", "Satz", "Dauer"],
    ["Nr.", "Nr.", "Nr."],
    None,
]


FORMS = ["tsv", "xlsx", "json", "jsonl", "semicolon.csv", "no suffix.csv", "reversed.csv", "quoted.csv"]
CASES = [(header, "csv") for header in HEADERS] + [(HEADERS[0], form) for form in FORMS]
# Where rows have keys, each is another one.
CASES += [(header, form) for header in HEADERS[-2:] for form in FORMS if "json" not in form]


@pytest.mark.parametrize(
    ("header", "form"), CASES, ids=lambda one: one if isinstance(one, str) else (one or ["none"])[0]
)
def test_columns_are_found_by_what_is_in_them_and_that_is_said(audio, header, form):
    folder, kind = audio(), form.rpartition(".")[2]
    rows = [[name.removesuffix(".wav") if form.startswith("no") else name, *rest] for name, *rest in ROWS]
    if form == "reversed.csv":
        rows, header = [row[::-1] for row in rows], header and header[::-1]
    whole, path = [header, *rows] if header else rows, folder / f"list.{form}"
    if kind == "xlsx":
        workbook(path, whole)
    elif kind.startswith("json"):
        objects = [json.dumps(dict(zip(header, row, strict=True))) for row in rows]
        path.write_text("\n".join(objects) if kind == "jsonl" else f"[{','.join(objects)}]")
    else:
        mark = {"tsv": "\t", "semicolon.csv": ";", "quoted.csv": '","'}.get(form, "|")
        text = table(whole, mark)
        path.write_text(re.sub("^|$", '"', text.strip(), flags=re.MULTILINE) if form == "quoted.csv" else text)
    assert texts(path) == TEXTS
    [note] = [note for note in load_manifest(path).notes if " is audio, column " in note]
    assert ("has no header" in note) == (header is None)
    if header and len(set(header)) == 3:
        named = dict(zip([row.lower() for row in header], rows[0], strict=True))
        audio_column, text_column = note.partition(": column ")[2].removesuffix(" is text").split(" is audio, column ")
        assert (named[audio_column], named[text_column]) == (rows[0][-1 if form[0] == "r" else 0], "Guten Tag!")
        chosen = Reading(audio_column=audio_column, text_column=text_column)
        assert texts(path, chosen) == TEXTS


@pytest.mark.parametrize(
    ("folder", "listed"),
    [
        ("", "liste.csv"),
        ("", "liste.txt"),
        ("recordings", "texts.xlsx"),
        ("Meine Aufnahmen", "texts.xlsx"),
        ("Aufnahmen/2024", "Aufnahmen/texts.csv"),
        ("corpus/audio", "corpus/texts.csv"),
        ("corpus", "corpus/texts.xlsx"),
        ("audio", "texts/list.jsonl"),
    ],
)
def test_a_folder_of_recordings_with_one_list_is_imported_as_it_is(audio, tmp_path, folder, listed):
    place, path = audio(f"in/{folder}") / "in", tmp_path / "in" / listed
    path.parent.mkdir(parents=True, exist_ok=True)
    (place / "README.txt").write_text("Recorded at home.\n")
    (place / "__MACOSX").mkdir()
    rows = [["Datei", "Satz", "Länge"], *ROWS]
    if path.suffix == ".xlsx":
        workbook(path, [["Unsere Aufnahmen"], [], *rows], [["x"]])
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"Datei": name, "Satz": text}) for name, text, _ in ROWS))
    else:
        path.write_text(table(rows, ";"))
    [train] = import_source(place, tmp_path / "out")
    assert {sample.audio.name: sample.text for sample in train.samples} == TEXTS and not train.problems
    assert any("column datei is audio, column satz is text" in note for note in train.notes)
    assert texts(tmp_path / "out" / "train.csv") == TEXTS
    if path.suffix == ".xlsx":
        assert any("of its sheets only Tab0 is read" in note for note in train.notes)
        assert any("not used, since it stands alone in its row: Unsere Aufnahmen" in note for note in train.notes)
        assert [sample.line for sample in train.samples] == [4, 5, 6]


def test_a_file_that_is_in_two_folders_or_in_that_of_another_part_is_not_taken(audio, tmp_path):
    for folder in ("anna", "bert", "test"):
        audio(folder, ["1.wav"])
    audio("anna", ["2.wav"])
    audio("test", ["3.wav"])
    (tmp_path / "l.csv").write_text("audio,text\n1.wav,eins\n2.wav,zwei\n3.wav,drei\n")
    manifest = load_manifest(tmp_path / "l.csv")
    assert [sample.text for sample in manifest.samples] == ["zwei"]
    assert [problem.what.partition(str(tmp_path))[0] for problem in manifest.problems] == [
        "1.wav may be anna/1.wav or bert/1.wav: write its folder, too",
        "no such audio file: ",
    ]


NUMBERS = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht"]
REMARKED = [[f"{number}.wav", text, "Lärm" if number == 3 else "gut"] for number, text in enumerate(NUMBERS, 1)]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([["Nr", "Datei", "Satz"], ["1", "1.wav", "eins"], ["2", "2.wav", "zwei"]], ("datei", "satz")),
        ([["Sprecher", "Datei", "Satz"], ["Anna", "1", "eins"], ["Anna", "2", "zwei"]], ("datei", "satz")),
        ([["speaker", "Datei", "Satz"], ["Anna", "1", "eins"], ["Bert", "2", "zwei"]], ("datei", "satz")),
        ([["Datei", "Satz", "Notiz"], *REMARKED], ("datei", "satz")),
        ([["Satz", "Datei"], ["", "1.wav"], ["zwei", "2.wav"]], ("datei", "satz")),
        ([["Stufe", "Datei", "Satz"], ["1", "1", "A"], ["1", "2", "B"]], ("datei", "satz")),
        ([["9", "8.wav", "fort"], ["1", "1.wav", "eins"], ["2", "2.wav", "zwei"]], ("2", "3")),
        ([["Datei", "Satz"], ["1.wav", "你好"], ["2.wav", "好"]], ("datei", "satz")),
        ([["Datei", "Kürzel", "Satz"], ["1.wav", "x_1", "Ja."], ["2.wav", "x_2", "„Nein“"]], ("datei", "satz")),
    ],
)
def test_other_columns_are_not_taken_for_these(audio, rows, found):
    folder = audio("", ["1.wav", "2.wav"])
    (folder / "l.csv").write_text(table(rows, ";"))
    manifest = load_manifest(folder / "l.csv")
    assert "column {} is audio, column {} is text".format(*found) in manifest.notes[0]
    assert len(manifest.samples) + len(manifest.problems) == len(rows) - (found[0] == "datei")
    assert all(sample.text in ("eins", "zwei", "A", "B", "你好", "好", "Ja.", "„Nein“") for sample in manifest.samples)


def test_a_locale_is_a_language_and_one_that_whisper_does_not_know_is_said(audio):
    folder = audio()
    (folder / "l.csv").write_text("audio,text,locale\na1.wav,oui,fr-CA\na2.wav,ja,\na3.wav,qapla,tlh\n")
    manifest = load_manifest(folder / "l.csv")
    assert [sample.language for sample in manifest.samples] == ["fr", "", ""] and not manifest.problems
    assert "Whisper knows no language 'tlh', so it is not used (1 row)" in manifest.notes[0]


def test_any_layout_may_be_one_folder_deeper(audio, tmp_path):
    audio("Downloads/LJSpeech-1.1/wavs")
    (tmp_path / "Downloads/LJSpeech-1.1/metadata.csv").write_text("a1|Guten Tag!\na2|Nein, danke.\na3|ja\n")
    [train] = import_source(tmp_path / "Downloads", tmp_path / "out")
    assert {sample.audio.name: sample.text for sample in train.samples} == TEXTS
    assert train.notes[0] == "the data set is in its folder LJSpeech-1.1"


def test_a_folder_is_listed_once_however_many_names_are_looked_for(audio, monkeypatch):
    names, listed, scan = AudioNames(near(audio() / "l.csv")), [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scan(path))
    assert not any(names.exists(f"gone {number}") for number in range(100)) and names.exists("A1")
    assert len(listed) < 30
