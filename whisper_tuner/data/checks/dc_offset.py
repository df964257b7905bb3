"""Recordings that do not swing around zero."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Needs, Severity, of_row
from whisper_tuner.data.checks.material import Material

OFFSET = 0.02  # of full scale; a sound card's own is below 0.005

KIND = Kind(
    name="DC offset",
    severity=Severity.WARNING,
    means="The waveform does not swing around zero: a fault of the sound card, or samples read in the wrong format.",
    remedy="Listen to it. If it is speech, a high-pass filter mends it (`ffmpeg -af highpass=f=40`).",
)


def find(material: Material) -> Iterator[Finding]:
    for row, facts in material.with_facts():
        if abs(facts.offset) >= OFFSET:
            what = f"its mean is {facts.offset:+.3f} of full scale"
            yield of_row(KIND, row, what, badness=abs(facts.offset))


CHECK = Check(kinds=(KIND,), find=find, needs=Needs.AUDIO)
