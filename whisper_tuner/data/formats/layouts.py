"""Layouts of data sets. Each has a file here, which says what it recognises and what parts it has, and a line below.

Parts may also lie beside a training set: dev.tsv and test.tsv beside train.tsv, test/ beside train/.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from exogym.config import nearest
from whisper_tuner.data.formats import (
    audiofolder,
    common_voice,
    kaldi,
    librispeech,
    lists,
    ljspeech,
    pairs,
    saved,
    subtitles,
)
from whisper_tuner.data.formats.place import KIND_OF, NAME_A_FILE, Place, kind_of_folder, read_bytes
from whisper_tuner.data.formats.rows import AS_IT_IS, BadRow, Part, Parts, Reading
from whisper_tuner.errors import DataError, MissingProgram


class Layout(Protocol):
    """A module of this package."""

    def recognises(self, place: Place) -> bool: ...

    def parts(self, place: Place, reading: Reading) -> Parts:
        """Raises DataError."""


# The first one that recognises a data set reads it. A folder that both of the last two recognise is refused.
LAYOUTS: dict[str, Layout] = {
    "common-voice": common_voice,
    "ljspeech": ljspeech,
    "datasets": saved,
    "audiofolder": audiofolder,
    "librispeech": librispeech,
    "kaldi": kaldi,
    "lists": lists,
    "subtitles": subtitles,
    "pairs": pairs,
}
BESIDE = ("subtitles", "pairs")


def parts_of(path: Path, reading: Reading = AS_IT_IS) -> Parts:
    """List the parts of a data set: a file, a folder, or one on the hub. Raises DataError where no layout fits."""
    place = Place(path)
    if reading.layout:
        if reading.layout not in LAYOUTS:
            what = f"there is no layout {reading.layout!r}{nearest(reading.layout, LAYOUTS)}"
            raise DataError(what, remedy=f"Known: {', '.join(LAYOUTS)}.")
        layout = LAYOUTS[reading.layout]
        if not place.is_file and not layout.recognises(place):
            raise _unknown(place, f"has no data set of the layout {reading.layout}")
        return layout.parts(place, reading)
    found = [name for name, layout in LAYOUTS.items() if layout.recognises(place)]
    if not found:
        raise _unknown(place, "is a folder of no layout that is known")
    if found[0] in BESIDE and len(found) > 1 and not _subtitles_say_all(place, reading):
        raise DataError(
            f"{path} has recordings with subtitles and recordings with a text beside them",
            remedy=f"Say which: layout = {found[0]} or {found[1]} in the dataset's section, --layout for an import.",
        )
    return LAYOUTS[found[0]].parts(place, reading)


def part_of(path: Path, reading: Reading = AS_IT_IS, kind: str = "train") -> Part:
    """The one part that a path names; of a folder with several, the one of that kind. Raises DataError."""
    found = parts_of(path, reading)
    if kind not in found and len(found) > 1:
        what = f"{path} has no part for {kind}; it has {', '.join(found)}"
        raise DataError(what, remedy="Name the file or the folder of one part.")
    return found.get(kind) or found["train"]


def _subtitles_say_all(place: Place, reading: Reading) -> bool:
    """Tell if what stands in texts beside recordings is in their subtitles too: Whisper writes both."""
    said: dict[Layout, dict[str, list[str]]] = {subtitles: {}, pairs: {}}
    for layout, found in said.items():
        for row in (row for part in layout.parts(place, reading).values() for row in part.rows()):
            if not isinstance(row.cells, BadRow):
                found.setdefault(str(row.cells["audio"]), []).extend(str(row.cells["text"]).split())
    return all(said[subtitles].get(audio) == words for audio, words in said[pairs].items())


def _unknown(place: Place, what: str) -> DataError:
    if not place.is_folder:
        read_bytes(place.path)  # raises what is wrong with it
        nothing = f"{place.path} is not a manifest, and there are neither subtitles nor a text of its name beside it"
        return DataError(nothing, remedy=NAME_A_FILE)
    kinds = sorted({file.suffix.lower() or file.name for file in place.files})
    holds = f"it holds {len(place.files)} files ({', '.join(kinds[:8])})" if place.files else "it is empty"
    return DataError(
        f"{place.path} {what}: {holds}",
        remedy="Name the file that lists your recordings, or save their texts as SRT. docs/data.md shows every layout.",
    )


def with_siblings(train: Path, reading: Reading) -> dict[str, Path]:
    """Find the parts beside a training set. A folder of several parts gives way to the one of them to train on.

    Of two that may be the same part, as dev-clean and dev-other, none is taken.
    """
    if Place(train).is_folder:  # those that have a path of their own
        own = {kind: part.path for kind, part in _uncut(train, reading).items() if part.path != train}
        if "train" in own:
            return own
    return {"train": train} | {kind: paths[0] for kind, paths in _beside(train).items() if len(paths) == 1}


def doubtful(train: Path, reading: Reading) -> dict[str, list[Path]]:
    """List by kind the parts of which `with_siblings` takes none, because any of them may be meant."""
    found = _beside(train)
    if Place(train).is_folder:
        found = _each_of(train, _kind_of_subfolder) | found if len(_uncut(train, reading)) > 1 else found
    return {kind: paths for kind, paths in found.items() if len(paths) > 1}


def _beside(train: Path) -> dict[str, list[Path]]:
    if Place(train).is_folder:
        return _each_of(train.parent, _kind_of_subfolder) if kind_of_folder(train.name) == "train" else {}
    if train.name in audiofolder.LISTS and kind_of_folder(train.parent.name) == "train":
        return _each_of(train.parent.parent, lambda path: kind_of_folder(path.name), lambda path: path / train.name)
    match = lists.STEM.fullmatch(train.stem)
    if not match or KIND_OF[match[2].lower()] != "train":
        return {}
    begins = match[1]

    def kind(path: Path) -> str | None:
        other = lists.STEM.fullmatch(path.stem)
        is_alike = other and other[1] == begins and path.suffix == train.suffix
        return KIND_OF[other[2].lower()] if other and is_alike else None

    return _each_of(train.parent, kind)


def _uncut(folder: Path, reading: Reading) -> Parts:
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
