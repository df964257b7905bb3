"""Clips that are far louder or quieter than the others."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Needs, Severity, of_row
from whisper_tuner.data.checks.material import Material
from whisper_tuner.data.checks.silent import QUIET_DB

FEWEST = 10  # clips, for their median to mean something
# People who record themselves differ by 10 dB; the voices of one corpus seldom by more than 15.
APART_DB = 18.0
SPREADS = 5.0  # and at least so many median deviations, where all differ much

KIND = Kind(
    name="loudness outlier",
    severity=Severity.INFO,
    means="The clip is far louder or quieter than most. The log-mel evens this out, but it may be another recording.",
    remedy="Listen to it.",
)


def find(material: Material) -> Iterator[Finding]:
    known = [(row, facts.level) for row, facts in material.with_facts() if facts.level > QUIET_DB]
    if len(known) < FEWEST:
        return
    usual = median(level for _, level in known)
    deviation = median(abs(level - usual) for _, level in known)
    for row, level in known:
        if abs(level - usual) > max(APART_DB, SPREADS * deviation):
            what = f"{level:.0f} dB, where most have about {usual:.0f} dB"
            yield of_row(KIND, row, what, badness=abs(level - usual))


CHECK = Check(kinds=(KIND,), find=find, needs=Needs.AUDIO)
