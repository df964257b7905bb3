"""HTML in texts."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.checks import repair
from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity, of_row
from whisper_tuner.data.checks.material import Material

KIND = Kind(
    name="markup",
    severity=Severity.WARNING,
    means="The text has HTML in it, as `&amp;` or `<i>`, which nobody says.",
    remedy="--fix replaces entities and removes tags.",
    repairs=True,
)


def find(material: Material) -> Iterator[Finding]:
    for row in material.spoken:
        if found := repair.has_markup(row.text):
            yield of_row(KIND, row, f"'{found}'")


CHECK = Check(kinds=(KIND,), find=find)
