"""LJSpeech: metadata.csv with bars and no header (id, text, text with numbers as words), and the audio in wavs/."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from whisper_tuner.data.formats.place import Place, first_line, read_text
from whisper_tuner.data.formats.rows import BadRow, Part, Parts, Reading, Row
from whisper_tuner.data.formats.table import is_header
from whisper_tuner.errors import DataError
from whisper_tuner.problems import Kind

WAVS, LIST = "wavs", "metadata.csv"
WIDTHS = (2, 3)
BOTH = "column 3 is the text, where numbers are words; column 2, as it is printed: text_column = 2"


def recognises(place: Place) -> bool:
    path = place.path / LIST if place.is_folder else place.path
    line = first_line(path)
    id_alone = "." not in line.partition("|")[0]  # else it is a table, which names files
    has_bars = line.count("|") + 1 in WIDTHS and not is_header(line)
    return has_bars and id_alone and (path.parent / WAVS).is_dir()


def parts(place: Place, reading: Reading) -> Parts:
    """Raises DataError."""
    path = place.path / LIST if place.is_folder else place.path
    text, encoding, notes = read_text(path, reading)
    width = first_line(path).count("|") + 1
    told = reading.text_column or str(width)
    if told not in map(str, range(2, width + 1)):
        raise DataError(f"{path} has no text column {told!r}: it has {width}", remedy="text_column may be 2 or 3 here.")
    also = (BOTH,) if width == 3 and not reading.text_column else ()
    part = Part(
        path=path,
        layout="LJSpeech",
        rows=partial(_rows, text, width, int(told) - 1),
        folder=path.parent / WAVS,
        facts={"encoding": encoding, "columns between": "bar, without quoting", "header": "none", "text column": told},
        notes=(*notes, *also),
    )
    return {"train": part}


def _rows(text: str, width: int, column: int) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != width:
            yield Row(number, BadRow(Kind.COLUMNS, f"{len(cells)} fields, but {width} columns: {line.strip()[:60]}"))
        else:
            yield Row(number, {"id": cells[0], "audio": cells[0], "text": cells[column]})
