"""What stands twice: in one part, or in a part to train on and one to test with."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator

from whisper_tuner.data.checks.facts import PRINT_BITS, Facts
from whisper_tuner.data.checks.finding import Finding, Kind, Needs, Severity, check, of_row
from whisper_tuner.data.checks.material import Material, Row, letters
from whisper_tuner.text import counted, text_key

# The share of bits of two prints that may differ. Among 1,376 clips the same recording, made anew, differs in up to
# 0.04; sentences of one voice that have all words but one in common differ in 0.14 at least.
ALIKE = 0.08
SLICES = 8  # of a print. Two that differ in few bits have one of these in common
MOST_COMPARED = 64  # prints with a slice in common: more are no sign of anything
LENGTH_S, LENGTH_SHARE = 0.25, 0.1  # by which the sound of the same recording may differ

_MOST_BITS = int(ALIKE * PRINT_BITS)
_WIDTH = PRINT_BITS // SLICES


class Prints:
    """Find the recordings that sound alike by their prints (see facts.py), without comparing each with each."""

    def __init__(self) -> None:
        self._by_slice: defaultdict[tuple[int, int], list[tuple[int, Row, Facts]]] = defaultdict(list)

    def add(self, row: Row, facts: Facts) -> None:
        for key in _slices(facts):
            if len(self._by_slice[key]) < MOST_COMPARED:
                self._by_slice[key].append((int(facts.print, 16), row, facts))

    def like(self, facts: Facts) -> Row | None:
        """Return an added row that sounds like this."""
        bits = int(facts.print or "0", 16)
        for key in _slices(facts):
            for other, row, others in self._by_slice.get(key, ()):
                longer = max(facts.sounding_s, others.sounding_s)
                is_as_long = abs(facts.sounding_s - others.sounding_s) <= max(LENGTH_S, LENGTH_SHARE * longer)
                if is_as_long and (bits ^ other).bit_count() <= _MOST_BITS:
                    return row
        return None


def _slices(facts: Facts) -> Iterator[tuple[int, int]]:
    """Yield place and bits of each slice; nothing for a clip without a print."""
    bits = int(facts.print or "0", 16)
    for place in range(SLICES if facts.print else 0):
        yield place, bits >> place * _WIDTH & (1 << _WIDTH) - 1


SOUNDS_LIKE = "sounds like"

LEAKED_AUDIO = Kind(
    name="audio in two parts",
    severity=Severity.ERROR,
    means="The recording is also in the validation or test set: the model is tested on what it has learned by heart.",
    remedy="Remove it from the set that is trained on.",
)
ALIKE_IN_TWO = Kind(
    name="similar recording in two parts",
    severity=Severity.WARNING,
    means="One of another text in the validation or test set sounds the same: a copy, or words that are said alike.",
    remedy="Listen to both. If it is a copy, remove it from the set that is trained on, and mend the text.",
)


@check(LEAKED_AUDIO, ALIKE_IN_TWO, place=3)
def find_leaked_audio(material: Material) -> Iterator[Finding]:
    for part in material.manifests:
        told: set[int] = set()
        for other in material.of_later_parts(part):
            for row, same, how in (*_same_files(material, part, other), *_same_sound(material, part, other)):
                if row.sample.line not in told:
                    told.add(row.sample.line)
                    is_another = how == SOUNDS_LIKE and text_key(row.text) != text_key(same.text)
                    what = f"{how} {same.place} ({other}){_texts(row, same)}"
                    yield of_row(ALIKE_IN_TWO if is_another else LEAKED_AUDIO, row, what)


def _same_files(material: Material, part: str, other: str) -> Iterator[tuple[Row, Row, str]]:
    there = {os.path.normpath(row.sample.audio): row for row in material.rows if row.part == other}
    for row in material.rows:
        if row.part == part and (same := there.get(os.path.normpath(row.sample.audio))):
            yield row, same, "the same file as"


def _same_sound(material: Material, part: str, other: str) -> Iterator[tuple[Row, Row, str]]:
    ours, theirs = ([pair for pair in material.with_facts() if pair[0].part == name] for name in (part, other))
    digests = {facts.digest: row for row, facts in theirs}
    prints = Prints()
    for row, facts in theirs:
        prints.add(row, facts)
    for row, facts in ours:
        if same := digests.get(facts.digest):
            yield row, same, "the same recording as"
        elif same := prints.like(facts):
            yield row, same, SOUNDS_LIKE


SAME_AUDIO = Kind(
    name="duplicate recording",
    severity=Severity.ERROR,
    means="Another file of this part has the same samples. It counts twice in training, or one of two texts is wrong.",
    remedy="Keep one of them; if their texts differ, the right one.",
)
NEAR_AUDIO = Kind(
    name="near-duplicate recording",
    severity=Severity.WARNING,
    means="Another clip sounds the same, but for loudness, codec, or silence at its ends.",
    remedy="Listen to both, and keep one of them.",
)


@check(SAME_AUDIO, NEAR_AUDIO, needs=Needs.AUDIO, place=4)
def find_duplicate_audio(material: Material) -> Iterator[Finding]:
    for part in material.manifests:
        first: dict[str, Row] = {}
        distinct = Prints()
        for row, facts in material.with_facts():
            if row.part != part:
                continue
            if (other := first.setdefault(facts.digest, row)) is not row:
                yield of_row(SAME_AUDIO, row, f"the same recording as line {other.sample.line}{_texts(row, other)}")
            elif like := distinct.like(facts):
                yield of_row(NEAR_AUDIO, row, f"sounds like line {like.sample.line}{_texts(row, like)}")
            else:
                distinct.add(row, facts)


def _texts(one: Row, other: Row) -> str:
    return "" if one.text == other.text else f", whose text is '{other.text[:60]}'"


SHORT_LEAK = 16  # letters: everybody says "thank you very much"
MANY_LEAKS = 0.1  # of a part's rows: above, it is a set of fixed phrases, and one finding says so

LEAKED_TEXT = Kind(
    name="text in two parts",
    severity=Severity.WARNING,
    means=f"The text, of more than {SHORT_LEAK} letters, is also in the validation or test set. The decoder learns it "
    "by heart, so WER is too good. What a run says of shared sentences counts shorter ones, too.",
    remedy="Remove it from the set that is trained on. In a set of fixed phrases this is as it will be in use.",
)


@check(LEAKED_TEXT, place=11)
def find_leaked_texts(material: Material) -> Iterator[Finding]:
    for part in material.manifests:
        found = leaked_texts(material, part)
        every = sum(row.part == part for row in material.rows)
        if len(found) > MANY_LEAKS * every:
            row, other = found[0]
            what = f"{len(found)} of {every} rows of {row.manifest.name} have a text of {other.part}"
            what += f" (the first has that of {other.place})"
            yield of_row(LEAKED_TEXT, row, what, among=[row for row, _ in found])
            continue
        for row, other in found:
            yield of_row(LEAKED_TEXT, row, f"the same text as {other.place} ({other.part})")


def leaked_texts(material: Material, part: str) -> list[tuple[Row, Row]]:
    """Return each row of a part whose text a later part has, and the row there."""
    there: dict[str, Row] = {}
    for other in material.of_later_parts(part):
        for row in material.spoken:
            if row.part == other and letters(row.text) > SHORT_LEAK:
                there.setdefault(text_key(row.text), row)
    if not there:
        return []
    own = ((row, text_key(row.text)) for row in material.spoken if row.part == part)
    return [(row, there[key]) for row, key in own if key in there]


LEAKED_SPEAKER = Kind(
    name="speaker in two parts",
    severity=Severity.WARNING,
    means="The speaker is also in the validation or test set: WER tells how well known voices are heard, not new ones.",
    remedy="Keep the speakers of the test set out of the others. If the model is for these very people, it is right.",
)


@check(LEAKED_SPEAKER, place=12)
def find_leaked_speakers(material: Material) -> Iterator[Finding]:
    speakers: defaultdict[str, defaultdict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in material.rows:
        if row.sample.speaker:
            speakers[row.part][row.sample.speaker].append(row)
    for part in material.manifests:
        for other in material.of_later_parts(part):
            for speaker in speakers[part].keys() & speakers[other].keys():
                own, there = speakers[part][speaker], speakers[other][speaker]
                clips = (
                    f"{counted(len(own), 'clip')} in {own[0].manifest.name}, {len(there)} in {there[0].manifest.name}"
                )
                what = f"speaker '{speaker[:40]}': {clips}"
                yield of_row(LEAKED_SPEAKER, own[0], what, badness=len(there), among=own)


SHORT_REPEAT = 8  # letters: "yes" and "seven" come often
TIMES = 5  # by one speaker, or by nobody knows whom
OVER_MEAN = 5.0  # and so many times as often as the texts of the part on average: sets of fixed phrases repeat all

REPEATED = Kind(
    name="repeated text",
    severity=Severity.WARNING,
    means="Far more rows than usual have this text, by the same speaker: often a default, or a column filled down.",
    remedy="Listen to some of them. The same sentence by several speakers is all right.",
)


@check(REPEATED, place=13)
def find_repeated_texts(material: Material) -> Iterator[Finding]:
    for part in material.manifests:
        said: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in material.spoken:
            if row.part == part:
                said[row.sample.speaker, text_key(row.text)].append(row)
        usual = sum(map(len, said.values())) / max(1, len(said))
        for rows in said.values():
            if len(rows) >= max(TIMES, OVER_MEAN * usual) and letters(rows[0].text) >= SHORT_REPEAT:
                yield of_row(REPEATED, rows[0], f"{len(rows)} rows have it", badness=len(rows), among=rows)
