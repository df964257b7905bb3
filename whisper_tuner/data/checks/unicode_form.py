"""Letters and their accents as two characters."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.checks import repair
from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity, of_row
from whisper_tuner.data.checks.material import Material

KIND = Kind(
    name="decomposed letters",
    severity=Severity.WARNING,
    means="Letters and accents are characters of their own (NFD, as in file names on a Mac): other tokens than usual.",
    remedy="--fix composes them (NFC).",
    repairs=True,
)


def find(material: Material) -> Iterator[Finding]:
    for row in material.spoken:
        if not row.text.isascii() and (better := repair.composed(row.text)) != row.text:
            pieces = sorted(set(row.text) - set(better))
            yield of_row(KIND, row, f"it has {', '.join(f'U+{ord(char):04X}' for char in pieces[:4])}")


CHECK = Check(kinds=(KIND,), find=find)
