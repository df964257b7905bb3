"""Rows of a data set: named cells, or why there are none; the columns' names, and the audio that a name means.

What a user says about them is a Reading; a list of rows that trains, validates or tests is a Part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from whisper_tuner.errors import DataError
from whisper_tuner.files import expanded, is_audio, is_file
from whisper_tuner.problems import Kind
from whisper_tuner.text import is_unicode

AUDIO_COLUMNS = (
    *("audio", "audio_filepath", "audio_path", "audio_file", "file_name", "filename", "path"),
    *("wav", "wav_path", "wav_filename"),
)
TEXT_COLUMNS = ("text", "sentence", "transcription", "transcript")
ID_COLUMNS = ("id",)
LANGUAGE_COLUMNS = ("language", "lang", "locale")
TASK_COLUMNS = ("task",)
SPEAKER_COLUMNS = ("speaker", "speaker_id", "client_id")
TIMED_COLUMNS = ("timed_text",)
SPLIT_COLUMNS = ("split", "subset", "partition", "set")
USUAL_FOLDERS = ("clips", "wavs", "audio", "audios", "wav", "recordings")  # of audio that is named without its folder
KIND_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "devel"),
    "test": ("test", "testing", "eval"),
}
KIND_OF = {name: kind for kind, names in KIND_NAMES.items() for name in names}
WRITTEN = ("id", "audio_path", "transcription", "duration_s")  # the first columns of a manifest that we write

Cells = Mapping[str, object]
"""By lower-case column name. An audio cell may be a dict of `bytes` and `path`, as the datasets library has it."""


class BadRow(Exception):
    """Says why one row is left out."""

    def __init__(self, kind: Kind, what: str):
        super().__init__(what)
        self.kind = kind


class Bounds:
    """Folders in which the files of a data set have to lie."""

    def __init__(self, folders: Iterable[Path]):
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]
        self._outside: set[Path] = set()

    @property
    def outside(self) -> list[Path]:
        """The other folders in which it names files; of many, the one that they are in."""
        common = Path(os.path.commonpath(self._outside)) if len(self._outside) > 3 else Path("/")
        return [common] if len(common.parts) > 2 else sorted(self._outside)

    def hold(self, path: Path) -> bool:
        """Tell if a path is not a file elsewhere, nor a link to one."""
        if not is_file(path):
            return True
        real = Path(os.path.realpath(path))
        if held := any(real.is_relative_to(folder) for folder in self._folders):
            return held
        self._outside.add(real.parent)
        return False

    def check(self, path: Path) -> Path:
        """The path itself. Raises BadRow for one that they do not hold."""
        if not self.hold(path):
            raise BadRow(Kind.NO_AUDIO, f"{path} lies outside of its data set")
        return path


def near(path: Path) -> tuple[Path, ...]:
    """Folders in which the audio of a list may be, the likeliest first."""
    folder = path.parent
    below = (*USUAL_FOLDERS, f"audio/{path.stem}", path.stem)
    return (folder, *(folder / name for name in below), *(folder.parent / name for name in USUAL_FOLDERS))


class AudioNames:
    """Finds audio by name, in the first of `folders` that has it, and within `bounds` if there are any.

    What none has that lies below the first one is looked for one level deeper, where only one file may fit.
    changed: how many names were not the file's own, and in what.
    """

    def __init__(self, folders: Sequence[Path], bounds: Bounds | None = None):
        self._folders, self._bounds = folders, bounds
        self._listed: dict[Path, _Listing] = {}
        self._parents: dict[Path, Path | None] = {}  # as they are named, and as they are
        self.changed: Counter[str] = Counter()

    def find(self, name: str) -> Path:
        """The file; for one that is not there, where it should be.

        Raises BadRow for a name that means several, or a file out of bounds.
        """
        found = self._folders[0] / expanded(name)
        if not is_file(found):
            found = self._respelled(name) or found
        return self._bounds.check(found) if self._bounds else found

    def exists(self, name: str) -> bool:
        try:
            return bool(name) and is_file(self.find(name))
        except BadRow:
            return True

    def _respelled(self, name: str) -> Path | None:
        spelled = expanded(name.replace("\\", "/"))
        outside = [folder for folder in self._folders if folder not in self._inside]
        folder, found = self._first(spelled, self._inside)
        deeper = [(one, file) for one in ([] if found else self._deeper) if (file := self._look(one / spelled, False))]
        if len(deeper) == 1:
            [(folder, found)] = deeper
        if not found:  # only then beside it: there may lie other recordings with the same names
            folder, found = self._first(spelled, outside)
        if not found and deeper:
            several = " or ".join(f"{one.name}/{spelled}" for one, _ in deeper)
            raise BadRow(Kind.NO_AUDIO, f"{name} may be {several}: write its folder, too")
        if not found:  # with another extension only if none has it with its own
            folder, found = self._first(spelled, [*self._inside, *outside], loosely=True)
        if not (folder and found):
            return None
        if "\\" in name:
            self.changed["with backslashes"] += 1
        if folder != self._folders[0]:
            self.changed[f"in {folder.name}/"] += 1
        if spelled.name != found.name:
            self.changed[_difference(_form(spelled.name), _form(found.name))] += 1
        return found

    def _first(
        self, spelled: Path, folders: Sequence[Path], *, loosely: bool = False
    ) -> tuple[Path | None, Path | None]:
        """The first of some folders that has it, and it. loosely: also with another extension."""
        looked = ((folder, self._look(folder / spelled, loosely)) for folder in folders)
        return next((each for each in looked if each[1]), (None, None))

    @property
    def _inside(self) -> list[Path]:
        return [folder for folder in self._folders if folder.is_relative_to(self._folders[0])]

    @cached_property
    def _deeper(self) -> list[Path]:
        """The folders in the first one, and in those of `folders` below it; none that is of a part by its name."""
        inside = [folder for folder in self._inside if folder.is_dir()]
        found = (Path(entry.path) for folder in inside for entry in os.scandir(folder) if entry.is_dir())
        return [
            one for one in sorted(found) if not (one.name.startswith(".") or kind_of_folder(one.name) or one in inside)
        ]

    def _look(self, place: Path, loosely: bool) -> Path | None:
        with contextlib.suppress(OSError, ValueError):  # a name that no disk takes
            if place.parent not in self._parents:
                self._parents[place.parent] = self._folder(place.parent)
            if parent := self._parents[place.parent]:
                if parent not in self._listed:
                    self._listed[parent] = _Listing(parent)
                return self._listed[parent].find(place.name, loosely)
        return None

    def _folder(self, path: Path) -> Path | None:
        """The folder itself, or the only one whose name is the same in another form of Unicode, or other capitals."""
        if path.is_dir():
            return path
        if path.name in ("", "..") or not (parent := self._folder(path.parent)):
            return None
        names = [entry.name for entry in os.scandir(parent) if entry.is_dir()]
        alike = [name for name in names if _form(name) == _form(path.name)]
        alike = alike or [name for name in names if _form(name).casefold() == _form(path.name).casefold()]
        return parent / alike[0] if len(alike) == 1 else None


def _form(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _difference(name: str, file: str) -> str:
    """Say how a name differs from that of its file; both in NFC."""
    if name == file:
        return "in another form of Unicode"
    if name.casefold() == file.casefold():
        return "in other capitals"
    suffix = Path(file).suffix
    return f"with {Path(name).suffix}, not {suffix}" if is_audio(Path(name)) else f"without {suffix}"


UNLIKE = 2


def closeness(name: str, file: Path) -> int:
    """Return 0 for the file's own name, 1 for it in other letters or without its extension, UNLIKE for another one."""
    own = Path(name.replace("\\", "/")).name
    if own == file.name:
        return 0
    return 1 if _form(own).casefold() in (_form(file.name).casefold(), _form(file.stem).casefold()) else UNLIKE


class _Listing:
    """The files of one folder. A name is compared in NFC: as it is, without its capitals, then without extensions."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._names: dict[tuple[str, str], list[str]] = {}
        for entry in os.scandir(folder):
            name = _form(entry.name)
            self._add("whole", name, entry.name)
            if is_audio(Path(name)):
                self._add("stem", Path(name).stem, entry.name)

    def _add(self, kind: str, name: str, file: str) -> None:
        self._names.setdefault((kind, name), []).append(file)
        self._names.setdefault((f"{kind} in any case", name.casefold()), []).append(file)

    def find(self, name: str, loosely: bool) -> Path | None:
        """The file that fits best; loosely: with another extension. Raises BadRow where several fit alike."""
        wanted = _form(name)
        meant = [("whole", wanted), ("stem", wanted)]
        if loosely:
            meant = [("stem", Path(wanted).stem)] if is_audio(Path(wanted)) else []
        for kind, text in meant:
            for key in ((kind, text), (f"{kind} in any case", text.casefold())):
                found = sorted(file for file in self._names.get(key, []) if is_file(self._folder / file))
                if len(found) > 1:
                    raise BadRow(Kind.NO_AUDIO, f"{name} may be {' or '.join(found)}: write its whole name")
                if found:
                    return self._folder / found[0]
        return None


def kind_of_folder(name: str) -> str | None:
    """Return the part that a name such as dev-clean, test1 or trainset begins with; None for one of two, train_dev."""
    found = [KIND_OF.get(re.sub(r"(set)?\d?$", "", piece)) for piece in re.split(r"[-_. ]", name.lower())]
    return found[0] if found[0] and len({*found} - {None}) == 1 else None


class Row(NamedTuple):
    """`line` is where it begins, in `file` if its data set has several; 0 if it is a whole file.

    usual_id: "" if it is the audio's name.
    """

    line: int
    cells: Cells | BadRow
    file: str = ""
    usual_id: str = ""


class ClipIds:
    """Gives each row an id that no earlier one has: an id column may also name the sentence, or the speaker.

    renamed: lines of the rows that are called by their audio, because an earlier one has their id.
    """

    def __init__(self) -> None:
        self._given: set[str] = set()
        self.renamed: list[int] = []

    def of(self, row: Row, cells: Cells, audio: str) -> str:
        """Return an id for a row; audio: the name of its file. Raises BadRow."""
        told, usual = cell(cells, ID_COLUMNS), row.usual_id or str(expanded(audio))
        self.renamed += [row.line] if told in self._given else []
        names = itertools.chain([told or usual, usual], (f"{usual}-{number}" for number in itertools.count(2)))
        given = next(name for name in names if name not in self._given)
        self._given.add(given)
        return given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """The user's word on a data set that does not say it itself: keys of config.ini, options of import."""

    layout: str = ""
    audio_column: str = ""
    text_column: str = ""
    encoding: str = ""
    delimiter: str = ""

    @classmethod
    def of(cls, settings: object) -> Reading:
        """Take it from a profile, or from a run's record of one, which has the same keys."""
        known = settings if isinstance(settings, Mapping) else vars(settings)
        return cls(**{field.name: str(known.get(field.name) or "") for field in dataclasses.fields(cls)})

    @property
    def audio_names(self) -> tuple[str, ...]:
        return (self.audio_column.lower(),) if self.audio_column else AUDIO_COLUMNS

    @property
    def text_names(self) -> tuple[str, ...]:
        return (self.text_column.lower(),) if self.text_column else TEXT_COLUMNS


AS_IT_IS = Reading()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One list of clips, which trains, validates or tests. `path` names it, and would be understood alone.

    folder: where names of audio begin; beside: other folders in which they may be. facts: how it was understood, for
    the screen. notes: what nobody has asked for and must be told. cut: why its audio cannot be used where it lies.
    language: as it is stated for all rows, such as zh-CN; "" if it is not. bounds: if it is somebody else's.
    """

    path: Path
    layout: str
    rows: Callable[[], Iterator[Row]]
    folder: Path
    reading: Reading = AS_IT_IS
    beside: tuple[Path, ...] = ()
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cut: str = ""
    language: str = ""
    bounds: Bounds | None = None
    columns: tuple[str, ...] = ()
    all_rows: Callable[[], Iterator[Row]] | None = None  # those of other parts too, if they stand in one list

    def only(self, kind_of: Callable[[Row], str | None], kind: str, notes: tuple[str, ...]) -> Part:
        """Return a part of the rows of one kind."""

        def own() -> Iterator[Row]:
            return (row for row in self.rows() if kind_of(row) == kind)

        return dataclasses.replace(self, rows=own, notes=notes, all_rows=self.all_rows or self.rows)


Parts = dict[str, Part]
"""By kind: train, validation, test."""


def cell(cells: Cells, names: tuple[str, ...]) -> str:
    """The first filled one of these columns, as stripped text.

    Raises BadRow where that is no text, or where several name different audio or texts.
    """
    found: dict[str, str] = {}
    for name in names:
        if text := _text(name, cells.get(name)):
            found.setdefault(text, name)
    key = {AUDIO_COLUMNS: "audio_column", TEXT_COLUMNS: "text_column"}.get(names)
    if key and len(found) > 1:
        said = ", ".join(f"{name} = {text[:40]}" for text, name in found.items())
        raise BadRow(Kind.COLUMNS, f"two columns differ ({said}): say which with {key}")
    return next(iter(found), "")


def _text(name: str, value: object) -> str:
    if isinstance(value, dict) and isinstance(value.get("path"), str):  # audio as the datasets library writes it
        value = value["path"]
    if isinstance(value, dict | list | bool):
        raise BadRow(Kind.COLUMNS, f"{name} is not text: {str(value)[:40]}")
    text = "" if value is None else str(value).strip()
    if not is_unicode(text):
        raise BadRow(Kind.COLUMNS, f"{name} holds half a character (a lone surrogate)")
    return text


def check_columns(path: Path, names: Sequence[str], reading: Reading, as_read: str = "") -> None:
    """Raises DataError unless there is an audio and a text column among them."""
    for accepted in (reading.audio_names, reading.text_names):
        if not any(name in accepted for name in names):
            raise no_column(path, names, reading, as_read)


def no_column(path: Path, names: Sequence[str], reading: Reading, as_read: str, example: str = "") -> DataError:
    """Say that there is no audio column among these, or no text column. as_read: how line 1 was read."""
    has_audio = any(name in reading.audio_names for name in names)
    what, accepted = ("text", reading.text_names) if has_audio else ("audio", reading.audio_names)
    said = f" {accepted[0]!r}" if getattr(reading, f"{what}_column") else ""
    read = f"; line 1 was read as: {as_read}" if as_read else ""
    found = ", ".join(names) or "nothing"
    example = example or next((name for name in names if name and name not in reading.audio_names), "NAME")
    return DataError(
        f"{path} has no {what} column{said}; found: {found}{read}",
        remedy=f"Name it one of {', '.join(accepted if not said else names)}, or say which it is: "
        f"{what}_column = {example} in the dataset's section, --{what}-column {example} for an import.",
    )
