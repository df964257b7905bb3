"""Hugging Face's audiofolder: metadata.csv or metadata.jsonl with a file_name column, in the folder or in its parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from whisper_tuner.data.formats import lists
from whisper_tuner.data.formats.place import Place, first_line
from whisper_tuner.data.formats.rows import AUDIO_COLUMNS, BadRow, Part, Parts, Reading, Row, cell, kind_of_folder
from whisper_tuner.data.formats.table import is_header
from whisper_tuner.errors import DataError

LISTS = ("metadata.csv", "metadata.jsonl")
NAMED_BY = "file_name"


def recognises(place: Place) -> bool:
    if place.is_file:
        return place.path.name in LISTS and _names_files(place.path)
    return bool(_found(place))


def parts(place: Place, reading: Reading) -> Parts:
    """Raises DataError."""
    if place.is_file:
        return _by_first_folder(_part(place.path, reading))
    found = _found(place)
    inside = {kind: path for path in found if (kind := kind_of_folder(path.parent.name)) and path.parent != place.path}
    if "train" in inside:
        if len(inside) < len(found):
            names = ", ".join(str(path.relative_to(place.path)) for path in found)
            raise DataError(f"{place.path}: two lists may be one part: {names}", remedy="Name one of these files.")
        return {kind: _part(path, reading) for kind, path in inside.items()}
    if len(found) > 1:
        names = ", ".join(str(path.relative_to(place.path)) for path in found)
        raise DataError(f"{place.path} has several lists: {names}", remedy="Name one of these files.")
    return _by_first_folder(_part(found[0], reading))


def _found(place: Place) -> list[Path]:
    """Find metadata in the folder itself and one level below, or two (data/train)."""
    near = [file for file in place.named(*LISTS) if len(file.parts) <= 3]
    return [path for file in near if _names_files(path := place.path / file)]


def _names_files(path: Path) -> bool:
    line = first_line(path)
    return NAMED_BY in line.lower() and (is_header(line) or lists.is_row(line))


def _part(path: Path, reading: Reading) -> Part:
    told = reading if reading.audio_column else replace(reading, audio_column=NAMED_BY)
    return replace(lists.part(path, told), layout="audiofolder")


def _by_first_folder(whole: Part) -> Parts:
    """One list for all parts, told apart by the first folder of each file's name; only if all have one."""
    kinds = {_kind(row) for row in whole.rows()}
    if None in kinds or "train" not in kinds:
        return {"train": whole}
    notes = (*whole.notes, "its rows belong to train, validation or test by the folder that they name")
    return {kind: whole.only(_kind, kind, notes) for kind in sorted(map(str, kinds))}


def _kind(row: Row) -> str | None:
    """Return the part of a row; one that cannot be read goes to train, where it is listed as left out."""
    if isinstance(row.cells, BadRow):
        return "train"
    name = str(row.cells.get(NAMED_BY) or cell(row.cells, AUDIO_COLUMNS))
    first, slash, _ = name.replace("\\", "/").partition("/")
    return kind_of_folder(first) if slash else None
