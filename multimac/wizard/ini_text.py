"""Sections of config.ini as text: found, replaced or added, all else left as it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from whisper_tuner.errors import ConfigError

HEADER = re.compile(r"\[([^\]]+)\]")


def with_sections(text: str, sections: Sequence[Section]) -> str:
    """`text` with these sections at its end; one that is there already is replaced where it stands. All else stays."""
    newline = "\r\n" if "\r\n" in text else "\n"
    for header, keys in sections:
        body = newline.join([f"[{header}]", *(f"{key} = {value}" for key, value in keys.items())]) + newline
        span = _span(text, header)
        if span:
            text = text[: span[0]] + body + text[span[1] :]
        else:
            gap = "" if not text else newline if text.endswith(("\n", "\r")) else newline * 2
            text = f"{text}{gap}{body}"
    return text


def existing(text: str, sections: Sequence[Section]) -> list[str]:
    """The headers among these that the text has already."""
    return [header for header, _ in sections if _span(text, header)]


def read_text(path: Path) -> str:
    """A config.ini as it is, its line ends included; '' if there is none. Raises ConfigError."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None


def _span(text: str, header: str) -> tuple[int, int] | None:
    """Where a section stands, without the comments and blank lines before the next one: those are the next one's."""
    start, end, position = None, 0, 0
    for line in text.splitlines(keepends=True):
        if match := HEADER.match(line):
            if start is not None:
                break
            if match[1] == header:
                start, end = position, position + len(line)
        position += len(line)
        if start is not None and line.strip() and not line.lstrip().startswith(("#", ";")):
            end = position
    return None if start is None else (start, end)


Section = tuple[str, dict[str, str]]  # "profile:mine", its keys
