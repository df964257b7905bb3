"""What a user names as a data set: a file, a folder, or the id of one on the hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath

from whisper_tuner.paths import is_file

KIND_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "devel"),
    "test": ("test", "testing", "eval"),
}
KIND_OF = {name: kind for kind, names in KIND_NAMES.items() for name in names}
HEAD_BYTES = 1 << 16  # a header longer than this is no header
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


class Place:
    """`files` are those of a folder and below, relative to it, without hidden ones."""

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def is_folder(self) -> bool:
        try:
            return self.path.is_dir()
        except OSError:
            return False

    @cached_property
    def is_file(self) -> bool:
        return is_file(self.path)

    @cached_property
    def files(self) -> list[PurePosixPath]:
        return sorted(self._walk()) if self.is_folder else []

    def _walk(self) -> Iterator[PurePosixPath]:
        for folder, folders, names in os.walk(self.path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            inside = PurePosixPath(Path(folder).relative_to(self.path).as_posix())
            yield from (inside / name for name in names if not name.startswith("."))

    def named(self, *patterns: str) -> list[PurePosixPath]:
        """Files whose own name is one of these, or ends so: `*.srt`."""
        whole = {pattern for pattern in patterns if not pattern.startswith("*")}
        ends = tuple(pattern[1:] for pattern in patterns if pattern.startswith("*"))
        return [file for file in self.files if file.name in whole or (ends and file.name.lower().endswith(ends))]

    def at_top(self, *suffixes: str) -> list[Path]:
        """Files of the folder itself."""
        if not self.is_folder:
            return []
        found = (Path(entry.path) for entry in os.scandir(self.path) if entry.is_file())
        return sorted(path for path in found if path.suffix.lower() in suffixes and not path.name.startswith("."))


def first_line(path: Path) -> str:
    """Read the first line of a text file in UTF-8 or UTF-16; '' where it is neither, or cannot be read."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return ""
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except (OSError, ValueError):
        return ""
    utf16 = head[:2] in (b"\xff\xfe", b"\xfe\xff")
    text = head.decode("utf-16" if utf16 else "utf-8-sig", errors="replace")
    return next(iter(text.splitlines()), "")


def by_kind(files: Iterable[PurePosixPath]) -> tuple[dict[str, list[PurePosixPath]], list[PurePosixPath]]:
    """Files by the part that their uppermost folder names, such as train/ or dev-clean/; and those outside of any."""
    kinds: dict[str, list[PurePosixPath]] = {}
    others = []
    for file in files:
        kind = kind_of_folder(file.parts[0]) if len(file.parts) > 1 else None
        if kind:
            kinds.setdefault(kind, []).append(file)
        else:
            others.append(file)
    return kinds, others


def kind_of_folder(name: str) -> str | None:
    return KIND_OF.get(re.split(r"[-_. ]", name.lower())[0])
