"""What `multimac data check` prints: the kinds that were found, each with its first rows and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from whisper_tuner.data.checks.finding import Finding, Severity
from whisper_tuner.data.checks.material import Material
from whisper_tuner.text import counted, duration

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "bold cyan"}
FIRST = 3  # rows of a kind; the report has more, findings.csv all
LINES = 5  # of a file that are named where a finding is about several rows
LONGEST = 160  # characters of a line about a row


def show(console: Console, material: Material, found: Sequence[Finding], notes: Sequence[str]) -> None:
    """Print what was checked, the kinds that were found, each with its first rows and what to do, and a sum."""
    for part, manifest in material.manifests.items():
        rows = len(manifest.samples) + len(manifest.problems)
        seconds = sum(sample.duration_s for sample in manifest.samples)
        named = part if manifest.path.stem == part else f"{part} ({manifest.path.name})"
        console.print(f"{named}: {counted(rows, 'row')}, {duration(seconds)} of speech", soft_wrap=True)
    for kind, rows in by_kind(found):
        console.print(Text(f"{kind.severity}: {kind.name}, {rows_in_words(rows)}", STYLES[kind.severity]))
        for one in rows[:FIRST]:
            what = one.what.replace("\n", " ")
            what = what if len(what) <= LONGEST else f"{what[: LONGEST - 1]}…"
            text = f"{what}: {_places_of(one)}" if one.among else f"{place_of(one)}: {what}"
            console.print(Padding(Text(text, overflow="fold"), (0, 0, 0, 2)))
        if len(rows) > FIRST:
            console.print(f"  and {len(rows) - FIRST} more")
        console.print(Padding(Text(kind.remedy, "italic"), (0, 0, 0, 2)))
    for note in notes:
        console.print(note)
    told = []
    for severity, name in {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}.items():
        if count := sum(one.kind.severity == severity for one in found):
            told.append(counted(count, name))
    rows = len(material.rows) + sum(len(manifest.problems) for manifest in material.manifests.values())
    console.print(f"{', '.join(told) or 'nothing found'} in {counted(rows, 'row')}", style="bold")


def by_kind(found: Sequence[Finding]) -> list[tuple]:
    return [(kind, [*rows]) for kind, rows in groupby(found, attrgetter("kind"))]


def rows_in_words(found: Sequence[Finding]) -> str:
    return counted(sum(one.rows for one in found), "row")


def place_of(one: Finding) -> str:
    return f"{one.manifest.name} line {one.line}" if one.line else one.manifest.name


def _places_of(one: Finding) -> str:
    """Name each file of a finding's rows once, with its first lines."""
    lines: dict[str, list[int]] = {}
    for row in one.among:
        lines.setdefault(row.manifest.name, []).append(row.sample.line)
    told = []
    for name, numbers in lines.items():
        named = ", ".join(map(str, numbers[:LINES]))
        more = f" and {len(numbers) - LINES} more" if len(numbers) > LINES else ""
        told.append(f"{name}, {'line' if len(numbers) == 1 else 'lines'} {named}{more}")
    return "; ".join(told)
