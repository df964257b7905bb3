"""Texts that are also in the validation or test set."""

from __future__ import annotations

from collections.abc import Iterator

from whisper_tuner.data.checks.finding import Check, Finding, Kind, Severity, of_row
from whisper_tuner.data.checks.material import Material, Row, letters, text_key

SHORT = 16  # letters: everybody says "thank you very much"
MANY = 0.1  # of a part's rows: above, it is a set of fixed phrases, and one finding says so

KIND = Kind(
    name="text in two parts",
    severity=Severity.WARNING,
    means="The text is also in the validation or test set. The decoder learns it by heart, so WER is too good.",
    remedy="Remove it from the set that is trained on. In a set of fixed phrases this is as it will be in use.",
)


def find(material: Material) -> Iterator[Finding]:
    for part in material.manifests:
        found = leaking(material, part)
        every = sum(row.part == part for row in material.rows)
        if len(found) > MANY * every:
            row, other = found[0]
            what = f"{len(found)} of {every} rows of {row.manifest.name} have a text of {other.part}, such as this one"
            yield of_row(KIND, row, f"{what} of line {other.sample.line}", rows=len(found))
            continue
        for row, other in found:
            yield of_row(KIND, row, f"the same text as {other.place} ({other.part})")


def leaking(material: Material, part: str) -> list[tuple[Row, Row]]:
    """Each row of a part whose text a later part has, and the row there."""
    there: dict[str, Row] = {}
    for other in material.of_later_parts(part):
        for row in material.spoken:
            if row.part == other and letters(row.text) > SHORT:
                there.setdefault(text_key(row.text), row)
    if not there:
        return []
    own = ((row, text_key(row.text)) for row in material.spoken if row.part == part)
    return [(row, there[key]) for row, key in own if key in there]


CHECK = Check(kinds=(KIND,), find=find)
