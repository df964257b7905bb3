"""Segments as text, SRT, WebVTT or JSON. Subtitles have two lines of 42 letters, as broadcasters' do."""

from __future__ import annotations

import bisect
import html
import json
import math
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from whisper_tuner.eval.transcription import Recording, Segment, Word

LINE = 42  # letters; one of Chinese or Japanese counts as two
SPACES = 2  # at the ends of two lines, which are not shown
SENTENCE, PART = ".?!…。？！", ",;:—–、，；："  # signs after which it is good, and fair, to cut
SUFFIXES = {"text": ".txt", "srt": ".srt", "vtt": ".vtt", "json": ".json"}


def rendered(recording: Recording, form: str, audio: Path) -> str:
    """Write the contents of a file of this format; see SUFFIXES."""
    if form == "text":
        return "".join(f"{segment.text}\n" for segment in recording.segments)
    if form == "json":
        return _json(recording, audio)
    blocks = []
    for number, cue in enumerate(cues(recording), start=1):
        if form == "srt":  # an arrow inside the text would be read as another line of times
            start, end, text = timestamp(cue.start, ","), timestamp(cue.end, ","), cue.text.replace("-->", "->")
            blocks.append(f"{number}\n{start} --> {end}\n{text}\n")
        else:
            start, end, text = timestamp(cue.start, "."), timestamp(cue.end, "."), html.escape(cue.text, quote=False)
            blocks.append(f"{start} --> {end}\n{text}\n")
    return "\n".join(blocks if form == "srt" else ["WEBVTT\n", *blocks])


class Cue(NamedTuple):
    """A text that is shown at once, in one line or two."""

    start: float
    end: float
    text: str


def cues(recording: Recording) -> Iterator[Cue]:
    """Cut segments into cues. Within one, time is shared by length of text, unless the times of words are known."""
    for segment in recording.segments:
        parts = _cut(_units(segment.text))
        ends = list(_ends(segment, ["".join(part) for part in parts]))
        for part, start, end in zip(parts, [segment.start, *ends], ends, strict=False):
            place = _split(part) or len(part)  # one word may be longer than two lines
            lines = ["".join(line).strip() for line in (part[:place], part[place:]) if line]
            yield Cue(start, end, "\n".join(lines))


def _ends(segment: Segment, parts: Sequence[str]) -> Iterator[float]:
    if not segment.words:
        per_width = (segment.end - segment.start) / max(1, width(segment.text))
        yield from (segment.start + per_width * so_far for so_far in accumulate(map(width, parts)))
        return
    letters = [0, *accumulate(len("".join(word.text.split())) for word in segment.words)]
    wanted = accumulate(len("".join(part.split())) for part in parts)
    for number, count in enumerate(wanted, start=1):
        last = bisect.bisect_left(letters, count, 1, len(letters) - 1) - 1
        yield segment.end if number == len(parts) else segment.words[last].end


@lru_cache(10_000)  # each word is looked at for many cuts
def width(text: str) -> int:
    """Count the columns that a text takes."""
    return sum(2 if _is_wide(letter) else not unicodedata.combining(letter) for letter in text)


def _is_wide(letter: str) -> bool:
    return unicodedata.east_asian_width(letter) in "WF"


def _units(text: str) -> list[str]:
    """Split a text into what is not cut: words with the space after them, and wide letters, which are written without
    spaces. A sign belongs to what is before it, also where a space is between, as in French.
    """
    units: list[str] = []
    for letter in text:
        ends = units and (_is_wide(letter) or _is_wide(units[-1][-1]) or units[-1][-1] == " ")
        if not units or (ends and letter not in f"{SENTENCE}{PART} "):
            units.append(letter)
        else:
            units[-1] += letter
    return units


def _cut(units: Sequence[str]) -> list[Sequence[str]]:
    """Make parts of two lines at most, as few and as alike as good places to cut allow."""
    widths = [0, *accumulate(map(width, units))]
    wanted = widths[-1] / max(1, math.ceil(widths[-1] / (2 * LINE)))

    def price(start: int, end: int) -> float:
        if end - start > 1 and _split(units[start:end]) is None:
            return math.inf
        uneven = (widths[end] - widths[start]) / wanted - 1
        return 1 + uneven**2 + 2 * _unwelcome(units[end - 1], is_last=end == len(units))

    # The cheapest way to cut the first n units, by the place of its last cut.
    best: list[tuple[float, int]] = [(0.0, 0)]
    first = 0  # what is before it does not fit into two lines with unit `end`
    for end in range(1, len(units) + 1):
        while first < end - 1 and widths[end] - widths[first] > 2 * LINE + SPACES:
            first += 1
        best.append(min((best[start][0] + price(start, end), start) for start in range(first, end)))
    places = [len(units)]
    while places[-1]:
        places.append(best[places[-1]][1])
    places.reverse()
    return [units[start:end] for start, end in pairwise(places)]


def _unwelcome(unit: str, *, is_last: bool = False) -> float:
    """Return the price of a cut after this unit: low where the text pauses."""
    sign = unit.rstrip().rstrip("\"'»”’)")[-1:]
    return 0.0 if is_last or (sign and sign in SENTENCE) else 0.5 if sign and sign in PART else 1.0


def _split(units: Sequence[str]) -> int | None:
    """Find where the second line begins, len(units) for none; None if two lines do not hold them."""
    begins = [0, *accumulate(map(width, units))]
    # Of the first line, if it ends with this unit: without the space at its end.
    ends = [begin + width(unit.rstrip()) for begin, unit in zip(begins, units, strict=False)]
    whole = ends[-1]
    if whole <= LINE:
        return len(units)
    places = [n for n in range(1, len(units)) if ends[n - 1] <= LINE and whole - begins[n] <= LINE]
    return min(places, key=lambda n: abs(2 * ends[n - 1] - whole) / LINE + _unwelcome(units[n - 1]), default=None)


def timestamp(seconds: float, mark: str) -> str:
    """Write such as 01:02:03,004, with `mark` before the milliseconds."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{mark}{thousandths:03}"


def _json(recording: Recording, audio: Path) -> str:
    def between(one: Segment | Word) -> dict[str, Any]:
        return {"start": round(one.start, 3), "end": round(one.end, 3), "text": one.text.strip()}

    segments = [
        between(segment) | ({"words": [between(word) for word in segment.words]} if segment.words else {})
        for segment in recording.segments
    ]
    stored = {
        "audio": str(audio),
        "duration_s": round(recording.duration_s, 3),
        "text": recording.text,
        "segments": segments,
    }
    return json.dumps(stored, ensure_ascii=False, indent=2) + "\n"
