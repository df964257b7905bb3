"""Several channels of which the model hears the mean: one that is dead, or two that cancel each other."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Needs, Severity, of_row
from whisper_tuner.data.checks.material import Material

DEAD_DB = 40.0  # of the loudest channel to the quietest
# The mean of two channels alike is as loud as they are, of two that have nothing in common 3 dB quieter, and if one of
# them is dead 6 dB.
CANCELLED_DB = 10.0

DEAD = Kind(
    name="dead channel",
    severity=Severity.INFO,
    means="One of the channels is silent. The model hears the mean of all, which is quieter but complete.",
    remedy="Nothing has to be done. To be tidy, convert the file to mono from the channel that has the speech.",
)
CANCELS = Kind(
    name="cancelling channels",
    severity=Severity.ERROR,
    means="One channel is the other one turned upside down: their mean, which the model hears, is nearly silent.",
    remedy="Convert it to mono from one of its channels (`ffmpeg -af pan=mono|c0=c0`).",
)


def find(material: Material) -> Iterator[Finding]:
    for row, facts in material.with_facts():
        if facts.cancelled >= CANCELLED_DB:
            what = f"the mean of its channels is {facts.cancelled:.0f} dB quieter than they are"
            yield of_row(CANCELS, row, what, badness=facts.cancelled)
        elif facts.balance >= DEAD_DB:
            what = f"one of its {facts.channels} channels is {facts.balance:.0f} dB quieter than another"
            yield of_row(DEAD, row, what, badness=facts.balance)


CHECK = Check(kinds=(DEAD, CANCELS), find=find, needs=Needs.AUDIO)
