"""One recording in two rows of the same part: the same samples in another file, or nearly the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from whisper_tuner.data.checks.facts import Facts, distance
from whisper_tuner.data.checks.finding import Check, Finding, Kind, Needs, Severity, of_row
from whisper_tuner.data.checks.material import Material, Row

# The share of the 128 bits of two prints that may differ. Among 1,376 clips the same recording, made anew, differs in
# up to 0.04; sentences of one voice that have all words but one in common differ in 0.14 at least.
ALIKE = 0.08
SLICES = 8  # of a print. Two that differ in few bits have one of these in common
MOST_COMPARED = 64  # prints with a slice in common: more are no sign of anything
LENGTH_S, LENGTH_SHARE = 0.25, 0.1  # by which the sound of the same recording may differ

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
Known = tuple[Row, Facts]


def find(material: Material) -> Iterator[Finding]:
    for part in material.manifests:
        first: dict[str, Row] = {}
        distinct: list[Known] = []
        for row, facts in material.with_facts():
            if row.part != part:
                continue
            if (other := first.setdefault(facts.digest, row)) is not row:
                yield of_row(SAME, row, f"the same recording as line {other.sample.line}{_texts(row, other)}")
            else:
                distinct.append((row, facts))
        for row, other in alike(distinct):
            yield of_row(NEAR, row, f"sounds like line {other.sample.line}{_texts(row, other)}")


def alike(known: Sequence[Known]) -> Iterator[tuple[Row, Row]]:
    """Each row that sounds like an earlier one, and that one."""
    slices: defaultdict[tuple[int, str], list[Known]] = defaultdict(list)
    for row, facts in known:
        if not facts.print:
            continue
        width = len(facts.print) // SLICES
        own = [(at, facts.print[at : at + width]) for at in range(0, len(facts.print), width)]
        for other, others in (candidate for piece in own for candidate in slices[piece]):
            if _same_length(facts, others) and distance(facts.print, others.print) <= ALIKE:
                yield row, other
                break
        else:
            for piece in own:
                if len(slices[piece]) < MOST_COMPARED:
                    slices[piece].append((row, facts))


def _same_length(one: Facts, other: Facts) -> bool:
    longer = max(one.sounding_s, other.sounding_s)
    return abs(one.sounding_s - other.sounding_s) <= max(LENGTH_S, LENGTH_SHARE * longer)


def _texts(one: Row, other: Row) -> str:
    return "" if one.text == other.text else f", whose text is '{other.text[:60]}'"


CHECK = Check(kinds=(SAME, NEAR), find=find, needs=Needs.AUDIO)
