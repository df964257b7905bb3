"""Speakers that are also in the validation or test set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity, of_row
from whisper_tuner.data.checks.material import Material, Row

KIND = Kind(
    name="speaker in two parts",
    severity=Severity.WARNING,
    means="The speaker is also in the validation or test set: WER tells how well known voices are heard, not new ones.",
    remedy="Keep the speakers of the test set out of the others. If the model is for these very people, it is right.",
)


def find(material: Material) -> Iterator[Finding]:
    speakers: defaultdict[str, defaultdict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in material.rows:
        if row.sample.speaker:
            speakers[row.part][row.sample.speaker].append(row)
    for part in material.manifests:
        for other in material.of_later_parts(part):
            for speaker in speakers[part].keys() & speakers[other].keys():
                own, there = speakers[part][speaker], speakers[other][speaker]
                counted = f"{len(own)} clips in {own[0].manifest.name}, {len(there)} in {there[0].manifest.name}"
                yield of_row(KIND, own[0], f"speaker '{speaker[:40]}': {counted}", badness=len(there), rows=len(own))


CHECK = Check(kinds=(KIND,), find=find)
