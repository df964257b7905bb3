"""Times in the cells of a row: how long a clip lasts, and where in its recording it begins and ends."""

from __future__ import annotations

import re

from whisper_tuner.data.formats.rows import BadRow, Cells, cell
from whisper_tuner.problems import Kind

DURATION_COLUMNS = ("duration",)
START_COLUMNS = ("offset", "start", "start_time", "starttime", "begin", "begin_time", "segment_start")
END_COLUMNS = ("end", "end_time", "endtime", "stop", "segment_end")
UNITS = {"_s": 1.0, "_sec": 1.0, "_seconds": 1.0, "": 1.0, "_ms": 0.001}  # at the end of a column's name
TIME_COLUMNS = {name + unit for name in (*DURATION_COLUMNS, *START_COLUMNS, *END_COLUMNS) for unit in UNITS}
TIME = re.compile(r"(?:(?:(\d+):)?(\d+):)?(-?\d*[.,]?\d+(?:e[-+]?\d+)?)\s*(ms|s|secs?|seconds?)?")  # 2.1 s, 1:02:03,5
OTHER_S = 0.1  # from which on two times are not the same one, rounded
# A stated duration that differs by more from the measured one means another recording, or one cut short. One in whole
# seconds may be rounded, up or down.
DIFFERENT_S, DIFFERENT_WHOLE_S, DIFFERENT_SHARE = 0.5, 1.0, 0.1
NO_TIME = "rename the column if it is no time"
OVERHANG_S = 0.5  # a last part may end a little after its recording


def span_of(cells: Cells) -> tuple[float | None, float | None]:
    """Return where in its recording a clip begins, and its seconds; None for what is not stated. Raises BadRow."""
    start, end = _stated(cells, START_COLUMNS), _stated(cells, END_COLUMNS)
    if end is None:
        return start, _stated(cells, DURATION_COLUMNS)
    if start is None:
        raise BadRow(Kind.DURATION, f"its row says where it ends, but not where it begins; {NO_TIME}")
    return start, end - start


def agree(stated: float, measured: float) -> bool:
    rounded = DIFFERENT_WHOLE_S if stated == round(stated) else DIFFERENT_S
    return abs(stated - measured) <= max(rounded, DIFFERENT_SHARE * measured)


def is_whole(start: float, seconds: float, measured: float) -> bool:
    """Tell if a file is the clip itself: all of it is meant, or its row has the times in a recording elsewhere."""
    apart = abs(seconds - measured)
    return apart <= OTHER_S or (apart <= DIFFERENT_S and (start == 0 or start + seconds > measured + OVERHANG_S))


def _stated(cells: Cells, names: tuple[str, ...]) -> float | None:
    columns = ((f"{name}{ending}", scale) for name in names for ending, scale in UNITS.items())
    found = {column: _seconds(column, text, scale) for column, scale in columns if (text := cell(cells, (column,)))}
    if found and max(found.values()) - min(found.values()) > OTHER_S:
        said = ", ".join(f"{column} = {seconds:g} s" for column, seconds in found.items())
        raise BadRow(Kind.COLUMNS, f"two columns differ ({said}): rename the one that does not count")
    return next(iter(found.values()), None)


def _seconds(column: str, text: str, scale: float) -> float:
    """Read `2.1`, `2,1`, `2.1 s`, `2100 ms`, `0:02` or `1:00:02,1`. scale: of a number without a unit."""
    if not (match := TIME.fullmatch(text.lower())):
        other = "" if column.startswith(DURATION_COLUMNS) else f"; {NO_TIME}"
        raise BadRow(Kind.DURATION, f"{column} '{text[:40]}' is not a number of seconds{other}")
    hours, minutes, number, unit = match.groups()
    if unit or minutes:
        scale = UNITS["_ms"] if unit == "ms" else 1.0
    return (int(hours or 0) * 60 + int(minutes or 0)) * 60 + float(number.replace(",", ".")) * scale
