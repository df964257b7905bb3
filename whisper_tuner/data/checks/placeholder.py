"""Texts that stand for a missing one: N/A, null, the name of the file."""

from __future__ import annotations

import re
from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity, of_row
from whisper_tuner.data.checks.material import Material, Row, words

_EMPTY = (
    "n/a n.a. #n/a #name? #ref! #value! nan null nil undefined unknown untitled placeholder todo tbd xxx "
    "<unk> [unk] [null] (null) (none) <none> <null> <empty> (empty) [empty] -"
)
EMPTY = frozenset(_EMPTY.split())
FILE = re.compile(r"[^\s]+\.(?:wav|mp3|m4a|flac|ogg|opus|aac|mp4|aiff?|wma|webm|txt)", re.IGNORECASE)

KIND = Kind(
    name="placeholder",
    severity=Severity.ERROR,
    means="The text is no transcript: N/A, null, punctuation alone, or the name of the file.",
    remedy="Write what is said, or remove the row.",
)


def find(material: Material) -> Iterator[Finding]:
    for row in material.spoken:
        if why := _stands_for_nothing(row):
            yield of_row(KIND, row, f"'{row.text[:60]}' is {why}")


def _stands_for_nothing(row: Row) -> str:
    text, stem = row.text.strip(), row.sample.audio.stem
    if text.lower() in EMPTY:
        return "no transcript"
    if FILE.fullmatch(text) or (text in (stem, row.sample.audio.name, row.sample.id) and _is_made_up(text)):
        return "the name of a file"
    return "" if words(text) else "no word"


def _is_made_up(name: str) -> bool:
    """Whether nobody says it, as clip_0012 and IMG-20: a file may well be called by what is said in it."""
    return any(char.isdigit() for char in name) and any(char in "-_" or char.isalpha() for char in name)


CHECK = Check(kinds=(KIND,), find=find)
