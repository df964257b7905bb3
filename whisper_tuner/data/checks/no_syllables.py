"""Sound without the rise and fall of speech: noise, hum, a tone."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Needs, Severity, of_row
from whisper_tuner.data.checks.material import Material
from whisper_tuner.data.checks.silent import QUIET_DB

# From quiet to loud frames of 20 ms. Noise has 3 dB, and a tone none; speech in a loud car still has 15.
SPREAD_DB = 8.0
SHORTEST_S = 0.5

KIND = Kind(
    name="no rise and fall",
    severity=Severity.WARNING,
    means="The sound is as loud all the time, as no speech is: noise, hum or a tone.",
    remedy="Listen to it. If nobody speaks, remove the row.",
)


def find(material: Material) -> Iterator[Finding]:
    for row, facts in material.with_facts():
        if row.text and facts.spread < SPREAD_DB and facts.seconds >= SHORTEST_S and facts.level > QUIET_DB:
            what = f"only {facts.spread:.0f} dB between its quiet and its loud parts"
            yield of_row(KIND, row, what, badness=-facts.spread)


CHECK = Check(kinds=(KIND,), find=find, needs=Needs.AUDIO)
