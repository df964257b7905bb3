"""One text in suspiciously many rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity, of_row
from whisper_tuner.data.checks.material import Material, Row, letters, text_key

SHORT = 8  # letters: "yes" and "seven" come often
TIMES = 5  # by one speaker, or by nobody knows whom
OVER_MEAN = 5.0  # and so many times as often as the texts of the part on average: sets of fixed phrases repeat all

KIND = Kind(
    name="repeated text",
    severity=Severity.WARNING,
    means="Far more rows than usual have this text, by the same speaker: often a default, or a column filled down.",
    remedy="Listen to some of them. The same sentence by several speakers is all right.",
)


def find(material: Material) -> Iterator[Finding]:
    for part in material.manifests:
        said: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in material.spoken:
            if row.part == part:
                said[row.sample.speaker, text_key(row.text)].append(row)
        usual = sum(map(len, said.values())) / max(1, len(said))
        for rows in said.values():
            if len(rows) >= max(TIMES, OVER_MEAN * usual) and letters(rows[0].text) >= SHORT:
                lines = ", ".join(str(row.sample.line) for row in rows[:5])
                what = f"{len(rows)} rows have it: line {lines}{', ...' if len(rows) > 5 else ''}"
                yield of_row(KIND, rows[0], what, badness=len(rows), rows=len(rows))


CHECK = Check(kinds=(KIND,), find=find)
