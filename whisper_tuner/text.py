"""Counts, sizes, durations, changes of WER and the time left, as people read them; words of a text; JSON of anybody."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

WORD = re.compile(r"[^\W_]+(?:['’ʼ-][^\W_]+)*")
FIRST_S = 5.0  # before that a rate says little
JUDGED_CLIPS = 6  # fewer tell nothing even if all become better: of 5, chance does that in 6 % of cases (sign test)
CHANCE, SAME = "may be chance", "as many errors in each clip"


def counted(count: int, noun: str) -> str:
    """Return such as 1 row, or 1,200 rows."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def wer_verdict(between: Sequence[float], clips: int) -> str:
    """Judge the difference of two WERs by its interval of 95 %; "" where that is not known."""
    if 0 < clips < JUDGED_CLIPS:
        return "too few clips"
    if not between:
        return ""
    low, high = between
    if low == high == 0:
        return SAME
    if low <= 0 <= high:
        return CHANCE
    return "better" if high < 0 else "worse"


def wer_change(points: float, between: Sequence[float], clips: int) -> str:
    """Tell the difference of two WERs, as `-11.9 points (95 %: -25.1 to +3.0, 9 clips): may be chance`.

    between: the ends of the difference's interval, if they are known. clips: 0 if nobody knows.
    """
    is_judged = between and clips >= JUDGED_CLIPS and wer_verdict(between, clips) != SAME  # which no resampling moves
    interval = [f"95 %: {between[0]:+.1f} to {between[1]:+.1f}"] if is_judged else []
    known = ", ".join([*interval, *([counted(clips, "clip")] if clips else [])])
    verdict = wer_verdict(between, clips)
    return f"{points:+.1f} points" + (f" ({known})" if known else "") + (f": {verdict}" if verdict else "")


def wer_told(before: float | None, after: float | None, between: Sequence[float] = (), clips: int = 0) -> str:
    """Tell what training did to WER, as `26.2 -> 14.3: -11.9 points (...)`; see wer_change. "" if none was measured."""
    rates = " -> ".join("?" if rate is None else f"{rate:.1f}" for rate in (before, after))
    if before is None or after is None:
        return "" if before is after else rates
    return f"{rates}: {wer_change(round(after, 1) - round(before, 1), between, clips)}"  # as anybody would subtract


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


def in_words(seconds: float) -> str:
    """Write a time that is not known exactly."""
    if seconds < 150:
        return f"about {max(10, round(seconds, -1)):.0f} seconds"
    minutes = round(seconds / 60)
    hours = f"{minutes // 60} h " if minutes >= 60 else ""
    return f"about {hours}{minutes % 60} min" if hours else f"about {minutes} minutes"


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
