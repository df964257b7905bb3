"""Spaces that are none, or too many."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.checks import repair
from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity, of_row
from whisper_tuner.data.checks.material import Material

NAMES = {"\n": "a line break", "\r": "a line break", "\t": "a tab"}

KIND = Kind(
    name="odd whitespace",
    severity=Severity.INFO,
    means="The text has line breaks, tabs, several spaces in a row, or no-break spaces, which are tokens of their own.",
    remedy="--fix makes a single space of each.",
    repairs=True,
)


def find(material: Material) -> Iterator[Finding]:
    for row in material.spoken:
        if repair.single_spaced(row.text) != row.text:
            odd = sorted({NAMES.get(char, f"U+{ord(char):04X}") for char in row.text if char.isspace() and char != " "})
            yield of_row(KIND, row, f"it has {' and '.join(odd) or 'several spaces in a row'}")


CHECK = Check(kinds=(KIND,), find=find)
