"""Which recordings sound alike, by their prints (see facts.py), without comparing each with each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from whisper_tuner.data.checks.facts import PRINT_BITS, Facts
from whisper_tuner.data.checks.material import Row

# The share of bits of two prints that may differ. Among 1,376 clips the same recording, made anew, differs in up to
# 0.04; sentences of one voice that have all words but one in common differ in 0.14 at least.
ALIKE = 0.08
SLICES = 8  # of a print. Two that differ in few bits have one of these in common
MOST_COMPARED = 64  # prints with a slice in common: more are no sign of anything
LENGTH_S, LENGTH_SHARE = 0.25, 0.1  # by which the sound of the same recording may differ

_MOST_BITS = int(ALIKE * PRINT_BITS)
_WIDTH = PRINT_BITS // SLICES


class Prints:
    """Recordings that are known by now."""

    def __init__(self) -> None:
        self._by_slice: defaultdict[tuple[int, int], list[tuple[int, Row, Facts]]] = defaultdict(list)

    def add(self, row: Row, facts: Facts) -> None:
        for key in _slices(facts):
            if len(self._by_slice[key]) < MOST_COMPARED:
                self._by_slice[key].append((int(facts.print, 16), row, facts))

    def like(self, facts: Facts) -> Row | None:
        """One that sounds like this."""
        bits = int(facts.print or "0", 16)
        for key in _slices(facts):
            for other, row, others in self._by_slice.get(key, ()):
                if (bits ^ other).bit_count() <= _MOST_BITS and _same_length(facts, others):
                    return row
        return None


def _slices(facts: Facts) -> Iterator[tuple[int, int]]:
    """Place and bits of each; of a clip without a print none."""
    bits = int(facts.print or "0", 16)
    for place in range(SLICES if facts.print else 0):
        yield place, bits >> place * _WIDTH & (1 << _WIDTH) - 1


def _same_length(one: Facts, other: Facts) -> bool:
    longer = max(one.sounding_s, other.sounding_s)
    return abs(one.sounding_s - other.sounding_s) <= max(LENGTH_S, LENGTH_SHARE * longer)
