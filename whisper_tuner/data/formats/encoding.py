"""Bytes of a text file -> its text. What is not UTF-8 is read as Windows-1252 only where that is plain, and said."""

from __future__ import annotations

import codecs
import re
from pathlib import Path

from whisper_tuner.data.formats.rows import Reading
from whisper_tuner.errors import DataError

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


def read_text(path: Path, reading: Reading) -> tuple[str, str, list[str]]:
    """(text, encoding, notes) of a file. Raises DataError."""
    data = read_bytes(path)
    if reading.encoding:
        return _as_told(path, data, reading.encoding), NAMES.get(reading.encoding.lower(), reading.encoding), []
    for mark, encoding in MARKS.items():
        if data.startswith(mark):
            return _as_marked(path, data[len(mark) :] if encoding == "utf-8" else data, encoding)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return _not_utf8(path, data, error)
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
            f"no such manifest: {path}", remedy="Check the path; those of datasets are in config.ini."
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


def _as_marked(path: Path, data: bytes, encoding: str) -> tuple[str, str, list[str]]:
    try:
        return data.decode(encoding), f"{NAMES[encoding]} (its first bytes say so)", []
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"{path} is not {NAMES[encoding]}, as its first bytes say ({error.reason} on line {line})"
        raise DataError(what, remedy=SETTLED) from None


def _not_utf8(path: Path, data: bytes, error: UnicodeDecodeError) -> tuple[str, str, list[str]]:
    line = data.count(b"\n", 0, error.start) + 1
    broken = f"{path} is not UTF-8 ({error.reason} on line {line})"
    if any(ord(letter) > 127 for letter in data.decode(errors="ignore")):
        raise DataError(f"{broken}, though other lines are", remedy=f"Mend that line. {SETTLED}")
    try:
        text = data.decode("cp1252")
    except UnicodeDecodeError:
        raise DataError(f"{broken}, and not Windows-1252", remedy=SETTLED) from None
    words = [word for word in WORDS.findall(text) if len(word) >= LONG_WORD and not word.isascii()]
    accented = sum(ord(letter) > 127 for word in words for letter in word)
    if "\0" in text or accented > MOST_ACCENTED * sum(map(len, words)):
        raise DataError(f"{broken}, and would be odd as Windows-1252: {_sample(text)}", remedy=SETTLED)
    wrong = "if that is wrong, set encoding"
    return text, NAMES["cp1252"], [f"{path.name} is not UTF-8; read as Windows-1252: {_sample(text)}; {wrong}"]


def _sample(text: str) -> str:
    """A few words around the first letter that is not ASCII, with its line."""
    at = next((match.start() for match in re.finditer(r"[^\x00-\x7f]", text)), 0)
    start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
    shown = text[max(start, at - 30) : min(end if end >= 0 else len(text), at + 30)].strip()
    return f"line {text.count(chr(10), 0, at) + 1} says {shown!r}"
