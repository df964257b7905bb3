"""Two ways of writing in one set: the rows of the rarer way, or the set as a whole if both are usual in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from whisper_tuner.data.checks.finding import Finding, Kind, of_row
from whisper_tuner.data.checks.material import Row

RARE = 0.1  # of the rows that show either way: up to here its rows are named, above it is the set that has two ways
FEWEST = 10  # rows of the usual way, without which there is no usual way
EXAMPLES = 3


def two_ways(kind: Kind, one: Sequence[Row], other: Sequence[Row], names: tuple[str, str]) -> Iterator[Finding]:
    """names: of both ways, as in 'digits' and 'words'."""
    (rare, rare_name), (usual, usual_name) = sorted([(one, names[0]), (other, names[1])], key=lambda way: len(way[0]))
    every = len(rare) + len(usual)
    if not rare or len(usual) < FEWEST:
        return
    if len(rare) <= RARE * every:
        for row in rare:
            yield of_row(kind, row, f"{rare_name}, where {len(usual)} of {every} rows have {usual_name}")
        return
    places = ", ".join(map(attrgetter("place"), rare[:EXAMPLES]))
    counted = f"{len(rare)} rows have {rare_name} (such as {places}), {len(usual)} have {usual_name}"
    yield of_row(kind, rare[0], counted, rows=len(rare))
