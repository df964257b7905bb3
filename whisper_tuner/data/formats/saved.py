"""Data sets of the datasets library: folders of save_to_disk, parquet and arrow files, and ids on the hub."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from whisper_tuner.data.formats.place import HUB_ID, Place
from whisper_tuner.data.formats.rows import KIND_OF, BadRow, Part, Parts, Reading, Row, check_columns, kind_of_folder
from whisper_tuner.errors import DataError, MissingProgram
from whisper_tuner.problems import Kind

LIBRARY = "datasets"
ON_DISK = ("dataset_dict.json", "state.json")  # what save_to_disk leaves: of several parts, of one
SUFFIXES = (".parquet", ".arrow")
WHY_CUT = "its audio is inside of its files"
INSTALL = "Install it, in this project's folder: .venv/bin/python -m pip install -e '.[datasets]'"
Opened = Any  # datasets.Dataset or IterableDataset: the library is not installed everywhere


def recognises(place: Place) -> bool:
    if place.is_folder:
        return any((place.path / name).is_file() for name in ON_DISK) or bool(_files(place))
    if place.is_file:
        return place.path.suffix.lower() in SUFFIXES
    return HUB_ID.fullmatch(str(place.path)) is not None and not place.path.exists()


def parts(place: Place, reading: Reading) -> Parts:
    """Raises DataError, or MissingProgram without the library."""
    if importlib.util.find_spec(LIBRARY) is None:
        what = f"{place.path}" if place.path.exists() else f"there is no {place.path} here; an id on the hub"
        raise MissingProgram(f"{what} is read by the library {LIBRARY}, which is not installed", remedy=INSTALL)
    library = importlib.import_module(LIBRARY)
    try:
        opened = _opened(library, place)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        remedy = "Check its name, and for one on the hub the network and your access: hf auth login."
        raise DataError(f"{place.path} cannot be opened: {reason}", remedy=remedy) from None
    kinds: dict[str, str] = {}
    for split in opened:
        if (kind := kind_of_folder(split)) and kind not in kinds:
            kinds[kind] = split
    if "train" not in kinds:
        if len(opened) > 1:
            raise DataError(
                f"{place.path} has the parts {', '.join(opened)}, and none is called train",
                remedy="Rename the one to train on.",
            )
        kinds = {"train": next(iter(opened))}
    left = tuple(f"its part {split} is not used" for split in opened if split not in kinds.values())
    return {
        kind: replace(_part(library, place.path, split, opened[split], reading, left), beside=_folders(place, split))
        for kind, split in kinds.items()
    }


def _opened(library: Any, place: Place) -> Mapping[str, Opened]:
    """Open a data set: its parts by the library's own names."""
    if not (place.is_file or place.is_folder):
        name, _, subset = str(place.path).partition(":")
        return library.load_dataset(name, subset or None, streaming=True)
    if place.is_folder and any((place.path / name).is_file() for name in ON_DISK):
        found = library.load_from_disk(str(place.path))
        return found if isinstance(found, dict) else {"train": found}
    files: dict[str, list[str]] = {}
    for path in [place.path] if place.is_file else _files(place):
        files.setdefault(_split_of(path, place), []).append(str(path))
    [form] = {Path(name).suffix.lower().lstrip(".") for names in files.values() for name in names}
    return library.load_dataset(form, data_files=files, streaming=True)


def _files(place: Place) -> list[Path]:
    """Parquet files of a folder, or, without these, arrow files."""
    for suffix in SUFFIXES:
        if found := place.named(f"*{suffix}"):
            return [place.path / file for file in found]
    return []


def _folders(place: Place, split: str) -> tuple[Path, ...]:
    """List the folders of a part's files: the names in an audiofolder's metadata.parquet begin there."""
    files = _files(place) if place.is_folder else []
    return tuple(dict.fromkeys(path.parent for path in files if _split_of(path, place) == split))


def _split_of(path: Path, place: Place) -> str:
    """Tell the part by its name, train-00000-of-00002.parquet, or its folder, fr/train/0.parquet; else it is train."""
    if place.is_file:
        return "train"
    names = (path.stem, *(folder for folder in reversed(path.relative_to(place.path).parent.parts)))
    first = (re.split(r"[-_. ]", name.lower())[0] for name in names)
    return next((name for name in first if name in KIND_OF), "train")


def _part(library: Any, path: Path, split: str, rows: Opened, reading: Reading, notes: Sequence[str]) -> Part:
    features = rows.features or {}
    names = [name.lower() for name in features] or list(next(iter(rows), {}))
    sounds = [name for name in features if isinstance(features[name], library.Audio)]
    audio = reading.audio_column or (sounds[0].lower() if len(sounds) == 1 else "")
    told = Reading(audio_column=audio, text_column=reading.text_column)
    check_columns(path, names, told)
    for name in sounds:  # decoding would need torchcodec, and soundfile does it
        rows = rows.cast_column(name, library.Audio(decode=False))
    used = [name for name in names if name in (*told.audio_names, *told.text_names)]
    facts = {"part": split, "columns": ", ".join(used)}
    facts |= {"other columns": ", ".join(name for name in names if name not in used) or "none"}
    return Part(
        path=path,
        layout="datasets library",
        rows=partial(_rows, rows, split),
        folder=path if path.is_dir() else path.parent,
        reading=told,
        facts=facts,
        notes=tuple(notes),
        cut=WHY_CUT,
        columns=tuple(names),
    )


def _rows(rows: Opened, split: str) -> Iterator[Row]:
    """The line is the row's number."""
    number = 0
    try:
        for number, cells in enumerate(rows, 1):
            named: dict[str, object] = {name.lower(): value for name, value in cells.items()}
            yield Row(number, {"id": f"{split}-{number:07d}", **named}, split)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        yield Row(number + 1, BadRow(Kind.UNREADABLE, f"this row and those after it cannot be read: {reason}"), split)
