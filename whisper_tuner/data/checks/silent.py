"""Clips in which nothing can be heard."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Needs, Severity, of_row
from whisper_tuner.data.checks.material import Material

SILENT_PEAK = 10 ** (-66 / 20)  # 16 steps of 16 bits: less than the noise of any microphone that hears speech
QUIET_DB = -50.0  # of its loud frames; speech recorded from across a room has about -40

SILENT = Kind(
    name="silent",
    severity=Severity.ERROR,
    means="Nothing can be heard, but there is a text. The model learns to invent text in silence.",
    remedy="Record it again, or remove the row.",
)
QUIET = Kind(
    name="very quiet",
    severity=Severity.WARNING,
    means="The loudest parts are below -50 dB of full scale: speech drowns in the noise of recording and rounding.",
    remedy="Listen to it. Record closer to the microphone; making it louder afterwards does not help.",
)


def find(material: Material) -> Iterator[Finding]:
    for row, facts in material.with_facts():
        if not row.text:
            continue
        if facts.peak <= SILENT_PEAK:
            yield of_row(SILENT, row, f"no sample is higher than {facts.peak:.5f} of full scale", badness=1)
        elif facts.level < QUIET_DB and facts.cancelled < 20:
            yield of_row(QUIET, row, f"its loudest parts have {facts.level:.0f} dB", badness=-facts.level)


CHECK = Check(kinds=(SILENT, QUIET), find=find, needs=Needs.AUDIO)
