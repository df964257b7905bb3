"""Recordings of a telephone."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.audio import SAMPLE_RATE
from whisper_tuner.data.checks.finding import Check, Finding, Kind, Needs, Severity, of_row
from whisper_tuner.data.checks.material import Material

KIND = Kind(
    name="low sample rate",
    severity=Severity.INFO,
    means="The file has fewer than 16,000 samples a second, as from a telephone: it lacks the high sounds of s and f.",
    remedy="Fine, if the model is to hear such recordings later. Else prefer the originals, if there are any.",
)


def find(material: Material) -> Iterator[Finding]:
    for row, facts in material.with_facts():
        if facts.rate < SAMPLE_RATE:
            yield of_row(KIND, row, f"{facts.rate:,} samples a second", badness=-facts.rate)


CHECK = Check(kinds=(KIND,), find=find, needs=Needs.AUDIO)
