"""CSV and its kin: commas, semicolons, tabs or bars between columns, with or without a header."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from whisper_tuner.data.formats.audio_names import USUAL_FOLDERS, AudioNames
from whisper_tuner.data.formats.encoding import read_text
from whisper_tuner.data.formats.rows import BadRow, Part, Reading, Row, check_columns
from whisper_tuner.data.problems import Kind
from whisper_tuner.errors import DataError

NAME = "table"
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


def part(path: Path, reading: Reading) -> Part:
    """Raises DataError for a file that cannot be read, or whose audio and text column nobody can tell."""
    text, encoding, notes = read_text(path, reading)
    return part_of(path, text, encoding, notes, reading)


def part_of(path: Path, text: str, encoding: str, notes: Sequence[str], reading: Reading) -> Part:
    lines = list(io.StringIO(text, newline=""))
    folders = (path.parent, *(path.parent / name for name in USUAL_FOLDERS))
    table = _Table(path, lines, reading, AudioNames(folders))
    names = table.columns
    unused = [name for name in names if name and name not in (*table.audio, *table.text)]
    facts = {
        "encoding": encoding,
        "columns between": ITS_NAME[table.delimiter] + ("" if table.quoted else ", quotes are part of the text"),
        "header": "yes" if table.header else "none",
        "audio column": ", ".join(name for name in names if name in table.audio),
        "text column": ", ".join(name for name in names if name in table.text),
        "other columns": ", ".join(unused) or "none",
    }
    return Part(
        path=path,
        layout=f"{NAME} ({path.suffix.lower().lstrip('.') or 'no suffix'})",
        rows=table.rows,
        folder=path.parent,
        beside=folders[1:],
        reading=table.reading,
        facts=facts,
        notes=(*notes, *table.notes),
    )


def is_header(line: str) -> bool:
    """Tell if a line names an audio and a text column."""
    return any(_names_both(_header(line, delimiter), Reading()) for delimiter in DELIMITERS.values())


class _Table:
    """How one file is to be read: its delimiter, whether quotes are quotes, and its columns."""

    def __init__(self, path: Path, lines: list[str], reading: Reading, names: AudioNames):
        self._path, self._names = path, names
        self.reading, self.notes = reading, []
        self.header = self.quoted = True
        self._usual = "\t" if path.suffix.lower() == ".tsv" else ","
        self._marks, self._lines = self._possible(lines)
        fits = [mark for mark in self._marks if _names_both(self._first(mark), reading)]
        if fits:
            self.delimiter = fits[0]
            self.columns = self._first(self.delimiter)
        else:
            self._without_header()
        self.audio, self.text = self.reading.audio_names, self.reading.text_names
        self._see_quotes()

    def rows(self) -> Iterator[Row]:
        records, width = self._records(), len(self.columns)
        if self.header:
            next(records, None)
        for line, cells in records:
            if isinstance(cells, BadRow):
                yield Row(line, cells)
            elif len(cells) > width:  # using only the first ones would silently cut the text at its comma
                more = f"{len(cells)} fields, but {width} columns: quote text that holds a {ITS_NAME[self.delimiter]}"
                yield Row(line, BadRow(Kind.COLUMNS, more))
            elif any(cell.strip() for cell in cells):
                yield Row(line, dict(zip(self.columns, cells, strict=False)))

    def _possible(self, lines: list[str]) -> tuple[list[str], list[str]]:
        """The delimiters that may be meant, the likeliest first; and the lines without what only names it."""
        if lines and (said := EXCEL.fullmatch(lines[0].strip())) and said[1] in ITS_NAME:
            return [said[1]], ["\n", *lines[1:]]
        if told := DELIMITERS.get(self.reading.delimiter):
            return [told], lines
        return [self._usual, *(mark for mark in ITS_NAME if mark != self._usual)], lines

    def _first(self, delimiter: str) -> list[str]:
        _, first = next(_records(self._lines, delimiter), (1, []))
        if isinstance(first, BadRow):
            raise DataError(f"{self._path} line 1: {first}", remedy="Check the quotes of its header.")
        return [name.strip().lower() for name in first]

    def _records(self) -> Records:
        return _records(self._lines, self.delimiter, quoted=self.quoted)

    def _see_quotes(self) -> None:
        """Tables with tabs or bars are also written without any quoting: then a quote belongs to the text."""
        if self.delimiter not in "\t|" or not any('"' in line for line in self._lines):
            return
        if any(isinstance(cells, BadRow) for _, cells in self._records()):
            plain = _records(self._lines, self.delimiter, quoted=False)
            if all(len(cells) == len(self.columns) for _, cells in plain):
                self.quoted = False
                self.notes.append(f"{self._path.name}: quotes are not closed, so they are read as part of the text")

    def _without_header(self) -> None:
        """Find the columns by what stands in them. Raises DataError where that is not plain."""
        self.header = False
        seen = [one for mark in self._marks if (one := self._seen(mark))]
        whole = [one for one in seen if one.audio is not None and one.text is not None]
        if len(whole) != 1:
            self._refuse(seen, whole)
        [found] = whole
        self.delimiter = found.delimiter
        self.columns = [str(number + 1) for number in range(len(found.first))]
        audio, text = str(found.audio + 1), str(found.text + 1)
        self.reading = dataclasses.replace(self.reading, audio_column=audio, text_column=text)
        self.notes.append(f"{self._path.name} has no header: column {audio} is audio, column {text} is text")

    def _seen(self, delimiter: str) -> _Seen | None:
        """Return what stands in its first records, if they have columns."""
        records = [cells for _, cells in islice(_records(self._lines, delimiter), LOOKED_AT)]
        records = [cells for cells in records if not isinstance(cells, BadRow)]
        if not records or (width := Counter(map(len, records)).most_common(1)[0][0]) < 2 or len(records[0]) != width:
            return None
        columns = [[cells[place] for cells in records if len(cells) == width] for place in range(width)]
        audio = _told(self.reading.audio_column, width)
        if audio is None and not self.reading.audio_column:
            audio = _only(place for place in range(width) if self._holds_audio(columns[place]))
        text = _told(self.reading.text_column, width)
        if text is None and not self.reading.text_column:
            text = _only(place for place in range(width) if place != audio and _holds_text(columns[place]))
        return _Seen(delimiter, records[0], audio, text)

    def _holds_audio(self, cells: list[str]) -> bool:
        """The first record's file must be there: if only its is not, that may be a header."""
        there = [self._names.exists(cell.strip()) for cell in cells]
        return there[0] and 2 * sum(there) > len(there)

    def _refuse(self, seen: list[_Seen], whole: list[_Seen]) -> None:
        if whole:
            raise DataError(
                f"{self._path}: its columns may stand between {' or '.join(ITS_NAME[one.delimiter] for one in whole)}",
                remedy="Say which: delimiter = NAME in the dataset's section, --delimiter NAME for an import.",
            )
        for one in seen:
            missing = "text" if one.audio is not None else "audio" if self.reading.text_column.isdigit() else ""
            if missing:
                read = ", ".join(f"{number} = {cell[:60]}" for number, cell in enumerate(one.first, 1))
                raise DataError(
                    f"{self._path} has no header, and its {missing} column cannot be told; line 1 was read as: {read}",
                    remedy=SETTLED,
                )
        mark = max(self._marks, key=lambda mark: len(self._first(mark)))
        names = self._first(mark)
        as_read = f"{len(names)} columns between {ITS_NAME[mark]}s" if len(names) > 1 else ""
        check_columns(self._path, names, self.reading, as_read)


class _Seen(NamedTuple):
    """The first record by one delimiter, and which of its columns hold audio and text, if that can be told."""

    delimiter: str
    first: list[str]
    audio: int | None
    text: int | None


def _told(column: str, width: int) -> int | None:
    return int(column) - 1 if column.isdigit() and 0 < int(column) <= width else None


def _names_both(names: list[str], reading: Reading) -> bool:
    return any(name in reading.audio_names for name in names) and any(name in reading.text_names for name in names)


def _header(line: str, delimiter: str) -> list[str]:
    _, first = next(_records([line], delimiter), (1, []))
    return [] if isinstance(first, BadRow) else [name.strip().lower() for name in first]


def _only(places: Iterator[int]) -> int | None:
    found = list(places)
    return found[0] if len(found) == 1 else None


def _holds_text(cells: list[str]) -> bool:
    """Tell if there are words with letters, and not the same ones in every row."""
    words = [cell for cell in cells if any(letter.isalpha() for letter in cell)]
    return 2 * len(words) > len(cells)


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
