"""Clips in which a model hears something else than their transcript says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Needs, Severity, of_row
from whisper_tuner.data.checks.material import Heard, Material, letters

CER = 0.5  # half of the text: a wrong transcript, or a clip that the model cannot understand
TIMES = 3.0  # the set's median CER: what is usual in a set says nothing of one clip
CERTAIN = -0.7  # mean log-probability of what it heard: less is guessing
USELESS = 0.4  # median CER, from which on the model does not know the set's language well enough to judge
SHORT = 3  # letters: one letter of two is half

KIND = Kind(
    name="contradicted",
    severity=Severity.WARNING,
    means="The model is certain to hear something else than the text says.",
    remedy="Listen to it. If the model is right, correct the text; if the text is right, keep it: it is worth most.",
)


def find(material: Material) -> Iterator[Finding]:
    usual = usual_cer(material)
    if usual > USELESS:
        return
    for row in material.spoken:
        if not (heard := material.heard.get((row.part, row.sample.line))):
            continue
        far = heard.cer >= CER and heard.cer > TIMES * usual
        if far and heard.logprob > CERTAIN and max(letters(row.text), letters(heard.text)) > SHORT:
            what = f"heard: {heard.text[:80] or 'nothing'} (CER {100 * heard.cer:.0f}, {heard.logprob:.2f})"
            yield of_row(KIND, row, what, badness=contradiction(heard))


def usual_cer(material: Material) -> float:
    """The median."""
    return median(heard.cer for heard in material.heard.values()) if material.heard else 0.0


def contradiction(heard: Heard) -> float:
    """How much a model contradicts a transcript: an error counts as much as it is sure of what it heard."""
    return min(heard.cer, 2.0) * math.exp(heard.logprob)


CHECK = Check(kinds=(KIND,), find=find, needs=Needs.HEARD)
