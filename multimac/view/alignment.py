"""Prints what was said above what was heard, word under word, with the errors marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.text import Text

from whisper_tuner.eval.predictions import Aligned, align

STYLES = {"S": "yellow", "D": "red", "I": "cyan", "": ""}
NAMES = ("  said   ", "  heard  ", "         ")
GAP = "*"  # stands where the other text has a word


def side_by_side(reference: str, hypothesis: str, *, width: int) -> list[Text]:
    """Three lines (said, heard, marks) for each piece that fits into `width` columns; two where nothing is wrong."""
    lines: list[Text] = []
    for pairs in _pieces(align(reference, hypothesis), width - len(NAMES[0])):
        rows = [Text(name) for name in NAMES]
        for pair in pairs:
            columns = _width(pair)
            words = (pair.reference or GAP * columns, pair.hypothesis or GAP * columns, pair.mark)
            for row, word in zip(rows, words, strict=True):
                row.append(word + " " * (columns - cell_len(word) + 1), style=STYLES[pair.mark])
        lines += rows if any(pair.mark for pair in pairs) else rows[:2]
    for line in lines:
        line.rstrip()
    return lines


def _pieces(pairs: Sequence[Aligned], width: int) -> Iterator[list[Aligned]]:
    piece: list[Aligned] = []
    for pair in pairs:
        if piece and sum(_width(other) + 1 for other in piece) + _width(pair) > width:
            yield piece
            piece = []
        piece.append(pair)
    if piece:
        yield piece


def _width(pair: Aligned) -> int:
    return max(cell_len(pair.reference), cell_len(pair.hypothesis))
