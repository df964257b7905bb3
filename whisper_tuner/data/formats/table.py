"""CSV and its kin: commas, semicolons, tabs or bars between columns, with or without a header."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from whisper_tuner.data.formats.columns import LOOKED_AT, Columns, look, named, told_by_content, unclear
from whisper_tuner.data.formats.rows import AudioNames, BadRow, Part, Reading, Row, near, no_column
from whisper_tuner.errors import DataError
from whisper_tuner.files import is_audio
from whisper_tuner.problems import Kind

DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|"}
ITS_NAME = {character: name for name, character in DELIMITERS.items()}
EXCEL = re.compile(r"sep=(.)", re.IGNORECASE)  # Excel's own first line, which names the delimiter
RECORD_LINES = 100  # the longest record of a CSV: a quote that stays open for longer was never closed
SETTLED = (
    "Give it a header, such as audio,text. Or number its columns: audio_column = 1 and text_column = 2 in the "
    "dataset's section, --audio-column 1 --text-column 2 for an import."
)
Records = Iterator[tuple[int, "list[str] | BadRow"]]
"""Each with the line where it begins."""


def part_of(
    path: Path, text: str, encoding: str, notes: Sequence[str], reading: Reading, *, quoted: bool | None = None
) -> Part:
    """Read a table; quoted: whether quotes stand around cells, if that is known.

    Raises DataError where nobody can tell which column is audio and which text.
    """
    lines = list(io.StringIO(text, newline=""))
    told, notes = DELIMITERS.get(reading.delimiter), list(notes)
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    marks = [told] if told else sorted(ITS_NAME, key=lambda mark: mark != usual)  # the likeliest first
    if lines and (said := EXCEL.fullmatch(lines[0].strip())) and said[1] in ITS_NAME:
        marks, lines = [said[1]], ["\n", *lines[1:]]
    begins = {mark: next(_records(lines, mark, quoted=quoted is not False), (1, []))[1] for mark in marks}
    firsts = {mark: _lower(first) for mark, first in begins.items() if not isinstance(first, BadRow)}
    if not firsts:
        raise DataError(f"{path} line 1: {begins[marks[0]]}", remedy="Check the quotes of its header.")
    delimiter = next((mark for mark, names in firsts.items() if names_both(names, reading)), "")
    columns, has_header = firsts.get(delimiter, []), True
    if not delimiter:
        delimiter, columns, has_header, reading = _by_content(path, lines, firsts, reading, quoted=quoted is not False)
        notes.append(told_by_content(path, reading, has_header=has_header))
    if quoted is None:
        quoted = _has_quoting(lines, delimiter, len(columns))
        if not quoted:
            notes.append(f"{path.name}: quotes are not closed, so they are read as part of the text")
    used = (*reading.audio_names, *reading.text_names)
    facts = {
        "encoding": encoding,
        "columns between": ITS_NAME[delimiter] + ("" if quoted else ", quotes are part of the text"),
        "header": "yes" if has_header else "none",
        "audio column": ", ".join(name for name in columns if name in reading.audio_names),
        "text column": ", ".join(name for name in columns if name in reading.text_names),
        "other columns": ", ".join(name for name in columns if name and name not in used) or "none",
    }
    return Part(
        path=path,
        layout=f"table ({path.suffix.lower().lstrip('.') or 'no suffix'})",
        rows=partial(_rows, lines, delimiter, columns, quoted=quoted, has_header=has_header),
        folder=path.parent,
        beside=near(path)[1:],
        reading=reading,
        facts=facts,
        notes=tuple(notes),
        columns=tuple(columns),
    )


def is_header(line: str) -> bool:
    """Tell if a line names an audio and a text column."""
    for delimiter in DELIMITERS.values():
        _, first = next(_records([line], delimiter), (1, []))
        if not isinstance(first, BadRow) and names_both(_lower(first), Reading()):
            return True
    return False


def _lower(names: Sequence[str]) -> list[str]:
    return [name.strip().lower() for name in names]


def names_both(names: Sequence[str], reading: Reading) -> bool:
    return any(name in reading.audio_names for name in names) and any(name in reading.text_names for name in names)


def _rows(
    lines: Sequence[str], delimiter: str, columns: Sequence[str], *, quoted: bool, has_header: bool
) -> Iterator[Row]:
    width = len(columns)
    for line, cells in islice(_records(lines, delimiter, quoted=quoted), has_header, None):
        if isinstance(cells, BadRow):
            yield Row(line, cells)
        elif len(cells) > width:  # using only the first ones would silently cut the text at its comma
            more = f"{len(cells)} fields, but {width} columns: quote text that holds a {ITS_NAME[delimiter]}"
            yield Row(line, BadRow(Kind.COLUMNS, more))
        elif any(cell.strip() for cell in cells):
            yield Row(line, dict(zip(columns, cells, strict=False)))


def _has_quoting(lines: Sequence[str], delimiter: str, width: int) -> bool:
    """Tables with tabs or bars are also written without any quoting: then a quote belongs to the text."""
    if delimiter not in "\t|" or not any('"' in line for line in lines):
        return True
    records = [cells for _, cells in _records(lines, delimiter)]
    is_line_each = len(records) == sum(bool(line.strip()) for line in lines)
    if is_line_each and not any(isinstance(cells, BadRow) for cells in records):
        return True
    plain = _records(lines, delimiter, quoted=False)
    return not all(not isinstance(cells, BadRow) and len(cells) == width for _, cells in plain)


class _Found(NamedTuple):
    """The delimiter of a table, the names or numbers of its columns, and which of them the reading says."""

    delimiter: str
    columns: list[str]
    has_header: bool
    reading: Reading


def _by_content(
    path: Path, lines: Sequence[str], firsts: Mapping[str, Sequence[str]], reading: Reading, *, quoted: bool
) -> _Found:
    """Find the columns by what stands in the first records. Raises DataError where that is not plain."""
    whole: list[_Found] = []
    missing: tuple[Columns, list[str]] | None = None
    names = AudioNames(near(path))
    for delimiter in firsts:
        found = [cells for _, cells in islice(_records(lines, delimiter, quoted=quoted), LOOKED_AT)]
        records = [cells for cells in found if not isinstance(cells, BadRow)]
        if not records or (width := Counter(map(len, records)).most_common(1)[0][0]) < 2 or len(records[0]) != width:
            continue
        seen = look([*zip(*(cells for cells in records if len(cells) == width), strict=True)], reading, names)
        if len(seen.audio) == len(seen.text) == 1:
            heads = [*firsts[delimiter]] if seen.has_header else [""] * width
            whole.append(_Found(delimiter, *named(heads, seen, reading)))
        elif missing is None and (seen.audio or reading.text_column.isdigit()):
            missing = seen, records[0]
    if len(whole) == 1:
        return whole[0]
    if whole:
        raise DataError(
            f"{path}: its columns may stand between {' or '.join(ITS_NAME[one.delimiter] for one in whole)}",
            remedy="Say which: delimiter = NAME in the dataset's section, --delimiter NAME for an import.",
        )
    if missing:
        seen, first = missing
        if seen.has_header:
            raise unclear(path, first, seen, reading)
        read = ", ".join(f"{number} = {cell[:60]}" for number, cell in enumerate(first, 1))
        raise DataError(
            f"{path} has no header, and its {'text' if len(seen.audio) == 1 else 'audio'} column cannot be told; "
            f"line 1 was read as: {read}",
            remedy=SETTLED,
        )
    mark = max(firsts, key=lambda mark: len(firsts[mark]))
    as_read = f"{len(firsts[mark])} columns between {ITS_NAME[mark]}s" if len(firsts[mark]) > 1 else ""
    example = "" if any(name in reading.audio_names for name in firsts[mark]) else _named_above(lines, mark)
    raise no_column(path, firsts[mark], reading, as_read, example)


def _named_above(lines: Sequence[str], mark: str) -> str:
    """The name of the column with names of audio, if line 1 is a header; what to write for it if nobody can tell."""
    found = [cells for _, cells in islice(_records(lines, mark), LOOKED_AT) if not isinstance(cells, BadRow)]
    for name, *below in zip(*found, strict=False):
        if below and not is_audio(Path(name)) and all(is_audio(Path(cell)) for cell in below):
            return name.strip().lower()
    return "NAME_OR_NUMBER"


def _records(lines: Sequence[str], delimiter: str, *, quoted: bool = True) -> Records:
    """Each record with the line where it begins; after a damaged record, reading goes on with the next line."""
    if not quoted:
        whole = ((number, line.rstrip("\r\n")) for number, line in enumerate(lines, 1))
        yield from ((number, line.split(delimiter)) for number, line in whole if line)
        return
    at = start = 0

    def feed() -> Iterator[str]:
        nonlocal at
        while at < min(len(lines), start + RECORD_LINES):
            at += 1
            yield lines[at - 1]

    reader = csv.reader(feed(), delimiter=delimiter, strict=True)
    while True:
        start = at
        try:
            if cells := next(reader):  # none: an empty line
                yield start + 1, cells
        except StopIteration:
            return
        except csv.Error as error:
            yield start + 1, BadRow(Kind.QUOTING, f"not readable as CSV: {error}; check the quotes")
            at = start + 1
            reader = csv.reader(feed(), delimiter=delimiter, strict=True)
