"""Finds the columns of audio and of text by what stands in them, where their names are not known."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from whisper_tuner.data.formats.rows import (
    ID_COLUMNS,
    LANGUAGE_COLUMNS,
    SPEAKER_COLUMNS,
    SPLIT_COLUMNS,
    TASK_COLUMNS,
    TIMED_COLUMNS,
    AudioNames,
    Reading,
    no_column,
)
from whisper_tuner.data.formats.times import TIME, TIME_COLUMNS
from whisper_tuner.errors import DataError
from whisper_tuner.files import is_audio

LOOKED_AT = 200  # records
FEW = 4  # times fewer different cells than the text has: another column
OTHERS = {
    *ID_COLUMNS,
    *LANGUAGE_COLUMNS,
    *SPEAKER_COLUMNS,
    *SPLIT_COLUMNS,
    *TASK_COLUMNS,
    *TIMED_COLUMNS,
    *TIME_COLUMNS,
}
# A word has letters, and none of what names and numbers have. One of a single letter counts where there are no others.
WORD = r"(?<!\S)(?!\S*(?:[\d_/\\@]|\.\w))\S*?"
WORDS = re.compile(WORD + r"(?:[^\W\d_]\S|[\u0e00-\uffff])"), re.compile(WORD + r"[^\W\d_]")


class UnclearColumn(DataError):
    """Several columns may be the one of audio, or of text. key: of Reading, which says it. names: of those columns."""

    def __init__(self, what: str, key: str, names: Sequence[str]):
        kind = key.removesuffix("_column")
        option = f"--{kind}-column {shlex.quote(names[0])}"
        remedy = f"Call the right one {kind} in the file. Or say which: {option} for `train` and an import, "
        super().__init__(what, remedy=f"{remedy}{key} = {names[0]} in the dataset's section.")
        self.key, self.names = key, names


class Columns(NamedTuple):
    """The places that may be audio, and those that may be text; whether the first record names the columns."""

    audio: list[int]
    text: list[int]
    has_header: bool


def look(columns: Sequence[Sequence[str]], reading: Reading, names: AudioNames, *, has_header: bool = False) -> Columns:
    """Tell which columns may be audio and text; each is a list of the cells of all records, the first one too.

    has_header: known to name the columns. What the user says, and then a name that is known, counts before content.
    """
    heads = [cells[0].strip().lower() for cells in columns]
    bodies = [cells[1:] or cells for cells in columns]
    audio = _told(reading.audio_column, heads)
    if audio is None:
        audio = [place for place, head in enumerate(heads) if head in reading.audio_names]
        audio = [place for place in audio if has_header or not names.exists(columns[place][0].strip())]
        audio = audio[:1] or _best([place for place, cells in enumerate(bodies) if _names_files(cells, names)], bodies)
    if len(audio) != 1:
        return Columns(audio, [], has_header)
    first, others = columns[audio[0]][0].strip(), [place for place in range(len(columns)) if place not in audio]
    # A name with a digit may be that of a file that is gone: as a row, it is listed as left out.
    has_header = has_header or not (re.search(r"\d", first) or is_audio(Path(first)) or names.exists(first))
    text = _told(reading.text_column, heads)
    if text is None:
        text = [place for place in others if has_header and heads[place] in reading.text_names][:1]
    if not text and not reading.text_column:
        whole = bodies if has_header else columns
        filled = [[cell for cell in cells if cell.strip()] for cells in whole]  # not all may be written yet
        others = [place for place in others if not (has_header and heads[place] in OTHERS)]
        ways = ((cells, word) for cells in (whole, filled) for word in WORDS)
        found = ([place for place in others if _has_words(cells[place], word)] for cells, word in ways)
        text = next(filter(None, found), [])
        different = {place: len({*whole[place]}) for place in text}
        most = max(different, key=different.__getitem__, default=-1)
        # The others say again and again who speaks, or that a clip is good.
        few = [place for place in text if different[place] == 1 or FEW * different[place] <= different[most]]
        if 2 * different.get(most, 0) > len(whole[most]) and {*text} - {*few} == {most}:
            text = [most]
    return Columns(audio, text, has_header)


def named(heads: list[str], seen: Columns, reading: Reading) -> tuple[list[str], bool, Reading]:
    """(names of all columns, has_header, the reading that says the one of audio and of text); numbers for no names."""
    [audio], [text] = seen.audio, seen.text
    names = [f"{place + 1}" if head == "" or heads.count(head) > 1 else head for place, head in enumerate(heads)]
    return names, seen.has_header, replace(reading, audio_column=names[audio], text_column=names[text])


def told_by_content(path: Path, reading: Reading, *, has_header: bool) -> str:
    """Say which columns were taken."""
    how = ": its columns were told by what is in them" if has_header else " has no header"
    return f"{path.name}{how}: column {reading.audio_column} is audio, column {reading.text_column} is text"


def unclear(path: Path, heads: Sequence[str], seen: Columns, reading: Reading) -> DataError:
    """Say which columns may be the one of audio, or of text, if there are several."""
    for kind, places in (("audio", seen.audio), ("text", seen.text)):
        if len(places) > 1:
            names = [heads[place].strip().lower() or f"{place + 1}" for place in places]
            what = f"{path}: {' and '.join(names)} may each be its column of {kind}"
            return UnclearColumn(what, f"{kind}_column", names)
    lower = [head.strip().lower() for head in heads]
    return no_column(path, lower, replace(reading, audio_column=lower[seen.audio[0]]) if seen.audio else reading, "")


def _told(column: str, heads: Sequence[str]) -> list[int] | None:
    """Return the place of the column that the user has named or numbered, none if there is no such; None if unsaid."""
    if not column:
        return None
    if column.lower() in heads:
        return [heads.index(column.lower())]
    return [int(column) - 1] if column.isdigit() and 0 < int(column) <= len(heads) else []


def _best(places: list[int], columns: Sequence[Sequence[str]]) -> list[int]:
    """Prefer, of columns that may all name files, as 1.wav and its number 1, the plain one."""
    for is_better in (_end_as_audio, lambda cells: len({*cells}) == len(cells)):
        places = [place for place in places if is_better(columns[place])] or places
    return places


def _end_as_audio(cells: Sequence[str]) -> bool:
    return 2 * sum(is_audio(Path(cell.strip())) for cell in cells) > len(cells)


def _names_files(cells: Sequence[str], names: AudioNames) -> bool:
    """Tell if most are there; or some, where most end as audio does."""
    there = sum(names.exists(cell.strip()) for cell in cells)
    return 2 * there > len(cells) or (there > 0 and _end_as_audio(cells))


def _has_words(cells: Sequence[str], word: re.Pattern[str]) -> bool:
    """Tell if most have words, and are no times such as `2 min`."""
    return 2 * sum(bool(word.search(cell) and not TIME.fullmatch(cell.strip().lower())) for cell in cells) > len(cells)
