"""The parts that lie beside a training set: dev.tsv and test.tsv beside train.tsv, test/ beside train/."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from whisper_tuner.data.formats.audiofolder import LISTS
from whisper_tuner.data.formats.layouts import parts_of
from whisper_tuner.data.formats.lists import STEM
from whisper_tuner.data.formats.place import KIND_OF, Place, kind_of_folder
from whisper_tuner.data.formats.rows import Parts, Reading
from whisper_tuner.errors import DataError, MissingProgram

KINDS = ("train", "validation", "test")


def with_siblings(train: Path, reading: Reading) -> dict[str, Path]:
    """Find the parts beside a training set. A folder of several parts gives way to the one of them to train on.

    Of two that may be the same part, as dev-clean and dev-other, none is taken.
    """
    if Place(train).is_folder and (own := _inside(train, reading)):
        return own
    return {"train": train} | {kind: paths[0] for kind, paths in _beside(train).items() if len(paths) == 1}


def doubtful(train: Path, reading: Reading) -> dict[str, list[Path]]:
    """List by kind the parts of which `with_siblings` takes none, because any of them may be meant."""
    found = _beside(train)
    if Place(train).is_folder:
        found = _each_of(train, _kind_of_subfolder) | found if len(_parts(train, reading)) > 1 else found
    return {kind: paths for kind, paths in found.items() if len(paths) > 1}


def _beside(train: Path) -> dict[str, list[Path]]:
    if Place(train).is_folder:
        return _each_of(train.parent, _kind_of_subfolder) if kind_of_folder(train.name) == "train" else {}
    if train.name in LISTS and kind_of_folder(train.parent.name) == "train":
        return _each_of(train.parent.parent, lambda path: kind_of_folder(path.name), lambda path: path / train.name)
    match = STEM.fullmatch(train.stem)
    if not match or KIND_OF[match[2].lower()] != "train":
        return {}

    def kind(path: Path) -> str | None:
        other = STEM.fullmatch(path.stem)
        alike = other and other[1] == match[1] and path.suffix == train.suffix
        return KIND_OF[other[2].lower()] if alike else None

    return _each_of(train.parent, kind)


def _inside(folder: Path, reading: Reading) -> dict[str, Path]:
    """Parts that have a path of their own; {} for a folder without any."""
    own = {kind: part.path for kind, part in _parts(folder, reading).items() if part.path != folder}
    return own if "train" in own else {}


def _parts(folder: Path, reading: Reading) -> Parts:
    """List the parts that need not be cut."""
    try:
        return {kind: part for kind, part in parts_of(folder, reading).items() if not part.cut}
    except (DataError, MissingProgram):
        return {}  # told where it is read


def _kind_of_subfolder(path: Path) -> str | None:
    return kind_of_folder(path.name) if path.is_dir() else None


def _each_of(
    folder: Path, kind: Callable[[Path], str | None], listed: Callable[[Path], Path] = lambda path: path
) -> dict[str, list[Path]]:
    """List by kind what else than a training set is in the folder."""
    found: dict[str, list[Path]] = {}
    try:
        for path in sorted(folder.iterdir()):
            if (own := kind(path)) and own != "train" and listed(path).exists():
                found.setdefault(own, []).append(listed(path))
    except OSError:
        return {}
    return found
