"""Finds, replaces and adds sections of config.ini as text; comments and everything else stay as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from whisper_tuner.errors import ConfigError

HEADER = re.compile(r"\[([^\]]+)\]")
Section = tuple[str, dict[str, str]]  # such as "profile:mine", with its keys and values


def with_sections(text: str, sections: Sequence[Section]) -> str:
    """`text` with these sections: one that exists is replaced where it stands, a new one is added at the end."""
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
    """The text of a config.ini with its own line ends; '' if there is none. Raises ConfigError."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None


def _span(text: str, header: str) -> tuple[int, int] | None:
    """Where a section begins and ends; comments and blank lines before the next header belong to the next section."""
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
