"""Excel's .xlsx as a table: zipped XML, of which one sheet is read, as CSV with a line for each of its rows."""

from __future__ import annotations

import csv
import io
import itertools
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from whisper_tuner.errors import DataError

SUFFIX = ".xlsx"
OTHERS = (".xls", ".xlsb", ".ods", ".numbers")
SAVE_IT = "Open it in your spreadsheet program, save it as .xlsx or CSV (UTF-8), and name that file."
MOST_BYTES = 300_000_000  # unpacked, of one member
MOST_ROWS, MOST_CELLS = 1 << 20, 20_000_000  # Excel's own limit; what fits into memory with ease
UNREADABLE = (zipfile.BadZipFile, zlib.error, ElementTree.ParseError, LookupError, ValueError, RuntimeError)
ESCAPED = re.compile(r"_x([0-9A-Fa-f]{4})_")  # a character that XML cannot hold


def read(path: Path) -> tuple[str, str, list[str]]:
    """(CSV, the sheet's name, notes) of the first sheet that is not empty. Raises DataError."""
    if path.suffix.lower() in OTHERS:
        raise DataError(f"{path} is a spreadsheet, but no {SUFFIX}", remedy=SAVE_IT)
    try:
        with zipfile.ZipFile(path) as book:
            strings = [_text(one) for one in _xml(book, "xl/sharedStrings.xml").iterfind("{*}si")]
            found = {name: list(_rows(_xml(book, member), strings)) for name, member in _sheets(book).items()}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}", remedy=SAVE_IT) from None
    except UNREADABLE as error:
        raise DataError(f"{path} is no Excel file that can be read: {error}", remedy=SAVE_IT) from None
    filled = {name: rows for name, rows in found.items() if any(map(any, rows))}
    if not filled:
        raise DataError(f"{path} has no cells", remedy="Save it again, with its texts in the first sheet.")
    (name, rows), *others = filled.items()
    notes = [f"{path.name}: of its sheets only {name} is read"] if others else []
    first = next((number for number, cells in enumerate(rows) if sum(map(bool, cells)) > 1), 0)
    if title := " ".join(" ".join(cells) for cells in rows[:first]).strip():  # above the header
        notes.append(f"{path.name}: not used, since it stands alone in its row: {title[:60]}")
    width, listing = max(map(len, rows)), io.StringIO()
    if width * len(rows) > MOST_CELLS:
        raise DataError(f"{path} has {len(rows)} rows of {width} columns", remedy="Remove what is far from its texts.")
    whole = (cells + [""] * (width - len(cells)) if any(cells) else [] for cells in rows[first:])
    csv.writer(listing, lineterminator="\n").writerows([*[()] * first, *whole])
    return listing.getvalue(), name, notes


def _xml(book: zipfile.ZipFile, member: str) -> ElementTree.Element:
    if member == "xl/sharedStrings.xml" and member not in book.namelist():
        return ElementTree.Element("none")  # it may have numbers alone
    if book.getinfo(member).file_size > MOST_BYTES:
        raise ValueError(f"{member} has more than {MOST_BYTES / 1e6:.0f} MB")
    return ElementTree.fromstring(book.read(member))


def _sheets(book: zipfile.ZipFile) -> dict[str, str]:
    """Map the names of sheets to members of the archive, in the order of their tabs."""
    links = {one.get("Id"): one.get("Target", "") for one in _xml(book, "xl/_rels/workbook.xml.rels")}
    found = {}
    for sheet in _xml(book, "xl/workbook.xml").iterfind("{*}sheets/{*}sheet"):
        link = next(value for key, value in sheet.items() if key.endswith("}id"))
        target = links[link].removeprefix("/xl/")
        if "worksheets/" in target:  # else it is a chart
            found[sheet.get("name", "")] = f"xl/{target}"
    return found


def _rows(sheet: ElementTree.Element, strings: list[str]) -> Iterator[list[str]]:
    """Yield the cells of each row, empty ones too, so that row and line have one number."""
    done = 0
    for row in sheet.iterfind("{*}sheetData/{*}row"):
        number = int(row.get("r") or done + 1)
        if not done < number <= MOST_ROWS:
            raise ValueError(f"row {number} after row {done}")
        yield from ([] for _ in range(done + 1, number))
        cells: list[str] = []
        for cell in row.iterfind("{*}c"):
            place = _place(cell.get("r") or "") or len(cells) + 1
            cells += [""] * (place - 1 - len(cells)) + [_value(cell, strings)]
        yield cells
        done = number


def _place(reference: str) -> int:
    """Return the number of the column of a cell such as AB12; 0 if it does not say."""
    number = 0
    for letter in itertools.takewhile(str.isalpha, reference[:3]):
        number = number * 26 + ord(letter) - ord("A") + 1
    return number


def _value(cell: ElementTree.Element, strings: list[str]) -> str:
    kind = cell.get("t")
    if kind == "inlineStr":
        return _text(cell.find("{*}is"))
    value = cell.findtext("{*}v") or ""
    if kind == "e":  # such as #REF!
        return ""
    return strings[int(value)] if kind == "s" and value else _plain(value)


def _text(item: ElementTree.Element | None) -> str:
    """Join the runs of a text, without its phonetic reading."""
    runs = [] if item is None else [*item.iterfind("{*}t"), *item.iterfind("{*}r/{*}t")]
    return _plain("".join(run.text or "" for run in runs))


def _plain(text: str) -> str:
    return " ".join(ESCAPED.sub(lambda match: chr(int(match[1], 16)), text).split())
