"""A Common Voice release: TSV files without quoting, and the audio in clips/ beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from whisper_tuner.data.formats.place import Place, first_line, read_text
from whisper_tuner.data.formats.rows import BadRow, Part, Parts, Reading, Row
from whisper_tuner.errors import DataError
from whisper_tuner.problems import Kind

CLIPS = "clips"
COLUMNS = {"client_id", "path", "sentence"}
FILES = {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}
ALL = "validated.tsv"  # the release's own parts leave most of it out, so that each speaker and text is in one of them


def recognises(place: Place) -> bool:
    if place.is_file:
        return _is_ours(place.path)
    return any(map(_is_ours, place.at_top(".tsv"))) or bool(_languages(place))


def parts(place: Place, reading: Reading) -> Parts:
    """Raises DataError."""
    if place.is_file:
        return {"train": _part(place.path, reading)}
    folder = place.path
    if not any(map(_is_ours, place.at_top(".tsv"))):
        folder, *others = _languages(place)
        if others:
            names = ", ".join(path.name for path in (folder, *others))
            raise DataError(f"{place.path} has several languages: {names}", remedy="Name the folder of one of them.")
    found = {kind: folder / name for kind, name in FILES.items() if (folder / name).is_file()}
    if "train" not in found:
        if not (folder / ALL).is_file():
            raise DataError(f"{folder} has neither {FILES['train']} nor {ALL}", remedy="Name one of its TSV files.")
        note = f"there is no {FILES['train']}: {ALL} is used, of which there are no parts"
        return {"train": replace(_part(folder / ALL, reading), notes=(note,))}
    return {kind: _part(path, reading) for kind, path in found.items()}


def _part(path: Path, reading: Reading) -> Part:
    text, encoding, notes = read_text(path, reading)
    first = next(_rows("\n".join(text.split("\n", 2)[:2])), None)
    header = [name.strip().lower() for name in text.partition("\n")[0].split("\t")]
    told = Reading(audio_column=reading.audio_column or "path", text_column=reading.text_column or "sentence")
    used = {told.audio_column, told.text_column, "client_id"}
    return Part(
        path=path,
        layout="Common Voice",
        rows=partial(_rows, text),
        folder=path.parent / CLIPS,
        reading=told,
        facts={
            "encoding": encoding,
            "columns between": "tab, without quoting",
            "audio column": told.audio_column,
            "text column": told.text_column,
            "speaker column": "client_id",
            "other columns": ", ".join(name for name in header if name not in used) or "none",
        },
        notes=tuple(notes),
        # Of the first row, such as zh-CN.
        language=str(first.cells.get("locale", "")) if first and not isinstance(first.cells, BadRow) else "",
    )


def _rows(text: str) -> Iterator[Row]:
    lines = text.split("\n")
    header = [name.strip().lower() for name in lines[0].rstrip("\r").split("\t")]
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        cells = line.rstrip("\r").split("\t")
        if len(cells) > len(header):
            yield Row(number, BadRow(Kind.COLUMNS, f"{len(cells)} fields, but {len(header)} columns"))
        else:
            yield Row(number, dict(zip(header, map(_unquoted, cells), strict=False)))


def _unquoted(cell: str) -> str:
    """Some sentences of some releases are quoted after all, with each quote in them doubled."""
    inside = cell[1:-1]
    if len(cell) > 1 and cell[0] == cell[-1] == '"' and '""' in inside and '"' not in inside.replace('""', ""):
        return inside.replace('""', '"')
    return cell


def _is_ours(path: Path) -> bool:
    names = {name.strip().lower() for name in first_line(path).split("\t")}
    return path.suffix.lower() == ".tsv" and names >= COLUMNS and (path.parent / CLIPS).is_dir()


def _languages(place: Place) -> list[Path]:
    """Folders of a release of several languages, as it is unpacked: cv-corpus-17.0/fr/."""
    if not place.is_folder:
        return []
    below = sorted(path for path in place.path.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [path for path in below if any(map(_is_ours, Place(path).at_top(".tsv")))]
