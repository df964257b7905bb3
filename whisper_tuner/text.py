"""Counts, sizes, durations and the time left, as people read them; words of a text; JSON that anybody has written."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from typing import Any

WORD = re.compile(r"[^\W_]+(?:['’ʼ-][^\W_]+)*")
FIRST_S = 5.0  # before that a rate says little


def counted(count: int, noun: str) -> str:
    """Return such as 1 row, or 1,200 rows."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit in ("B", "kB") else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def is_unicode(text: str) -> bool:
    """Tell if a text can be written as UTF-8; JSON may hold half a character, a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def harmless(text: str) -> str:
    """Remove the characters that a terminal obeys, but for tabs and new lines: texts and names come from anywhere."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", text)


def words(text: str) -> list[str]:
    return WORD.findall(text)


def text_key(text: str) -> str:
    """Return one key for texts that differ in case, punctuation, spaces and Unicode form only."""
    return " ".join(words(unicodedata.normalize("NFKC", text).casefold()))


class Pace:
    """Estimates the time left of one thing that is done bit by bit. What the first look sees counts as done before."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def left(self, now: float, done: float, total: float) -> float | None:
        """Return seconds; None in the first ones, before anything has moved, and at the end."""
        if self._first is None or done < self._first[1]:
            self._first = now, done
        since, before = self._first
        if now - since < FIRST_S or not before < done < total:
            return None
        return (total - done) * (now - since) / (done - before)


def parse_json(text: str | bytes, *, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse as json.loads does, but all that can be wrong with the text is a ValueError, in words for a user."""
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("brackets nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # Python's protection from numbers of many thousand digits
        raise ValueError("a number of too many digits") from None
