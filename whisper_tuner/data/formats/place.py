"""What a user names as a data set, a file, a folder, or the id of one on the hub; its files, and their text.

What is not UTF-8 is read as Windows-1252 only where that is plain, and said.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path, PurePosixPath

from whisper_tuner.data.formats.rows import Part, Parts, Reading, kind_of_folder
from whisper_tuner.errors import DataError
from whisper_tuner.files import is_file, like

HEAD_BYTES = 1 << 16  # a header longer than this is no header
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")

MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
NAMES = {"utf-8": "UTF-8", "utf-16": "UTF-16", "cp1252": "Windows-1252"}
# In the languages that Windows-1252 was made for, a word with accents has other letters, too. Words of hardly anything
# else are of another script.
MOST_ACCENTED, LONG_WORD = 0.7, 3
WORDS = re.compile(r"[^\s,;|]+")
SETTLED = (
    "Save it as UTF-8, or say what it is: encoding = NAME in the dataset's section, --encoding NAME for an import."
)
NAME_A_FILE = "Name the file: a CSV, or one JSON object a line."


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
        found = []
        for folder, folders, names in os.walk(self.path) if self.is_folder else ():
            folders[:] = [name for name in folders if not name.startswith(".")]
            inside = PurePosixPath(Path(folder).relative_to(self.path).as_posix())
            found += [inside / name for name in names if not name.startswith(".")]
        return sorted(found)

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


def parts_by_folder(
    place: Place,
    files: Sequence[PurePosixPath],
    part: Callable[[Path, Sequence[PurePosixPath]], Part],
    *,
    with_others: bool = True,
) -> Parts:
    """Make parts by the folders train/, dev/ and test/; one, where there is none of them. Each has a path, and files.

    They may lie in one folder below the place. Several of one kind, such as train-clean-100 and train-clean-360, are
    one part. with_others: what is outside of these folders is trained on, too; else it is not used.
    """
    parents = [file.parent.parts for file in files]
    shared = PurePosixPath(os.path.commonpath([str(file.parent) for file in files])).parts if files else ()
    depth = next((at for at, name in enumerate(shared) if kind_of_folder(name)), len(shared))
    kinds: dict[str, list[PurePosixPath]] = {}
    others = []
    for file, folders in zip(files, parents, strict=True):
        kind = kind_of_folder(folders[depth]) if len(folders) > depth else None
        kinds.setdefault(kind, []).append(file) if kind else others.append(file)
    if not kinds:
        return {"train": part(place.path, files)}
    named = [PurePosixPath(*file.parts[: depth + 1]) for file in others]
    notes = {} if with_others else {f"{name} is no part, and not used": None for name in named}
    if with_others and others:
        kinds["train"] = [*others, *kinds.get("train", ())]
    parts = {}
    for kind, found in kinds.items():
        names = [str(name) for name in dict.fromkeys(PurePosixPath(*file.parts[: depth + 1]) for file in found)]
        one = part(place.path / names[0] if len(names) == 1 else place.path, found)
        facts = {} if with_others else {"subsets": ", ".join(names)}
        parts[kind] = replace(one, facts={**facts, **one.facts}, notes=(*notes, *one.notes))
    return parts


def read_text(path: Path, reading: Reading) -> tuple[str, str, list[str]]:
    """(text, encoding, notes) of a file. Raises DataError."""
    data = read_bytes(path)
    if reading.encoding:
        return _as_told(path, data, reading.encoding), NAMES.get(reading.encoding.lower(), reading.encoding), []
    mark = next((mark for mark in MARKS if data.startswith(mark)), b"")
    encoding = MARKS.get(mark, "")
    if encoding == "utf-8":
        data = data[len(mark) :]
    try:
        text = data.decode(encoding or "utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        if encoding:
            what = f"{path} is not {NAMES[encoding]}, as its first bytes say ({error.reason} on line {line})"
            raise DataError(what, remedy=SETTLED) from None
        return _not_utf8(path, data, error, line)
    if encoding:
        return text, f"{NAMES[encoding]} (its first bytes say so)", []
    if len(data) >= 4 and data[:200].count(0) * 3 > len(data[:200]):
        raise DataError(f"{path} is UTF-16 without the mark that says so", remedy=SETTLED)
    return text, "UTF-8", []


def read_bytes(path: Path) -> bytes:
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for, a device has no end
            raise DataError(f"{path} is not a file", remedy=NAME_A_FILE)
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"no such manifest: {path}{like(path)}",
            remedy="Check the path; those of datasets are in config.ini.",
        ) from None
    except IsADirectoryError:
        raise DataError(f"{path} is a folder, not a manifest", remedy=NAME_A_FILE) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        reason = getattr(error, "strerror", None) or error
        remedy = "Check its permissions and the path; those of datasets are in config.ini."
        raise DataError(f"{path} cannot be read: {reason}", remedy=remedy) from None


def _as_told(path: Path, data: bytes, encoding: str) -> str:
    try:
        text = data.decode(encoding)
    except LookupError:
        raise DataError(f"{path}: there is no encoding {encoding!r}", remedy="Such as utf-8, cp1252, cp1251.") from None
    except UnicodeError as error:
        reason = getattr(error, "reason", error)
        raise DataError(f"{path} is not {encoding} ({reason})", remedy="Give another encoding, or none.") from None
    if not isinstance(text, str):
        raise DataError(f"{path}: {encoding!r} is no encoding of text", remedy="Such as utf-8, cp1252, cp1251.")
    return text.removeprefix("\ufeff")


def _not_utf8(path: Path, data: bytes, error: UnicodeDecodeError, line: int) -> tuple[str, str, list[str]]:
    broken = f"{path} is not UTF-8 ({error.reason} on line {line})"
    if any(ord(letter) > 127 for letter in data.decode(errors="ignore")):
        raise DataError(f"{broken}, though other lines are", remedy=f"Mend that line. {SETTLED}")
    try:
        text = data.decode("cp1252")
    except UnicodeDecodeError:
        raise DataError(f"{broken}, and not Windows-1252", remedy=SETTLED) from None
    # A few words around the first letter that is not ASCII, with its line.
    at = next((match.start() for match in re.finditer(r"[^\x00-\x7f]", text)), 0)
    start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
    shown = text[max(start, at - 30) : min(end if end >= 0 else len(text), at + 30)].strip()
    sample = f"line {text.count(chr(10), 0, at) + 1} says {shown!r}"
    words = [word for word in WORDS.findall(text) if len(word) >= LONG_WORD and not word.isascii()]
    accented = sum(ord(letter) > 127 for word in words for letter in word)
    if "\0" in text or accented > MOST_ACCENTED * sum(map(len, words)):
        raise DataError(f"{broken}, and would be odd as Windows-1252: {sample}", remedy=SETTLED)
    wrong = "if that is wrong, set encoding"
    return text, NAMES["cp1252"], [f"{path.name} is not UTF-8; read as Windows-1252: {sample}; {wrong}"]
