"""JSON: one object a line, as NeMo's manifests are, or one list of objects."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from whisper_tuner.data.formats.audio_names import USUAL_FOLDERS
from whisper_tuner.data.formats.encoding import read_text
from whisper_tuner.data.formats.rows import BadRow, Part, Reading, Row, check_columns
from whisper_tuner.data.problems import Kind
from whisper_tuner.errors import DataError
from whisper_tuner.json_text import parse_json

NAME = "json"
SUFFIXES = (".jsonl", ".json", ".ndjson")
LIST = re.compile(r"\s*\[\s*[{\]]")


def part(path: Path, reading: Reading) -> Part:
    """Raises DataError for a file that cannot be read, or whose rows have no audio and text."""
    text, encoding, notes = read_text(path, reading)
    return part_of(path, text, encoding, notes, reading)


def part_of(path: Path, text: str, encoding: str, notes: Sequence[str], reading: Reading) -> Part:
    in_list = LIST.match(text) is not None
    rows = _listed if in_list else _lines
    names, odd = _first_names(rows(path, text))
    check_columns(path, names, reading, odd)
    return Part(
        path=path,
        layout=f"{NAME} ({'one list' if in_list else 'one object a line'})",
        rows=lambda: rows(path, text),
        folder=path.parent,
        beside=tuple(path.parent / name for name in USUAL_FOLDERS),
        reading=reading,
        facts={"encoding": encoding, "keys": ", ".join(names)},
        notes=tuple(notes),
    )


def is_row(line: str) -> bool:
    """Tell if a line is an object with an audio and a text key."""
    row, reading = _row(line.strip()), Reading()
    return isinstance(row, dict) and all(
        any(name in accepted for name in row) for accepted in (reading.audio_names, reading.text_names)
    )


def _first_names(rows: Iterator[Row]) -> tuple[list[str], str]:
    """The keys of the first object; without one, what is wrong with the first row."""
    odd = ""
    for row in rows:
        if isinstance(row.cells, dict):
            return list(row.cells), ""
        odd = odd or str(row.cells)
    return [], odd


def _lines(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(io.StringIO(text), start=1):
        if line.strip():
            yield Row(number, _row(line.strip()))


def _row(line: str) -> dict[str, object] | BadRow:
    try:
        row = parse_json(line)
    except json.JSONDecodeError as error:
        return BadRow(Kind.COLUMNS, f"not JSON: {error.msg} at column {error.colno}")
    except ValueError as error:
        return BadRow(Kind.COLUMNS, f"not JSON: {error}")
    return _cells(row)


def _cells(row: object) -> dict[str, object] | BadRow:
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
            raise DataError(
                f"{path} line {where}: not JSON: {reason}", remedy="Mend its list, or write one object a line."
            ) from None
        yield Row(line, _cells(value))


def _skip(text: str, at: int, what: str) -> int:
    while at < len(text) and text[at] in what:
        at += 1
    return at
