"""Finds, replaces and adds sections of config.ini as text; comments and everything else stay as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from whisper_tuner.config import ConfigFile

HEADER = re.compile(r"^(?=\[)", re.MULTILINE)
Section = tuple[str, dict[str, str]]  # such as "profile:mine", with its keys and values


def with_sections(text: str, sections: Sequence[Section]) -> str:
    """`text` with these sections: one that exists is replaced where it stands, a new one is added at the end."""
    newline = "\r\n" if "\r\n" in text else "\n"
    for header, keys in sections:
        body = newline.join([f"[{header}]", *(f"{key} = {value}" for key, value in keys.items())]) + newline
        parts = HEADER.split(text)
        old = next((number for number, part in enumerate(parts) if part.startswith(f"[{header}]")), None)
        if old is not None:
            parts[old] = body + _tail(parts[old])
            text = "".join(parts)
        else:
            gap = "" if not text else newline if text.endswith("\n") else newline * 2
            text = f"{text}{gap}{body}"
    return text


def existing(text: str, sections: Sequence[Section]) -> list[str]:
    """The headers among these that the text has already."""
    return [header for header, _ in sections if re.search(rf"^\[{re.escape(header)}\]", text, re.MULTILINE)]


def read_text(path: Path) -> str:
    """The text of a config.ini with its own line ends; '' if there is none. Raises ConfigError."""
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError):
        ConfigFile(path)  # says what is wrong with it, and where
        raise


def _tail(section: str) -> str:
    """The comments and blank lines at its end: they belong to the next section."""
    lines = reversed(section.splitlines(keepends=True))
    tail = takewhile(lambda line: not line.strip() or line.lstrip().startswith(("#", ";")), lines)
    return "".join(reversed(list(tail)))
