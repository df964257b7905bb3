"""What `multimac data check` prints: the kinds that were found, each with its first rows and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from whisper_tuner.data.checks.finding import Finding, Severity
from whisper_tuner.data.dataset import Manifest
from whisper_tuner.text import counted, duration

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "bold cyan"}
FIRST = 3  # rows of a kind; the report has more, findings.csv all
LONGEST = 160  # characters of a line about a row


def show(console: Console, found: Sequence[Finding]) -> None:
    for kind, rows in by_kind(found):
        console.print(Text(f"{kind.severity}: {kind.name}, {rows_in_words(rows)}", STYLES[kind.severity]))
        for one in rows[:FIRST]:
            text = f"{place_of(one)}: {one.what}".replace("\n", " ")
            text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
            console.print(Padding(Text(text, overflow="fold"), (0, 0, 0, 2)))
        if len(rows) > FIRST:
            console.print(f"  and {len(rows) - FIRST} more")
        console.print(Padding(Text(kind.remedy, "italic"), (0, 0, 0, 2)))


def by_kind(found: Sequence[Finding]) -> list[tuple]:
    return [(kind, [*rows]) for kind, rows in groupby(found, attrgetter("kind"))]


def rows_in_words(found: Sequence[Finding]) -> str:
    return counted(sum(one.rows for one in found), "row")


def total(found: Sequence[Finding]) -> str:
    """Sum up findings, such as '3 errors, 1 warning'."""
    names = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
    counts = {name: sum(one.kind.severity == severity for one in found) for severity, name in names.items()}
    told = [counted(count, name) for name, count in counts.items() if count]
    return ", ".join(told) or "nothing found"


def about_parts(manifests: Mapping[str, Manifest]) -> Iterator[str]:
    for part, manifest in manifests.items():
        rows = len(manifest.samples) + len(manifest.problems)
        seconds = sum(sample.duration_s for sample in manifest.samples)
        named = part if manifest.path.stem == part else f"{part} ({manifest.path.name})"
        yield f"{named}: {rows:,} rows, {duration(seconds)} of speech"


def place_of(one: Finding) -> str:
    return f"{one.manifest.name} line {one.line}" if one.line else one.manifest.name
