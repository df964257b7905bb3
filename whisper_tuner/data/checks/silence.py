"""Clips that are mostly silence, or begin or end with much of it."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Needs, Severity, of_row
from whisper_tuner.data.checks.material import Material
from whisper_tuner.data.checks.silent import QUIET_DB

EDGE_S = 3.0
SHARE = 0.8
SHORTEST_S = 2.0  # a single word in a second has as much silence around it

EDGES = Kind(
    name="long silence at an edge",
    severity=Severity.INFO,
    means="More than 3 s of silence stand before or after the speech: they are computed in each epoch for nothing.",
    remedy="Trim the clip. A little silence is good, and some clips with much of it do no harm.",
)
MOSTLY = Kind(
    name="mostly silence",
    severity=Severity.WARNING,
    means="Over 80 % of the clip is silent. The text may belong to another recording, or speech is missing.",
    remedy="Listen to it. Trim it if its text is right.",
)


def find(material: Material) -> Iterator[Finding]:
    for row, facts in material.with_facts():
        if not row.text or facts.level < QUIET_DB:
            continue
        if facts.silent > SHARE and facts.seconds > SHORTEST_S:
            what = f"{100 * facts.silent:.0f} % of its {facts.seconds:.1f} s are silent"
            yield of_row(MOSTLY, row, what, badness=facts.silent)
        elif max(facts.begins_s, facts.ends_s) > EDGE_S:
            what = f"{facts.begins_s:.1f} s of silence before it, {facts.ends_s:.1f} s after it"
            yield of_row(EDGES, row, what, badness=facts.begins_s + facts.ends_s)


CHECK = Check(kinds=(EDGES, MOSTLY), find=find, needs=Needs.AUDIO)
