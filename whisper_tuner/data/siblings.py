"""The parts that lie beside a training set: dev.tsv and test.tsv beside train.tsv, test/ beside train/."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from whisper_tuner.data.formats import parts_of
from whisper_tuner.data.formats.audiofolder import LISTS
from whisper_tuner.data.formats.lists import STEM
from whisper_tuner.data.formats.place import KIND_OF, Place, kind_of_folder
from whisper_tuner.data.formats.rows import Reading
from whisper_tuner.errors import DataError, MissingProgram

KINDS = ("train", "validation", "test")


def with_siblings(train: Path, reading: Reading) -> dict[str, Path]:
    """By kind. What is named as `train` and is a folder of several parts gives way to the one of them to train on.

    Of two that may be the same part, as dev-clean and dev-other, none is taken.
    """
    if Place(train).is_folder:
        return _inside(train, reading) or {"train": train} | _folders_beside(train)
    if train.name in LISTS and kind_of_folder(train.parent.name) == "train":
        return {"train": train} | _one_each(
            train.parent.parent, lambda path: kind_of_folder(path.name), lambda path: path / train.name
        )
    match = STEM.fullmatch(train.stem)
    if not match or KIND_OF[match[2].lower()] != "train":
        return {"train": train}

    def kind(path: Path) -> str | None:
        other = STEM.fullmatch(path.stem)
        alike = other and other[1] == match[1] and path.suffix == train.suffix
        return KIND_OF[other[2].lower()] if alike else None

    return {"train": train} | _one_each(train.parent, kind, lambda path: path)


def _inside(folder: Path, reading: Reading) -> dict[str, Path]:
    """Parts that have a path of their own; {} for a folder without any."""
    try:
        found = {kind: part.path for kind, part in parts_of(folder, reading).items() if not part.cut}
    except (DataError, MissingProgram):
        return {}  # told where it is read
    own = {kind: path for kind, path in found.items() if path != folder}
    return own if "train" in own else {}


def _folders_beside(train: Path) -> dict[str, Path]:
    if kind_of_folder(train.name) != "train":
        return {}
    return _one_each(train.parent, lambda path: kind_of_folder(path.name) if path.is_dir() else None, lambda path: path)


def _one_each(folder: Path, kind: Callable[[Path], str | None], listed: Callable[[Path], Path]) -> dict[str, Path]:
    found: dict[str, list[Path]] = {}
    try:
        for path in sorted(folder.iterdir()):
            if (own := kind(path)) and own != "train" and listed(path).exists():
                found.setdefault(own, []).append(listed(path))
    except OSError:
        return {}
    return {own: paths[0] for own, paths in found.items() if len(paths) == 1}
