"""Layouts of data sets. Each has a file here, which says what it recognises and what parts it has, and a line below.

Parts may also lie beside a training set: dev.tsv and test.tsv beside train.tsv, test/ beside train/.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from whisper_tuner.data.formats.columns import UnclearColumn
from whisper_tuner.data.formats.place import NAME_A_FILE, Place, read_bytes
from whisper_tuner.data.formats.rows import (
    AS_IT_IS,
    KIND_NAMES,
    KIND_OF,
    SPLIT_COLUMNS,
    BadRow,
    Cells,
    Part,
    Parts,
    Reading,
    Row,
    kind_of_folder,
)
from whisper_tuner.errors import DataError, MissingProgram
from whisper_tuner.files import beside, is_audio, is_file
from whisper_tuner.hub import ADAPTER_CONFIG, PICKLED, SAFETENSORS
from whisper_tuner.text import counted


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
MODEL_FILES = (ADAPTER_CONFIG, SAFETENSORS, PICKLED)
SHOWN = 5  # words of a column that says the part of each row


def parts_of(path: Path, reading: Reading = AS_IT_IS) -> Parts:
    """List the parts of a data set: a file, a folder, or one on the hub. Raises DataError where no layout fits."""
    place, name = Place(path), reading.layout
    if name and name not in LAYOUTS:
        what = f"there is no layout {name!r}{nearest(name, LAYOUTS)}"
        raise DataError(what, remedy=f"Known: {', '.join(LAYOUTS)}.")
    if name and not place.is_file and not LAYOUTS[name].recognises(place):
        raise _unknown(place, f"has no data set of the layout {name}")
    fits = [name] if name else [name for name, layout in LAYOUTS.items() if layout.recognises(place)]
    if not fits:
        inner, tried = _inside(place, reading)
        if not inner and any(is_file(path / name) for name in MODEL_FILES):
            what = f"{path} is a folder with a model, not with recordings"
            raise DataError(what, remedy="Name it as the model (--model), and a folder or table of recordings as data.")
        if not inner and len(unclear := [one for one in tried if isinstance(one, UnclearColumn)]) == 1:
            raise unclear[0]
        if not inner:
            raise _unknown(place, "is a folder of no layout that is known", tried)
        if inner != path:
            note = f"the data set is in its folder {inner.name}"
            return {kind: replace(part, notes=(note, *part.notes)) for kind, part in parts_of(inner, reading).items()}
        fits = ["lists"]
    if fits[0] in BESIDE and len(fits) > 1:
        fits = [_telling(place, reading)]
    found = LAYOUTS[fits[0]].parts(place, reading)
    divided = (_divided(part, kind, is_alone=len(found) == 1) for kind, part in found.items())
    return dict(one for parts in divided for one in parts.items())


def part_of(path: Path, reading: Reading = AS_IT_IS, kind: str = "train") -> Part:
    """The one part that a path names; of a folder with several, the one of that kind. Raises DataError."""
    found = parts_of(path, reading)
    if kind not in found and (len(found) > 1 or kind == "train"):
        raise no_part(path, kind, found)
    return found.get(kind) or next(iter(found.values()))


def no_part(path: Path, kind: str, found: Parts) -> DataError:
    what = f"{path} has no part for {kind}; it has {', '.join(found)}"
    remedy = f"Write {kind} in its column of parts, or rename that column."
    return DataError(what, remedy=remedy if path.is_file() else "Name the file or the folder of one part.")


def kinds_inside(path: Path, reading: Reading = AS_IT_IS) -> list[str]:
    """List the parts of a file whose rows say which one they belong to; none for any other."""
    found = list(_uncut(path, reading)) if Place(path).is_file and path.suffix.lower() not in saved.SUFFIXES else []
    return found if found != ["train"] else []


def _divided(part: Part, kind: str, *, is_alone: bool) -> Parts:
    """Divide a part by its column for that; if it is not alone, leave out the rows of other parts. Raises DataError."""
    columns = [name for name in SPLIT_COLUMNS if name in part.columns]
    if not columns or (part.cut == saved.WHY_CUT and not is_alone):  # of the hub's own parts no row is another's
        return {kind: part}

    def word(cells: Cells, column: str) -> str:
        return str(cells.get(column) or "").strip()

    def words(column: str) -> Counter[str]:
        return Counter(word(row.cells, column) for row in part.rows() if not isinstance(row.cells, BadRow))

    column = next((name for name in columns if any(map(kind_of_folder, words(name)))), columns[0])
    rows = words(column)
    kinds = {told: kind_of_folder(told) for told in rows}
    told = ", ".join(f"{count:,} {told or '(nothing)'}" for told, count in rows.most_common(SHOWN))
    known = [name for name in KIND_NAMES if name in kinds.values()]
    if column == "split" and len(rows) > 1 and not known:
        what = f"{part.path}: its column split says {told}, and none of this is the name of a part"
        raise DataError(what, remedy="Write train, validation or test there; rename it to train on all rows.")
    if not known or (kind not in ("train", *known) and not is_alone):  # what to measure with is the user's choice
        return {kind: part}
    parts, notes = known if is_alone else [kind], part.notes
    if {*kinds.values()} != {kind}:
        left = "; other rows are not used" * ({*kinds.values()} != {*parts})
        notes += (f"{part.path.name}: rows are for {' or '.join(parts)} by their column {column} ({told}){left}",)

    def kind_of(row: Row) -> str | None:  # one that cannot be read is listed as left out of the first part
        return parts[0] if isinstance(row.cells, BadRow) else kinds[word(row.cells, column)]

    return {own: part.only(kind_of, own, notes) for own in parts}


def _inside(place: Place, reading: Reading) -> tuple[Path | None, list[DataError]]:
    """(a folder itself, if a file of it lists its recordings by what is in it, or the one in it that is a data set; why
    others are not). Raises DataError if several are.
    """
    found, tried = lists.by_content(place, reading)
    if found or not place.is_folder:
        return (place.path if found else None), tried
    inner = []
    below = sorted(one for one in place.path.iterdir() if one.is_dir() and not one.name.startswith((".", "__")))
    for folder in (one for one in below if os.access(one, os.R_OK | os.X_OK)):
        own = Place(folder)
        listed, why = lists.by_content(own, reading)
        inner += [folder] if listed or any(layout.recognises(own) for layout in LAYOUTS.values()) else []
        tried += why
    if len(inner) > 1:
        names = ", ".join(folder.name for folder in inner)
        raise DataError(f"{place.path} has several data sets: {names}", remedy="Name the folder of one of them.")
    return next(iter(inner), None), tried


def _telling(place: Place, reading: Reading) -> str:
    """Choose between subtitles and texts beside recordings: subtitles where these say as much, as Whisper writes both.

    Texts where there are more recordings with them, all those with subtitles among them. Raises DataError otherwise.
    """
    said: dict[Layout, dict[str, list[str]]] = {subtitles: {}, pairs: {}}
    for layout, found in said.items():
        for row in (row for part in layout.parts(place, reading).values() for row in part.rows()):
            if not isinstance(row.cells, BadRow):
                found.setdefault(str(row.cells["audio"]), []).extend(str(row.cells["text"]).split())
    timed, written = said[subtitles], said[pairs]
    if all(timed.get(audio, []) == words for audio, words in written.items()):
        return "subtitles"
    if timed.keys() < written.keys():
        return "pairs"
    example = sorted(timed.keys() - written.keys() or timed)[0]
    raise DataError(
        f"{place.path} has recordings with subtitles, such as {Path(example).name}, and others with a text beside them",
        remedy="Move those of one kind into another folder. Or say which: layout = subtitles or pairs in the dataset's"
        " section, --layout for an import.",
    )


def _unknown(place: Place, what: str, tried: Sequence[DataError] = ()) -> DataError:
    if not place.is_folder:
        read_bytes(place.path)  # raises what is wrong with it
        nothing = f"{place.path} is not a manifest, and there are neither subtitles nor a text of its name beside it"
        return DataError(nothing, remedy=NAME_A_FILE)
    kinds = sorted({file.suffix.lower() or file.name for file in place.files})
    holds = f"it holds {counted(len(place.files), 'file')} ({', '.join(kinds[:8])})" if place.files else "it is empty"
    reasons = [str(one).partition("\n")[0].removeprefix(f"{place.path}/") for one in tried[:SHOWN]]
    why = "".join(f"\n  {one}" for one in reasons) + f"\n  and {len(tried) - SHOWN} more" * (len(tried) > SHOWN)
    above = _tables_above(place.path)
    such = f" (in the folder above lies {above[0]})" if above else ""
    audio = next((file.stem for file in place.files if is_audio(file)), "")
    how = f"Put the text of each recording beside it ({audio}.txt), or name" if audio else "Name"
    remedy = f"{how} the file that lists your recordings{such}."
    remedy = remedy if place.files else f"Put your recordings and their texts there, or name another folder{such}."
    return DataError(f"{place.path} {what}: {holds}{why}", remedy=f"{remedy} docs/data.md shows every layout.")


def _tables_above(folder: Path) -> list[str]:
    """List the tables beside a folder, but for those to validate or test with; after the others those to train on."""
    found = []
    for name in sorted(beside(folder.absolute())):
        match = lists.STEM.fullmatch(Path(name).stem)
        kind = KIND_OF[match[2].lower()] if match else ""
        # A table of the folder next to this one's, such as the lists that `train` writes, is about other recordings.
        if match and match[1] not in ("", folder.name) and (folder.parent / match[1]).is_dir():
            continue
        if Path(name).suffix.lower() in lists.TABLES and not name.startswith((".", "~$")) and kind in ("", "train"):
            found.append((kind, name))  # "~$" begins what Excel writes while a file is open
    return [name for _, name in sorted(found)]


def with_siblings(train: Path, reading: Reading) -> dict[str, Path]:
    """Find the parts beside a training set. A folder of several parts gives way to the one of them to train on.

    Of two that may be the same part, as dev-clean and dev-other, none is taken.
    """
    if inside := kinds_inside(train, reading):
        return {"train": train} | dict.fromkeys(inside, train)
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
