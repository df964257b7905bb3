"""Punctuation in some rows, and none in others."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity
from whisper_tuner.data.checks.material import Material, words
from whisper_tuner.data.checks.minority import two_ways

FEWEST = 3  # words: a word alone may stand without
ENDS = frozenset(["Po", "Pe", "Pf", "Pd", "Pi", "Ps"])  # Unicode's categories of what may end a sentence

KIND = Kind(
    name="two ways of punctuation",
    severity=Severity.WARNING,
    means="Some rows end with a full stop or the like, others do not. The model cannot know which to write.",
    remedy="Write all rows in one way, best with punctuation: then the model keeps what it knows.",
)


def find(material: Material) -> Iterator[Finding]:
    ended, open_ended = [], []
    for row in material.spoken:
        if len(words(row.text)) >= FEWEST:
            (ended if unicodedata.category(row.text[-1]) in ENDS else open_ended).append(row)
    return two_ways(KIND, open_ended, ended, ("no punctuation at the end", "some"))


CHECK = Check(kinds=(KIND,), find=find)
