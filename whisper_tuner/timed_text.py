"""When each part of a transcript is said, written as Whisper writes it.

    <|0.00|> Good morning.<|2.50|><|2.80|> How are you?<|6.10|>

Seconds are those of the clip.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

SHORTEST_S = 0.1  # of a part: what begins sooner after another is one part with it
LATE_S = 0.5  # by which the last part may end after its clip
_TIME = re.compile(r"<\|(\d{1,2}\.\d\d)\|>")


class Said(NamedTuple):
    """One part of a transcript, said from start to end, in seconds of the clip."""

    start: float
    end: float
    text: str


def timed_text_of(parts: Iterable[Said]) -> str:
    return "".join(f"<|{part.start:.2f}|> {part.text}<|{part.end:.2f}|>" for part in parts)


def said_in(timed_text: str) -> tuple[Said, ...]:
    """The parts, in order. Raises ValueError, which says what is wrong."""
    before, *rest = _TIME.split(timed_text.strip())
    times, texts = [float(time) for time in rest[::2]], rest[1::2]
    if before or not times or len(times) % 2 or any(text.strip() for text in texts[1::2]):
        raise ValueError("is not as <|0.00|> text<|2.50|>")
    if any(later < earlier for earlier, later in pairwise(times)):
        raise ValueError("goes back in time")
    parts = zip(times[::2], times[1::2], texts[::2], strict=True)
    return tuple(Said(start, end, text.strip()) for start, end, text in parts if text.strip())


def without_overlaps(parts: Sequence[Said]) -> Iterator[Said]:
    """A part ends where the next begins at the latest; those that begin together are one. parts: by their start."""
    waiting: Said | None = None
    for part in parts:
        if waiting is None:
            waiting = part
        elif part.start - waiting.start < SHORTEST_S:
            waiting = Said(waiting.start, max(waiting.end, part.end), f"{waiting.text} {part.text}")
        else:
            yield waiting._replace(end=min(waiting.end, part.start))
            waiting = part
    if waiting is not None:
        yield waiting


def why_unusable(timed_text: str, text: str, seconds: float) -> str:
    """Why these times are not those of a clip of this length in which `text` is said; "" if they may be."""
    try:
        parts = said_in(timed_text)
    except ValueError as reason:
        return str(reason)
    if _letters(" ".join(part.text for part in parts)) != _letters(text):
        return "does not say the same as their text"
    return "ends after their clips" if parts and parts[-1].end > seconds + LATE_S else ""


def _letters(text: str) -> str:
    return "".join(text.split())
