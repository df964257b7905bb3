"""Audio whose header and edges are sound, but that cannot be decoded whole."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Needs, Severity, of_row
from whisper_tuner.data.checks.material import Material

KIND = Kind(
    name="undecodable audio",
    severity=Severity.ERROR,
    means="The header and both ends can be read, but the file is damaged in between. Training would stop at it.",
    remedy="Copy or convert it again, or remove the row.",
    unusable=True,
)


def find(material: Material) -> Iterator[Finding]:
    for row in material.rows:
        if (facts := material.facts.get(row.sample.audio)) and facts.problem:
            yield of_row(KIND, row, facts.problem)


CHECK = Check(kinds=(KIND,), find=find, needs=Needs.AUDIO)
