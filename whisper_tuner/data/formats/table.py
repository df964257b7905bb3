"""CSV and its kin: commas, semicolons, tabs or bars between columns, with or without a header."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from whisper_tuner.data.formats.rows import USUAL_FOLDERS, AudioNames, BadRow, Part, Reading, Row, no_column
from whisper_tuner.errors import DataError
from whisper_tuner.files import is_audio
from whisper_tuner.problems import Kind

DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|"}
ITS_NAME = {character: name for name, character in DELIMITERS.items()}
EXCEL = re.compile(r"sep=(.)", re.IGNORECASE)  # Excel's own first line, which names the delimiter
RECORD_LINES = 100  # the longest record of a CSV: a quote that stays open for longer was never closed
LOOKED_AT = 20  # records, to see which column of a table without a header is which
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
    folders = (path.parent, *(path.parent / name for name in USUAL_FOLDERS), path.parent / "audio" / path.stem)
    told, notes = DELIMITERS.get(reading.delimiter), list(notes)
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    marks = [told] if told else sorted(ITS_NAME, key=lambda mark: mark != usual)  # the likeliest first
    if lines and (said := EXCEL.fullmatch(lines[0].strip())) and said[1] in ITS_NAME:
        marks, lines = [said[1]], ["\n", *lines[1:]]
    firsts = {}
    for mark in marks:
        _, first = next(_records(lines, mark, quoted=quoted is not False), (1, []))
        if isinstance(first, BadRow):
            raise DataError(f"{path} line 1: {first}", remedy="Check the quotes of its header.")
        firsts[mark] = [name.strip().lower() for name in first]
    delimiter = next((mark for mark, names in firsts.items() if names_both(names, reading)), "")
    if has_header := bool(delimiter):
        columns = firsts[delimiter]
    else:
        found = _without_header(path, lines, firsts, reading, AudioNames(folders), quoted=quoted is not False)
        delimiter, columns = found.delimiter, [str(number + 1) for number in range(found.width)]
        audio, words = str(found.audio + 1), str(found.text + 1)
        reading = replace(reading, audio_column=audio, text_column=words)
        notes.append(f"{path.name} has no header: column {audio} is audio, column {words} is text")
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
        beside=folders[1:],
        reading=reading,
        facts=facts,
        notes=tuple(notes),
        columns=tuple(columns),
    )


def is_header(line: str) -> bool:
    """Tell if a line names an audio and a text column."""
    for delimiter in DELIMITERS.values():
        _, first = next(_records([line], delimiter), (1, []))
        if not isinstance(first, BadRow) and names_both([name.strip().lower() for name in first], Reading()):
            return True
    return False


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


class _Columns(NamedTuple):
    """The places of audio and text, of so many columns, in a table without a header."""

    delimiter: str
    width: int
    audio: int
    text: int


def _without_header(
    path: Path,
    lines: Sequence[str],
    firsts: Mapping[str, Sequence[str]],
    reading: Reading,
    names: AudioNames,
    *,
    quoted: bool,
) -> _Columns:
    """Find the columns by what stands in the first records. Raises DataError where that is not plain."""
    whole: list[_Columns] = []
    missing: tuple[str, list[str]] | None = None
    for delimiter in firsts:
        found = [cells for _, cells in islice(_records(lines, delimiter, quoted=quoted), LOOKED_AT)]
        records = [cells for cells in found if not isinstance(cells, BadRow)]
        if not records or (width := Counter(map(len, records)).most_common(1)[0][0]) < 2 or len(records[0]) != width:
            continue
        columns = [[cells[place] for cells in records if len(cells) == width] for place in range(width)]
        audio = _told(reading.audio_column, width)
        if not reading.audio_column:
            audio = _only(place for place in range(width) if _holds_audio(columns[place], names))
        text = _told(reading.text_column, width)
        if not reading.text_column:
            text = _only(place for place in range(width) if place != audio and _holds_text(columns[place]))
        if audio is not None and text is not None:
            whole.append(_Columns(delimiter, width, audio, text))
        elif missing is None and (audio is not None or reading.text_column.isdigit()):
            missing = "text" if audio is not None else "audio", records[0]
    if len(whole) == 1:
        return whole[0]
    if whole:
        raise DataError(
            f"{path}: its columns may stand between {' or '.join(ITS_NAME[one.delimiter] for one in whole)}",
            remedy="Say which: delimiter = NAME in the dataset's section, --delimiter NAME for an import.",
        )
    if missing:
        read = ", ".join(f"{number} = {cell[:60]}" for number, cell in enumerate(missing[1], 1))
        raise DataError(
            f"{path} has no header, and its {missing[0]} column cannot be told; line 1 was read as: {read}",
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


def _told(column: str, width: int) -> int | None:
    return int(column) - 1 if column.isdigit() and 0 < int(column) <= width else None


def _only(places: Iterator[int]) -> int | None:
    found = list(places)
    return found[0] if len(found) == 1 else None


def _holds_audio(cells: Sequence[str], names: AudioNames) -> bool:
    """The first record's file must be there: if only its is not, that may be a header."""
    there = [names.exists(cell.strip()) for cell in cells]
    return there[0] and 2 * sum(there) > len(there)


def _holds_text(cells: Sequence[str]) -> bool:
    """Tell if most have words with letters."""
    return 2 * sum(any(letter.isalpha() for letter in cell) for cell in cells) > len(cells)


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
