"""Capital letters in some rows, and none, or nothing else, in others."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity
from whisper_tuner.data.checks.material import Material, words
from whisper_tuner.data.checks.minority import two_ways

FEWEST = 3  # words of two letters or more: less may be an abbreviation, also one that is spelled, or half a sentence

KIND = Kind(
    name="two ways of casing",
    severity=Severity.WARNING,
    means="Some rows are in capitals only, or have none where the rest begins with one. Whisper writes as in a book.",
    remedy="Write all rows in one way, best as in a book: then the model keeps what it knows.",
)


def find(material: Material) -> Iterator[Finding]:
    capitals, mixed, small = [], [], []
    for row in material.spoken:
        if sum(len(word) > 1 for word in words(row.text)) < FEWEST or row.text.upper() == row.text.lower():
            continue
        way = capitals if row.text.isupper() else small if row.text.islower() else mixed
        way.append(row)
    yield from two_ways(KIND, capitals, [*mixed, *small], ("capitals only", "small letters"))
    yield from two_ways(KIND, small, mixed, ("no capital letter", "some"))


CHECK = Check(kinds=(KIND,), find=find)
