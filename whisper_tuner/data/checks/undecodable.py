"""Audio whose header and edges are sound, but that cannot be decoded whole."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Needs, Severity, of_row
from whisper_tuner.data.checks.material import Material

KIND = Kind(
    name="undecodable audio",
    severity=Severity.ERROR,
    means="The header and both ends can be read, but what lies in between cannot be decoded.",
    remedy="Copy or convert it again, or remove the row.",
    unusable=True,
)


MISSING_S = 0.05  # decoders differ by a frame at most

DAMAGED = Kind(
    name="damaged audio",
    severity=Severity.WARNING,
    means="The file is damaged inside: a part of what its header states is lost, and words with it.",
    remedy="Copy or convert it again, or listen whether its text still fits.",
)


def find(material: Material) -> Iterator[Finding]:
    for row in material.rows:
        if (facts := material.facts.get(row.sample.audio)) and facts.problem:
            yield of_row(KIND, row, facts.problem)
        elif facts and facts.missing_s > MISSING_S:
            what = f"{facts.missing_s:.2f} s of what its header states are lost"
            yield of_row(DAMAGED, row, what, badness=facts.missing_s)


CHECK = Check(kinds=(KIND, DAMAGED), find=find, needs=Needs.AUDIO)
