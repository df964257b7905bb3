"""One recording in two rows of the same part: the same samples in another file, or nearly the same."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Needs, Severity, of_row
from whisper_tuner.data.checks.material import Material, Row
from whisper_tuner.data.checks.prints import Prints

SAME = Kind(
    name="duplicate recording",
    severity=Severity.ERROR,
    means="Another file of this part has the same samples. It counts twice in training, or one of two texts is wrong.",
    remedy="Keep one of them; if their texts differ, the right one.",
)
NEAR = Kind(
    name="near-duplicate recording",
    severity=Severity.WARNING,
    means="Another clip sounds the same, but for loudness, codec, or silence at its ends.",
    remedy="Listen to both, and keep one of them.",
)


def find(material: Material) -> Iterator[Finding]:
    for part in material.manifests:
        first: dict[str, Row] = {}
        distinct = Prints()
        for row, facts in material.with_facts():
            if row.part != part:
                continue
            if (other := first.setdefault(facts.digest, row)) is not row:
                yield of_row(SAME, row, f"the same recording as line {other.sample.line}{_texts(row, other)}")
            elif other := distinct.like(facts):
                yield of_row(NEAR, row, f"sounds like line {other.sample.line}{_texts(row, other)}")
            else:
                distinct.add(row, facts)


def _texts(one: Row, other: Row) -> str:
    return "" if one.text == other.text else f", whose text is '{other.text[:60]}'"


CHECK = Check(kinds=(SAME, NEAR), find=find, needs=Needs.AUDIO)
