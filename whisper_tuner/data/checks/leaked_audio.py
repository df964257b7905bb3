"""Recordings that are also in the validation or test set."""

from __future__ import annotations

import os
from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity, of_row
from whisper_tuner.data.checks.material import Material, Row
from whisper_tuner.data.checks.prints import Prints

KIND = Kind(
    name="audio in two parts",
    severity=Severity.ERROR,
    means="The recording is also in the validation or test set: the model is tested on what it has learned by heart.",
    remedy="Remove it from the set that is trained on.",
)


def find(material: Material) -> Iterator[Finding]:
    for part in material.manifests:
        told: set[int] = set()
        for other in material.of_later_parts(part):
            for row, same, how in (*_same_files(material, part, other), *_same_sound(material, part, other)):
                if row.sample.line not in told:
                    told.add(row.sample.line)
                    yield of_row(KIND, row, f"{how} {same.place} ({other})")


def _same_files(material: Material, part: str, other: str) -> Iterator[tuple[Row, Row, str]]:
    there = {_name(row): row for row in material.rows if row.part == other}
    for row in material.rows:
        if row.part == part and (same := there.get(_name(row))):
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
            yield row, same, "sounds like"


def _name(row: Row) -> str:
    return os.path.normpath(row.sample.audio)


CHECK = Check(kinds=(KIND,), find=find)
