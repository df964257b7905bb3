"""UTF-8 that was read in another encoding: Ã© in place of é."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.checks import repair
from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity, of_row
from whisper_tuner.data.checks.material import Material

KIND = Kind(
    name="misread encoding",
    severity=Severity.WARNING,
    means="The text was UTF-8 and was read as something else: Ã© in place of é. The model learns to write it so.",
    remedy="Read the file again as UTF-8. --fix repairs what is certain.",
    repairs=True,
)


def find(material: Material) -> Iterator[Finding]:
    for row in material.spoken:
        if (better := repair.probably_decoded(row.text)) != row.text:
            yield of_row(KIND, row, f"probably: {better[:80]}")


CHECK = Check(kinds=(KIND,), find=find)
