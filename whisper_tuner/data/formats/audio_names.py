"""The file that a manifest means by a name: without its extension, with backslashes, in another form of Unicode."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from whisper_tuner.data.formats.rows import BadRow, Bounds
from whisper_tuner.data.problems import Kind
from whisper_tuner.paths import AUDIO_SUFFIXES, expanded, is_file

USUAL_FOLDERS = ("clips", "wavs", "audio")  # where data sets keep audio that they name without its folder


class AudioNames:
    """Finds audio by name, in the first of `folders` that has it, and within `bounds` if there are any.

    changed: how many names were not the file's own, and in what.
    """

    def __init__(self, folders: Sequence[Path], bounds: Bounds | None = None):
        self._folders, self._bounds = folders, bounds
        self._listed: dict[Path, _Listing] = {}
        self.changed: Counter[str] = Counter()

    def find(self, name: str) -> Path:
        """The file; for one that is not there, where it should be.

        Raises BadRow for a name that means several, or a file out of bounds.
        """
        found = self._found(name)
        return self._bounds.check(found) if self._bounds else found

    def _found(self, name: str) -> Path:
        direct = self._folders[0] / expanded(name)
        if is_file(direct):
            return direct
        spelled = name.replace("\\", "/")
        for folder in self._folders:
            if found := self._below(folder, expanded(spelled)):
                self._note(name, found, folder)
                return found
        return direct

    def exists(self, name: str) -> bool:
        try:
            return bool(name) and is_file(self.find(name))
        except BadRow:
            return True

    def _below(self, folder: Path, name: Path) -> Path | None:
        try:
            place = folder / name
            parent = self._folder(place.parent)
            if not parent:
                return None
            if parent not in self._listed:
                self._listed[parent] = _Listing(parent)
            return self._listed[parent].find(place.name)
        except (OSError, ValueError):  # a name that no disk takes
            return None

    def _folder(self, path: Path) -> Path | None:
        """The folder itself, or the one whose name is the same in another form of Unicode."""
        if path.is_dir():
            return path
        if path.name in ("", "..") or not (parent := self._folder(path.parent)):
            return None
        wanted = unicodedata.normalize("NFC", path.name)
        names = (entry.name for entry in os.scandir(parent) if entry.is_dir())
        return next((parent / name for name in names if unicodedata.normalize("NFC", name) == wanted), None)

    def _note(self, name: str, found: Path, folder: Path) -> None:
        if "\\" in name:
            self.changed["with backslashes"] += 1
        if folder != self._folders[0]:
            self.changed[f"in {folder.name}/"] += 1
        last = name.replace("\\", "/").rpartition("/")[2]
        if last != found.name:
            same = unicodedata.normalize("NFC", last) == unicodedata.normalize("NFC", found.name)
            self.changed["in another form of Unicode" if same else f"without {found.suffix}"] += 1


class _Listing:
    """The files of one folder, by name and by name without extension, in NFC."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._names: dict[str, str] = {}
        self._stems: dict[str, list[str]] = {}
        for entry in os.scandir(folder):
            name = unicodedata.normalize("NFC", entry.name)
            self._names[name] = entry.name
            stem, dot, suffix = name.rpartition(".")
            if (dot + suffix).lower() in AUDIO_SUFFIXES:
                self._stems.setdefault(stem, []).append(entry.name)

    def find(self, name: str) -> Path | None:
        wanted = unicodedata.normalize("NFC", name)
        if own := self._names.get(wanted):
            path = self._folder / own
            if is_file(path):
                return path
        several = sorted(self._stems.get(wanted, []))
        if len(several) > 1:
            raise BadRow(Kind.NO_AUDIO, f"{name} may be {' or '.join(several)}: write its extension")
        return self._folder / several[0] if several else None
