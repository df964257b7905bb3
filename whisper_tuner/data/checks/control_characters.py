"""Characters that nobody sees."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.checks import repair
from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity, of_row
from whisper_tuner.data.checks.material import Material

KIND = Kind(
    name="control characters",
    severity=Severity.WARNING,
    means="The text has characters that are not shown: control codes, soft hyphens, marks of direction.",
    remedy="--fix removes them.",
    repairs=True,
)


def find(material: Material) -> Iterator[Finding]:
    for row in material.spoken:
        if (better := repair.without_controls(row.text)) != row.text:
            hidden = sorted({f"U+{ord(char):04X}" for char in set(row.text) - set(better)})
            yield of_row(KIND, row, f"it has {', '.join(hidden)}")


CHECK = Check(kinds=(KIND,), find=find)
