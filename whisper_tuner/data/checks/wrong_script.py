"""Texts in letters of another script than the others, and words that mix two of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity, of_row
from whisper_tuner.data.checks.material import Material, words
from whisper_tuner.data.checks.scripts import CYRILLIC, GREEK, LATIN, counted, scripts_of

USUAL = 0.05  # of a set's letters: a script with fewer is none that the set is written in
FEWEST = 2  # letters of the other script: a single one may be a sign, as in β or α
MIXED = ({LATIN, CYRILLIC}, {LATIN, GREEK}, {CYRILLIC, GREEK})  # have letters that look the same

KIND = Kind(
    name="wrong script",
    severity=Severity.WARNING,
    means="Most of the text is in letters that neither the language nor the set has: another language, or nonsense.",
    remedy="Correct the text or give the row its language. Remove the row if it is another language by mistake.",
)
LOOKALIKE = Kind(
    name="look-alike letters",
    severity=Severity.WARNING,
    means="A word mixes scripts, as with a Cyrillic а among Latin letters. It looks right, but has other tokens.",
    remedy="Type the word anew.",
)


def find(material: Material) -> Iterator[Finding]:
    known = scripts_of(material.language) or _usual(material)
    for row in material.spoken:
        if not (found := counted(row.text)):
            continue
        expected = (scripts_of(row.sample.language) if row.sample.language else known) or known
        foreign = {name: count for name, count in found.items() if name not in expected}
        if len(found) > 1 and (mixed := _mixed(row.text)):
            yield of_row(LOOKALIKE, row, f"'{mixed}' mixes {' and '.join(sorted(counted(mixed)))} letters")
        elif sum(foreign.values()) >= max(FEWEST, found.total() / 2):
            share = 100 * sum(foreign.values()) / found.total()
            what = f"{share:.0f} % of its letters are {', '.join(foreign)}, not {' or '.join(sorted(expected))}"
            yield of_row(KIND, row, what, badness=share)


def _usual(material: Material) -> frozenset[str]:
    every: Counter[str] = Counter()
    for row in material.spoken:
        every.update(counted(row.text))
    return frozenset(name for name, count in every.items() if count >= USUAL * every.total())


def _mixed(text: str) -> str:
    return next((word for word in words(text) if any(pair <= set(counted(word)) for pair in MIXED)), "")


CHECK = Check(kinds=(KIND, LOOKALIKE), find=find)
