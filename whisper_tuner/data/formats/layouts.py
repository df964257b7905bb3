"""Layouts of data sets. Each has a file here, which says what it recognises and what parts it has, and a line below."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from exogym.config import nearest
from whisper_tuner.data.formats import (
    audiofolder,
    common_voice,
    librispeech,
    lists,
    ljspeech,
    pairs,
    saved,
    subtitles,
)
from whisper_tuner.data.formats.encoding import NAME_A_FILE, read_bytes
from whisper_tuner.data.formats.place import Place
from whisper_tuner.data.formats.rows import AS_IT_IS, Part, Parts, Reading
from whisper_tuner.errors import DataError


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
        return LAYOUTS[reading.layout].parts(place, reading)
    found = [name for name, layout in LAYOUTS.items() if layout.recognises(place)]
    if not found:
        raise _unknown(place)
    if found[0] in BESIDE and len(found) > 1:
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


def _unknown(place: Place) -> DataError:
    if not place.is_folder:
        read_bytes(place.path)  # raises what is wrong with it
        what = f"{place.path} is not a manifest, and there are neither subtitles nor a text of its name beside it"
        return DataError(what, remedy=NAME_A_FILE)
    kinds = sorted({file.suffix.lower() or file.name for file in place.files})
    holds = f"it holds {len(place.files)} files ({', '.join(kinds[:8])})" if place.files else "it is empty"
    return DataError(
        f"{place.path} is a folder of no layout that is known: {holds}",
        remedy="Name the file that lists your recordings. docs/data.md shows every layout.",
    )
