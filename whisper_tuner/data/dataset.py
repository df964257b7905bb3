"""Manifests: CSV, TSV or JSON-lines files that name audio and say what is spoken in it.

A row that cannot be used is skipped and listed with its line and the reason; only a manifest that cannot be used at all
is an error.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from whisper_tuner.data.audio_check import SHORTEST_S, AudioIndex
from whisper_tuner.data.problems import Kind, Problem
from whisper_tuner.errors import DataError
from whisper_tuner.files import write_shared
from whisper_tuner.json_text import parse_json
from whisper_tuner.paths import expanded
from whisper_tuner.text import is_unicode

AUDIO_COLUMNS = ("audio", "audio_filepath", "audio_path", "file_name", "path")
TEXT_COLUMNS = ("text", "sentence", "transcription", "transcript")
DURATION_COLUMNS = ("duration_s", "duration")
ID_COLUMNS = ("id",)
MAX_DURATION_S = 30.0  # what Whisper hears at once
RECORD_LINES = 100  # of one record of a CSV: a quote that is open for longer was never closed
# A stated duration this far from the audio's own means another recording, or one cut short.
DIFFERENT_S, DIFFERENT_SHARE = 0.5, 0.1


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One clip and its transcript; `line` is where its manifest names it."""

    id: str
    audio: Path
    text: str
    duration_s: float
    line: int = 0


@dataclass(frozen=True)
class Manifest:
    path: Path
    samples: tuple[Sample, ...]
    problems: tuple[Problem, ...]


class _BadRow(Exception):
    """Why one row is left out."""

    def __init__(self, kind: Kind, what: str):
        super().__init__(what)
        self.kind = kind


Row = tuple[int, dict[str, object] | _BadRow]
"""The line where a row begins, and its cells by lower-case column name."""


def load_manifest(
    path: str | Path,
    *,
    max_duration_s: float = MAX_DURATION_S,
    check_audio: bool = True,
    index: AudioIndex | None = None,
) -> Manifest:
    """Read a manifest; audio paths are relative to its folder. Every file's header is looked at, through `index`.

    `check_audio=False` takes rows on trust, for a host that holds only its own shard of the audio; each row must then
    state its duration.
    Raises DataError for a missing or unreadable file, or a header without an audio and a text column.
    """
    path = Path(path)
    rows = list(_rows(path))
    index = (index or AudioIndex()) if check_audio else None
    if index is not None:
        index.fill(path.parent / name for _, row in rows if (name := _audio_of(row)))
    samples: list[Sample] = []
    problems = []
    seen = _Seen()
    for line, row in rows:
        try:
            if isinstance(row, _BadRow):
                raise row
            sample = _sample(row, line, path.parent, max_duration_s, index)
            seen.check(sample)
            samples.append(sample)
        except _BadRow as reason:
            problems.append(Problem(line, str(reason), reason.kind))
    return Manifest(path, tuple(samples), tuple(problems))


class _Seen:
    """The rows so far, to find a second one of the same id or audio."""

    def __init__(self) -> None:
        self._ids: dict[str, Sample] = {}
        self._audio: dict[str, Sample] = {}

    def check(self, sample: Sample) -> None:
        audio = os.path.normpath(sample.audio)
        if (first := self._audio.get(audio)) and first.text == sample.text:
            raise _BadRow(Kind.SAME_ROW, f"the same audio and text as line {first.line}")
        if first:
            raise _BadRow(Kind.SAME_AUDIO, f"{sample.audio.name} was already used on line {first.line}")
        if first := self._ids.get(sample.id):
            raise _BadRow(Kind.SAME_ID, f"id '{sample.id}' was already used on line {first.line}")
        self._ids[sample.id] = self._audio[audio] = sample


def write_manifest(path: str | Path, samples: Iterable[Sample]) -> None:
    """Write a CSV that `load_manifest` reads back; audio inside the manifest's folder is named relative to it."""
    path = Path(path)
    listing = io.StringIO()
    writer = csv.writer(listing)
    writer.writerow(["id", "audio_path", "transcription", "duration_s"])
    for sample in samples:
        inside = sample.audio.is_relative_to(path.parent)
        audio = sample.audio.relative_to(path.parent) if inside else sample.audio
        writer.writerow([sample.id, audio.as_posix(), sample.text, f"{sample.duration_s:.3f}"])
    write_shared(path, listing.getvalue())


def _rows(path: Path) -> Iterator[Row]:
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # a name longer than names can be
        raise DataError(f"{path}: {error.strerror}", remedy="check the dataset's paths in config.ini") from None
    if is_folder:
        raise DataError(f"{path} is a folder, not a manifest", remedy="name the file: a CSV, or one JSON object a line")
    if not is_file:
        raise DataError(f"no such manifest: {path}", remedy="check the dataset's paths in config.ini")
    read = _json_rows if path.suffix.lower() in (".jsonl", ".json", ".ndjson") else _csv_rows
    return read(path, _text(path))


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", remedy="check its permissions") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path} is not UTF-8 ({error.reason} on line {line})", remedy="save it as UTF-8") from None


def _csv_rows(path: Path, text: str) -> Iterator[Row]:
    records = _csv_records(list(io.StringIO(text, newline="")), "\t" if path.suffix.lower() == ".tsv" else ",")
    _, first = next(records, (1, []))
    if isinstance(first, _BadRow):
        raise DataError(f"{path} line 1: {first}", remedy="check the quotes of its header")
    header = [name.strip().lower() for name in first]
    _check_header(path, header)
    for line, cells in records:
        if isinstance(cells, _BadRow):
            yield line, cells
        elif len(cells) > len(header):  # taking the first ones would cut the text at its comma without a word
            more = f"{len(cells)} fields under a header of {len(header)}: quote text that holds a comma"
            yield line, _BadRow(Kind.COLUMNS, more)
        elif any(cell.strip() for cell in cells):
            yield line, dict(zip(header, cells, strict=False))


def _csv_records(lines: list[str], delimiter: str) -> Iterator[tuple[int, list[str] | _BadRow]]:
    """Each record with the line where it begins; after a damaged one reading goes on with the next line."""
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
            yield start + 1, _BadRow(Kind.QUOTING, f"not readable as CSV: {error}; check the quotes")
            at = start + 1
            reader = csv.reader(feed(), delimiter=delimiter, strict=True)


def _json_rows(path: Path, text: str) -> Iterator[Row]:
    checked = False
    for number, line in enumerate(io.StringIO(text), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line.strip())
        except json.JSONDecodeError as error:
            yield number, _BadRow(Kind.COLUMNS, f"not JSON: {error.msg} at column {error.colno}")
            continue
        except (ValueError, RecursionError) as error:
            yield number, _BadRow(Kind.COLUMNS, f"not JSON: {error}")
            continue
        if not isinstance(row, dict):
            yield number, _BadRow(Kind.COLUMNS, "not a JSON object")
            continue
        if not checked:
            _check_header(path, [name.lower() for name in row])
            checked = True
        yield number, {name.lower(): value for name, value in row.items()}
    if not checked:
        one_list = text.lstrip().startswith("[")
        _check_header(path, ["one JSON list; write one object a line"] if one_list else [])


def _check_header(path: Path, names: list[str]) -> None:
    for what, accepted in (("audio", AUDIO_COLUMNS), ("text", TEXT_COLUMNS)):
        if not any(name in accepted for name in names):
            found = ", ".join(names) or "nothing"
            mixed = len(names) == 1 and re.search(r"[;\t]", names[0])
            tip = "; put commas between columns, or tabs in a file whose name ends in .tsv" if mixed else ""
            raise DataError(
                f"{path} has no {what} column; found: {found}", remedy=f"name it one of {', '.join(accepted)}{tip}"
            )


def _sample(row: dict[str, object], line: int, folder: Path, max_duration_s: float, index: AudioIndex | None) -> Sample:
    name, text = _audio_name(row), _cell(row, TEXT_COLUMNS)
    if not name:
        raise _BadRow(Kind.NO_AUDIO, "no audio path")
    audio = folder / name
    if index is not None and (found := index[audio].kind):
        raise _BadRow(Kind(found), index[audio].what)
    if not text:
        raise _BadRow(Kind.NO_TEXT, "empty text")
    seconds = _duration(_cell(row, DURATION_COLUMNS), audio, index)
    longest = max(seconds, index[audio].seconds) if index is not None else seconds
    if longest > max_duration_s:
        raise _BadRow(Kind.TOO_LONG, f"{name} lasts {longest:.1f} s, more than {max_duration_s:g} s")
    return Sample(id=_cell(row, ID_COLUMNS) or str(name), audio=audio, text=text, duration_s=seconds, line=line)


def _duration(stated: str, audio: Path, index: AudioIndex | None) -> float:
    """Seconds, as stated or else as measured."""
    if not stated:
        if index is None:
            raise _BadRow(Kind.DURATION, "no duration, and its audio is not on this machine")
        return index[audio].seconds
    try:
        seconds = float(stated)
    except ValueError:
        raise _BadRow(Kind.DURATION, f"duration '{stated}' is not a number of seconds") from None
    if not SHORTEST_S <= seconds < float("inf"):
        raise _BadRow(Kind.DURATION, f"{audio.name} lasts {seconds:g} s")
    if index is not None:
        measured = index[audio].seconds
        if abs(seconds - measured) > max(DIFFERENT_S, DIFFERENT_SHARE * measured):
            raise _BadRow(Kind.DURATION, f"{audio.name} lasts {measured:.2f} s, and the manifest says {seconds:g} s")
    return seconds


def _audio_of(row: dict[str, object] | _BadRow) -> Path | None:
    try:
        return _audio_name(row) if isinstance(row, dict) else None
    except _BadRow:
        return None


def _audio_name(row: dict[str, object]) -> Path | None:
    name = _cell(row, AUDIO_COLUMNS)
    return expanded(name) if name else None


def _cell(row: dict[str, object], names: tuple[str, ...]) -> str:
    """The first filled one of these columns, as stripped text."""
    for name in names:
        value = row.get(name)
        if isinstance(value, (dict, list, bool)):
            raise _BadRow(Kind.COLUMNS, f"{name} holds no text: {str(value)[:40]}")
        if value is not None and (text := str(value).strip()):
            if not is_unicode(text):
                raise _BadRow(Kind.COLUMNS, f"{name} holds half a character (a lone surrogate)")
            return text
    return ""
