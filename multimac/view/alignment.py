"""Prints what was said above what was heard, word under word, with the errors marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.text import Text

from whisper_tuner.eval.predictions import Aligned, align

STYLES = {"S": "yellow", "D": "red", "I": "cyan", "": ""}
_GAP = "*"  # stands where the other text has a word


def side_by_side(reference: str, hypothesis: str, *, width: int) -> list[Text]:
    """Three lines (said, heard, marks) for each piece that fits into `width` columns."""
    lines = []
    for pairs in _pieces(align(reference, hypothesis), width - len("  heard  ")):
        widths = [_width(pair) for pair in pairs]
        said = [(pair.reference or _GAP * cell_len(pair.hypothesis), pair.mark) for pair in pairs]
        heard = [(pair.hypothesis or _GAP * cell_len(pair.reference), pair.mark) for pair in pairs]
        rows = [("  said   ", said), ("  heard  ", heard)]
        if any(pair.mark for pair in pairs):
            rows.append((" " * 9, [(pair.mark, pair.mark) for pair in pairs]))
        lines += [_line(name, cells, widths) for name, cells in rows]
    return lines


def _pieces(pairs: Sequence[Aligned], width: int) -> Iterator[list[Aligned]]:
    piece: list[Aligned] = []
    used = 0
    for pair in pairs:
        if piece and used + _width(pair) > width:
            yield piece
            piece, used = [], 0
        piece.append(pair)
        used += _width(pair) + 1
    if piece:
        yield piece


def _width(pair: Aligned) -> int:
    return max(cell_len(pair.reference), cell_len(pair.hypothesis))


def _line(name: str, cells: Sequence[tuple[str, str]], widths: Sequence[int]) -> Text:
    line = Text(name)
    for (text, mark), width in zip(cells, widths, strict=True):
        line.append(text + " " * (width - cell_len(text)), style=STYLES[mark])
        line.append(" ")
    line.rstrip()
    return line
