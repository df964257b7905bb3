"""Manifests: one file, or a folder that has one for each part (train.csv, dev.csv, test.csv)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from whisper_tuner.data.formats import json_rows, subtitles, table
from whisper_tuner.data.formats.encoding import read_text
from whisper_tuner.data.formats.place import KIND_OF, Place, first_line
from whisper_tuner.data.formats.rows import Part, Parts, Reading
from whisper_tuner.errors import DataError
from whisper_tuner.paths import AUDIO_SUFFIXES

SUFFIXES = (".csv", ".tsv", *json_rows.SUFFIXES)
STEM = re.compile(rf"(.*?)[-_. ]?({'|'.join(KIND_OF)})", re.IGNORECASE)


def recognises(place: Place) -> bool:
    if place.is_folder:
        return bool(_lists(place))
    return place.path.suffix.lower() not in (*AUDIO_SUFFIXES, *subtitles.SUFFIXES)


def parts(place: Place, reading: Reading) -> Parts:
    """Raises DataError."""
    if not place.is_folder:
        return {"train": part(place.path, reading)}
    found = _lists(place)
    grouped = kinds(found)
    if "train" not in grouped and len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise DataError(f"{place.path} has several lists: {names}", remedy="Name one of these files.")
    chosen = grouped if "train" in grouped else {"train": found[0]}
    read = {kind: part(path, reading) for kind, path in chosen.items()}
    left = (path.name for path in found if path not in chosen.values())
    notes = (f"{name} is no part, or not the first of its kind, and not used: rename the one you mean" for name in left)
    return read | {"train": replace(read["train"], notes=(*read["train"].notes, *notes))}


def part(path: Path, reading: Reading) -> Part:
    """Raises DataError."""
    text, encoding, notes = read_text(path, reading)
    is_json = path.suffix.lower() in json_rows.SUFFIXES or text.lstrip()[:1] in ("{", "[")
    return (json_rows if is_json else table).part_of(path, text, encoding, notes, reading)


def is_list(path: Path) -> bool:
    """Tell if a file's first line names an audio and a text column."""
    line = first_line(path)
    return json_rows.is_row(line) if path.suffix.lower() in json_rows.SUFFIXES else table.is_header(line)


def kinds(paths: list[Path]) -> dict[str, Path]:
    """Sort the files whose whole name says which part they are by kind."""
    return {KIND_OF[path.stem.lower()]: path for path in reversed(paths) if path.stem.lower() in KIND_OF}


def _lists(place: Place) -> list[Path]:
    return [path for path in place.at_top(*SUFFIXES) if is_list(path)]
