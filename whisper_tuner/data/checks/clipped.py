"""Recordings that were too loud: their tops are cut flat."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Needs, Severity, of_row
from whisper_tuner.data.checks.material import Material

SHARE = 0.001  # of all samples: a few flat tops are not heard

KIND = Kind(
    name="clipped",
    severity=Severity.WARNING,
    means="The recording was too loud: its tops are cut flat, which sounds harsh and blurs consonants.",
    remedy="Listen to it. Record again with less gain; a few such clips do no harm if you can understand them.",
)


def find(material: Material) -> Iterator[Finding]:
    for row, facts in material.with_facts():
        if facts.clipped >= SHARE:
            what = f"{100 * facts.clipped:.1f} % of its samples are in flat tops"
            yield of_row(KIND, row, what, badness=facts.clipped)


CHECK = Check(kinds=(KIND,), find=find, needs=Needs.AUDIO)
