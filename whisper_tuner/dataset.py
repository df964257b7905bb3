"""Manifests: CSV, TSV or JSON-lines files that name audio and say what is spoken in it.

A row that cannot be used is skipped and listed with its line and the reason; only a manifest that cannot be used at all
is an error.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from whisper_tuner.audio import duration
from whisper_tuner.errors import DataError, TunerError

AUDIO_COLUMNS = ("audio", "audio_filepath", "audio_path", "file_name", "path")
TEXT_COLUMNS = ("text", "sentence", "transcription", "transcript")
DURATION_COLUMNS = ("duration_s", "duration")
ID_COLUMNS = ("id",)
MAX_DURATION_S = 30.0  # what Whisper hears at once


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One clip and its transcript; `line` is where its manifest names it."""

    id: str
    audio: Path
    text: str
    duration_s: float
    line: int = 0


@dataclass(frozen=True)
class Problem:
    """A row (or sample) left out, and why; line 0 when no manifest line is known."""

    line: int
    what: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.what}" if self.line else self.what


@dataclass(frozen=True)
class Manifest:
    path: Path
    samples: tuple[Sample, ...]
    problems: tuple[Problem, ...]


class _BadRow(Exception):
    """Why one row is left out."""


def load_manifest(path: str | Path, *, max_duration_s: float = MAX_DURATION_S, check_audio: bool = True) -> Manifest:
    """Read a manifest; audio paths are relative to its folder.

    A missing duration column is measured from the audio's header. `check_audio=False` takes rows on trust, for a host
    that holds only its own shard of the audio; each row must then state its duration.
    Raises DataError for a missing or unreadable file, or a header without an audio and a text column.
    """
    path = Path(path)
    samples: dict[str, Sample] = {}
    problems = []
    for line, row in _rows(path):
        try:
            sample = _sample(row, line, path.parent, max_duration_s, check_audio)
            if sample.id in samples:
                raise _BadRow(f"id '{sample.id}' was already used on line {samples[sample.id].line}")
            samples[sample.id] = sample
        except _BadRow as reason:
            problems.append(Problem(line, str(reason)))
    return Manifest(path, tuple(samples.values()), tuple(problems))


def write_manifest(path: str | Path, samples: Iterable[Sample]) -> None:
    """Write a CSV that `load_manifest` reads back; audio inside the manifest's folder is named relative to it."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "audio_path", "transcription", "duration_s"])
        for sample in samples:
            inside = sample.audio.is_relative_to(path.parent)
            audio = sample.audio.relative_to(path.parent) if inside else sample.audio
            writer.writerow([sample.id, audio.as_posix(), sample.text, f"{sample.duration_s:.3f}"])
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, object] | _BadRow]]:
    if not path.is_file():
        raise DataError(f"no such manifest: {path}", remedy="check the dataset's paths in config.ini")
    read = _json_rows if path.suffix.lower() in (".jsonl", ".json", ".ndjson") else _csv_rows
    try:
        yield from read(path)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 ({error.reason} at byte {error.start})", remedy="save it as UTF-8"
        ) from None
    except csv.Error as error:
        raise DataError(f"{path} is not a readable CSV: {error}", remedy="check the quotes") from None


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, object] | _BadRow]]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header = [name.strip() for name in next(reader, [])]
        _check_header(path, header)
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) > len(header):  # taking the first ones would cut the text at its comma without a word
                more = f"{len(cells)} fields under a header of {len(header)}: quote text that holds a comma"
                yield reader.line_num, _BadRow(more)
            else:
                yield reader.line_num, dict(zip(header, cells, strict=False))


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, object] | _BadRow]]:
    checked = False
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.rstrip())
            except json.JSONDecodeError as error:
                yield number, _BadRow(f"not JSON: {error.msg} at column {error.colno}")
                continue
            if not isinstance(row, dict):
                yield number, _BadRow("not a JSON object")
                continue
            if not checked:
                _check_header(path, list(row))
                checked = True
            yield number, row
    if not checked:
        _check_header(path, [])


def _check_header(path: Path, names: list[str]) -> None:
    for what, accepted in (("audio", AUDIO_COLUMNS), ("text", TEXT_COLUMNS)):
        if not any(name.lower() in accepted for name in names):
            found = ", ".join(names) or "nothing"
            raise DataError(
                f"{path} has no {what} column; found: {found}", remedy=f"name it one of {', '.join(accepted)}"
            )


def _sample(
    row: dict[str, object] | _BadRow, line: int, folder: Path, max_duration_s: float, check_audio: bool
) -> Sample:
    if isinstance(row, _BadRow):
        raise row
    named = {str(name).lower(): value for name, value in row.items()}
    audio_name = _cell(named, AUDIO_COLUMNS)
    text = _cell(named, TEXT_COLUMNS)
    if not audio_name:
        raise _BadRow("no audio path")
    audio = folder / Path(audio_name).expanduser()
    if check_audio and not audio.is_file():
        raise _BadRow(f"no such audio file: {audio}")
    if not text:
        raise _BadRow("empty text")
    seconds = _duration(_cell(named, DURATION_COLUMNS), audio, check_audio)
    if seconds > max_duration_s:
        raise _BadRow(f"{audio_name} lasts {seconds:.1f} s, more than {max_duration_s:g} s")
    return Sample(id=_cell(named, ID_COLUMNS) or audio_name, audio=audio, text=text, duration_s=seconds, line=line)


def _duration(stated: str, audio: Path, check_audio: bool) -> float:
    """Seconds, as stated or else as measured."""
    if stated:
        try:
            seconds = float(stated)
        except ValueError:
            raise _BadRow(f"duration '{stated}' is not a number of seconds") from None
    elif not check_audio:
        raise _BadRow("no duration, and its audio is not on this machine")
    else:
        try:
            seconds = duration(audio)
        except TunerError as error:
            raise _BadRow(" - ".join(str(error).split("\n  "))) from None
    if not 0 < seconds < float("inf"):
        raise _BadRow(f"{audio.name} lasts {seconds:g} s")
    return seconds


def _cell(named: dict[str, object], names: tuple[str, ...]) -> str:
    """The first filled one of these columns, as stripped text."""
    values = (named.get(name) for name in names)
    return next((text for value in values if value is not None and (text := str(value).strip())), "")
