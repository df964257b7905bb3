"""docs/data.md: it has every layout, every name of a column and every kind of bad row."""

from __future__ import annotations

import re
from pathlib import Path

from whisper_tuner.data.formats import rows
from whisper_tuner.data.formats.layouts import LAYOUTS
from whisper_tuner.data.formats.place import KIND_OF
from whisper_tuner.data.problems import Kind

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
COLUMNS = {
    "audio": rows.AUDIO_COLUMNS,
    "text": rows.TEXT_COLUMNS,
    "id": rows.ID_COLUMNS,
    "speaker": rows.SPEAKER_COLUMNS,
    "language": rows.LANGUAGE_COLUMNS,
    "duration, in s": rows.DURATION_COLUMNS,
    "begin of the clip in its recording, in s": rows.OFFSET_COLUMNS,
    "text with the times of its parts": rows.TIMED_COLUMNS,
}


def section(title: str) -> list[list[str]]:
    """The cells of its table."""
    body = TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0] if title else TEXT.partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("| ")][1:]


def test_every_name_of_a_column():
    told = {cells[0]: tuple(re.findall(r"`(\w+)`", cells[1])) for cells in section("Columns")}
    assert told == COLUMNS


def test_every_layout():
    assert {cells[2].strip("`") for cells in section("")} == set(LAYOUTS)


def test_every_kind_of_row_that_is_left_out():
    told = [kind for cells in section("Rows that cannot be used") for kind in cells[0].split(", ")]
    assert sorted(told) == sorted(Kind)


def test_every_usual_name_of_a_part():
    assert {name for name in KIND_OF if f"`{name}`" in TEXT or f"`{name}/`" in TEXT} >= {"train", "dev", "test", "val"}
