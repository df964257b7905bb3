"""Manifests: one file, or a folder that has one for each part (train.csv, dev.csv, test.csv).

A file is a table, or JSON: one object a line, as NeMo's manifests are, or one list of objects.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from whisper_tuner.data.formats import excel, subtitles, table
from whisper_tuner.data.formats.columns import LOOKED_AT, look, named, told_by_content, unclear
from whisper_tuner.data.formats.place import Place, first_line, read_text
from whisper_tuner.data.formats.rows import (
    KIND_OF,
    SPLIT_COLUMNS,
    WRITTEN,
    AudioNames,
    BadRow,
    Cells,
    Part,
    Parts,
    Reading,
    Row,
    check_columns,
    near,
)
from whisper_tuner.errors import DataError
from whisper_tuner.files import AUDIO_SUFFIXES
from whisper_tuner.problems import Kind
from whisper_tuner.text import parse_json

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
SUFFIXES = (".csv", ".tsv", *JSON_SUFFIXES)
SPREADSHEETS = (excel.SUFFIX, *excel.OTHERS)
TABLES = (".csv", ".tsv", excel.SUFFIX)
MOST_TRIED = 50  # tables of a folder; of more, each is the text of one recording
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")
STEM = re.compile(rf"(.*?)[-_. ]?({'|'.join(KIND_OF)})", re.IGNORECASE)
LABEL_STUDIO = {"data", "annotations"}
# FLEURS, without a header: number of the sentence, file, text, text in small letters, its letters, samples, gender.
FLEURS = re.compile(r"\d+\t[^\t]+\.wav(\t[^\t]*){3}\t\d+\t[A-Z]+")
PRINTED = "column 3 is the text as it is printed; column 4, in small letters without punctuation: text_column = 4"
LIST = re.compile(r"\s*\[\s*[{\]]")


def recognises(place: Place) -> bool:
    if place.is_folder:
        return any(map(is_list, place.at_top(*SUFFIXES)))
    return place.path.suffix.lower() not in AUDIO_SUFFIXES and not subtitles.holds_cues(place.path)


def parts(place: Place, reading: Reading) -> Parts:
    """Raises DataError."""
    if not place.is_folder:
        return {"train": part(place.path, reading)}
    listed = [path for path in place.at_top(*SUFFIXES) if is_list(path)]
    # What was split is read whole, and so split in the same way again.
    found: dict[Path, Part | None] = dict.fromkeys(path for path in listed if not _is_split_off(path, place))
    found = found or {**by_content(place, reading)[0]} or dict.fromkeys(listed)
    # Those whose whole name says which part they are; of several for one kind the first.
    chosen = {KIND_OF[path.stem.lower()]: path for path in reversed(found) if path.stem.lower() in KIND_OF}
    if "train" not in chosen:
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise DataError(f"{place.path} has several lists: {names}", remedy="Name one of these files.")
        chosen = {"train": next(iter(found))}
    read = {kind: found[path] or part(path, reading) for kind, path in chosen.items()}
    left = (path.name for path in found if path not in chosen.values())
    notes = (f"{name} is no part, or not the first of its kind, and not used: rename the one you mean" for name in left)
    return read | {"train": replace(read["train"], notes=(*read["train"].notes, *notes))}


def part(path: Path, reading: Reading) -> Part:
    """Raises DataError for a file that cannot be read, or whose rows have no audio and text."""
    if (suffix := path.suffix.lower()) in ARCHIVES:
        raise DataError(f"{path} is an archive", remedy="Unpack it, and name the folder that comes out.")
    if suffix in (excel.SUFFIX, *excel.OTHERS):
        text, sheet, notes = excel.read(path)
        found = table.part_of(path, text, "", notes, replace(reading, delimiter="comma"), quoted=True)
        kept = {name: fact for name, fact in found.facts.items() if name not in ("encoding", "columns between")}
        return replace(found, facts={"sheet": sheet, **kept})
    text, encoding, notes = read_text(path, reading)
    if path.suffix.lower() not in JSON_SUFFIXES and text.lstrip()[:1] not in ("{", "["):
        if FLEURS.fullmatch(text.partition("\n")[0].strip()):
            notes = notes if reading.text_column else [*notes, PRINTED]
            audio, words = reading.audio_column or "2", reading.text_column or "3"
            reading = replace(reading, delimiter="tab", audio_column=audio, text_column=words)
            return table.part_of(path, text, encoding, notes, reading, quoted=False)
        return table.part_of(path, text, encoding, notes, reading)
    in_list = LIST.match(text) is not None
    rows = _listed if in_list else _lines
    looked_at = [*islice(rows(path, text), LOOKED_AT)]
    objects = [row.cells for row in looked_at if not isinstance(row.cells, BadRow)]
    names = [*objects[0]] if objects else []  # the keys of the first object
    if LABEL_STUDIO.issubset(names) and not table.names_both(names, reading):
        what = f"{path} is what Label Studio exports as JSON"
        raise DataError(what, remedy="Export JSON-MIN or CSV, and write your files' names for its /data/upload/... .")
    if not objects:
        check_columns(path, names, reading, str(looked_at[0].cells) if looked_at else "")
    elif not table.names_both(names, reading):
        columns = [[name, *(_shown(cells.get(name)) for cells in objects)] for name in names]
        seen = look(columns, reading, AudioNames(near(path)), has_header=True)
        if len(seen.audio) != 1 or len(seen.text) != 1:
            raise unclear(path, names, seen, reading)
        _, _, reading = named(names, seen, reading)
        notes = [*notes, told_by_content(path, reading, has_header=True)]
    return Part(
        path=path,
        layout=f"json ({'one list' if in_list else 'one object a line'})",
        rows=lambda: rows(path, text),
        folder=path.parent,
        beside=near(path)[1:],
        reading=reading,
        facts={"encoding": encoding, "keys": ", ".join(names)},
        notes=tuple(notes),
        columns=(*names, *(name for name in SPLIT_COLUMNS if name not in names and f'"{name}"' in text.lower())),
    )


def _shown(value: object) -> str:
    """Return what a cell says; of audio that is an object, its path."""
    return str(value.get("path") if isinstance(value, dict) else "" if value is None else value)


def by_content(place: Place, reading: Reading) -> tuple[dict[Path, Part], list[DataError]]:
    """(files of a folder that list its recordings by what is in them, why each of the others does not)."""
    found, refused = {}, list[DataError]()
    for path in place.at_top(*SUFFIXES, ".txt", *SPREADSHEETS)[:MOST_TRIED]:
        if _is_split_off(path, place):
            continue
        try:
            found[path] = part(path, reading)
        except DataError as error:
            refused.append(error)
    return found, refused


def _is_split_off(path: Path, place: Place) -> bool:
    """Tell if we have written it as a part of a table beside it: texte-test.csv, or texte-2-test.csv, of texte.csv."""
    name = STEM.fullmatch(path.stem)
    if not name or first_line(path).split(",")[: len(WRITTEN)] != [*WRITTEN]:
        return False
    wholes = {name[1], re.sub(r"-\d+$", "", name[1])}
    return any(other.stem in wholes for other in place.at_top(*SUFFIXES, ".txt", *SPREADSHEETS))


def is_list(path: Path) -> bool:
    """Tell if a file's first line names an audio and a text column, or is one of FLEURS."""
    line = first_line(path)
    if path.suffix.lower() in JSON_SUFFIXES:
        return is_row(line)
    return table.is_header(line) or FLEURS.fullmatch(line.strip()) is not None


def is_row(line: str) -> bool:
    """Tell if a line is an object with an audio and a text key."""
    row = _row(line.strip())
    return not isinstance(row, BadRow) and table.names_both(list(row), Reading())


def _lines(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(io.StringIO(text), start=1):
        if line.strip():
            yield Row(number, _row(line.strip()))


def _row(line: str) -> Cells | BadRow:
    try:
        return _cells(parse_json(line))
    except json.JSONDecodeError as error:
        return BadRow(Kind.COLUMNS, f"not JSON: {error.msg} at column {error.colno}")
    except ValueError as error:
        return BadRow(Kind.COLUMNS, f"not JSON: {error}")


def _cells(row: object) -> Cells | BadRow:
    if not isinstance(row, dict):
        return BadRow(Kind.COLUMNS, "not a JSON object")
    return {name.lower(): value for name, value in row.items()}


def _listed(path: Path, text: str) -> Iterator[Row]:
    """Raises DataError where the list breaks off: nobody can tell where its next object would begin."""
    decoder, line, before = json.JSONDecoder(), 1, 0
    at = text.index("[") + 1
    while True:
        at = _skip(text, at, " \t\r\n,")
        if text[at : at + 1] == "]":
            if (after := _skip(text, at + 1, " \t\r\n")) < len(text):
                where = line + text.count("\n", before, after)
                raise DataError(f"{path} line {where}: more text after its list", remedy="Remove it.")
            return
        line, before = line + text.count("\n", before, at), at
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", "") or "brackets nested too deeply, or a number of too many digits"
            where = line + text.count("\n", before, getattr(error, "pos", before))
            remedy = "Mend its list, or write one object a line."
            raise DataError(f"{path} line {where}: not JSON: {reason}", remedy=remedy) from None
        yield Row(line, _cells(value))


def _skip(text: str, at: int, what: str) -> int:
    while at < len(text) and text[at] in what:
        at += 1
    return at
