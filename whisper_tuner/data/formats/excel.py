"""Excel's .xlsx as a table: one sheet of it, as CSV with a line for each of its rows."""

from __future__ import annotations

import csv
import io
import zipfile
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from whisper_tuner.errors import DataError

SUFFIX = ".xlsx"
OTHERS = (".xls", ".xlsb", ".ods", ".numbers")
SAVE_IT = "Open it in your spreadsheet program, save it as .xlsx or CSV (UTF-8), and name that file."
MOST_CELLS = 20_000_000  # what fits into memory with ease
UNREADABLE = (zipfile.BadZipFile, zlib.error, ElementTree.ParseError, LookupError, ValueError, TypeError, RuntimeError)


def read(path: Path) -> tuple[str, str, list[str]]:
    """(CSV, the sheet's name, notes) of the first sheet that is not empty. Raises DataError."""
    if path.suffix.lower() in OTHERS:
        raise DataError(f"{path} is a spreadsheet, but no {SUFFIX}", remedy=SAVE_IT)
    from openpyxl import load_workbook  # a tenth of a second, and few have a workbook

    try:
        with path.open("rb") as file:
            book = load_workbook(file, read_only=True, data_only=True)
            found = {sheet.title: _rows(sheet) for sheet in book.worksheets}
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


def _rows(sheet: Any) -> list[list[str]]:
    """Return the cells of each row, empty rows too, so that row and line have one number."""
    sheet.reset_dimensions()  # what a file says of its size may be wrong
    rows: list[list[str]] = []
    count = 0
    for cells in sheet.iter_rows(values_only=True):
        rows.append([_value(cell) for cell in cells])
        count += 1 + len(cells)
        if count > MOST_CELLS:
            raise ValueError(f"the sheet {sheet.title} has over {MOST_CELLS:,} cells")
    return rows


def _value(cell: object) -> str:
    from openpyxl.cell.cell import ERROR_CODES
    from openpyxl.utils.escape import unescape  # a character that XML cannot hold

    return "" if cell is None or cell in ERROR_CODES else " ".join(unescape(str(cell)).split())
