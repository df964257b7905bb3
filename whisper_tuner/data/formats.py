"""Manifests as files: CSV, TSV and JSON lines become rows of named cells. A new format is a reader in READERS."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from whisper_tuner.data.problems import Kind
from whisper_tuner.errors import DataError
from whisper_tuner.json_text import parse_json
from whisper_tuner.text import is_unicode

AUDIO_COLUMNS = ("audio", "audio_filepath", "audio_path", "file_name", "path")
TEXT_COLUMNS = ("text", "sentence", "transcription", "transcript")
RECORD_LINES = 100  # the longest record of a CSV: a quote that stays open for longer was never closed
NAME_A_FILE = "Name the file: a CSV, or one JSON object a line."


class BadRow(Exception):
    """Why one row is left out."""

    def __init__(self, kind: Kind, what: str):
        super().__init__(what)
        self.kind = kind


Row = tuple[int, dict[str, object] | BadRow]
"""The line where a row begins, and its cells by lower-case column name."""


def manifest_rows(path: Path) -> Iterator[Row]:
    """Raises DataError for a missing or unreadable file, or a header without an audio and a text column."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for, a device has no end
            raise DataError(f"{path} is not a file", remedy=NAME_A_FILE)
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"no such manifest: {path}", remedy="Check the dataset's paths in config.ini.") from None
    except IsADirectoryError:
        raise DataError(f"{path} is a folder, not a manifest", remedy=NAME_A_FILE) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        reason = getattr(error, "strerror", None) or error
        remedy = "Check its permissions, and the dataset's paths in config.ini."
        raise DataError(f"{path} cannot be read: {reason}", remedy=remedy) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path} is not UTF-8 ({error.reason} on line {line})", remedy="Save it as UTF-8.") from None
    return READERS.get(path.suffix.lower(), _csv_rows)(path, text)


def _csv_rows(path: Path, text: str) -> Iterator[Row]:
    records = _csv_records(list(io.StringIO(text, newline="")), "\t" if path.suffix.lower() == ".tsv" else ",")
    _, first = next(records, (1, []))
    if isinstance(first, BadRow):
        raise DataError(f"{path} line 1: {first}", remedy="Check the quotes of its header.")
    header = [name.strip().lower() for name in first]
    _check_header(path, header)
    for line, cells in records:
        if isinstance(cells, BadRow):
            yield line, cells
        elif len(cells) > len(header):  # using only the first ones would silently cut the text at its comma
            more = f"{len(cells)} fields under a header of {len(header)}: quote text that holds a comma"
            yield line, BadRow(Kind.COLUMNS, more)
        elif any(cell.strip() for cell in cells):
            yield line, dict(zip(header, cells, strict=False))


def _csv_records(lines: list[str], delimiter: str) -> Iterator[tuple[int, list[str] | BadRow]]:
    """Each record with the line where it begins; after a damaged record, reading goes on with the next line."""
    at = start = 0

    def feed() -> Iterator[str]:
        nonlocal at
        while at < min(len(lines), start + RECORD_LINES):
            at += 1
            yield lines[at - 1]

    reader = csv.reader(feed(), delimiter=delimiter, strict=True)
    while True:
        start = at
        try:
            yield start + 1, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield start + 1, BadRow(Kind.QUOTING, f"not readable as CSV: {error}; check the quotes")
            at = start + 1
            reader = csv.reader(feed(), delimiter=delimiter, strict=True)


def _json_rows(path: Path, text: str) -> Iterator[Row]:
    checked = False
    for number, line in enumerate(io.StringIO(text), start=1):
        if not line.strip():
            continue
        row = _json_row(line.strip())
        if not checked and isinstance(row, dict):
            _check_header(path, list(row))
            checked = True
        yield number, row
    if not checked:
        one_list = text.lstrip().startswith("[")
        _check_header(path, ["one JSON list; write one object a line"] if one_list else [])


def _json_row(line: str) -> dict[str, object] | BadRow:
    try:
        row = parse_json(line)
    except json.JSONDecodeError as error:
        return BadRow(Kind.COLUMNS, f"not JSON: {error.msg} at column {error.colno}")
    except ValueError as error:
        return BadRow(Kind.COLUMNS, f"not JSON: {error}")
    if not isinstance(row, dict):
        return BadRow(Kind.COLUMNS, "not a JSON object")
    return {name.lower(): value for name, value in row.items()}


def _check_header(path: Path, names: list[str]) -> None:
    for what, accepted in (("audio", AUDIO_COLUMNS), ("text", TEXT_COLUMNS)):
        if not any(name in accepted for name in names):
            found = ", ".join(names) or "nothing"
            mixed = len(names) == 1 and re.search(r"[;\t]", names[0])
            tip = "; put commas between columns, or tabs in a file whose name ends in .tsv" if mixed else ""
            raise DataError(
                f"{path} has no {what} column; found: {found}", remedy=f"Name it one of {', '.join(accepted)}{tip}."
            )


def cell(row: dict[str, object], names: tuple[str, ...]) -> str:
    """The first filled one of these columns, as stripped text."""
    for name in names:
        value = row.get(name)
        if isinstance(value, (dict, list, bool)):
            raise BadRow(Kind.COLUMNS, f"{name} is not text: {str(value)[:40]}")
        if value is not None and (text := str(value).strip()):
            if not is_unicode(text):
                raise BadRow(Kind.COLUMNS, f"{name} holds half a character (a lone surrogate)")
            return text
    return ""


JSON_LINES = dict.fromkeys((".jsonl", ".json", ".ndjson"), _json_rows)
READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {".csv": _csv_rows, ".tsv": _csv_rows, **JSON_LINES}
