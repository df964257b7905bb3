"""Problems of a manifest's rows: their kinds, their counts, and the list `data-problems.csv`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from whisper_tuner.files import write_table


class Kind(StrEnum):
    """Every reason for leaving a row out. Rows are checked one by one in dataset.py, against each other in check.py."""

    COLUMNS = "wrong columns"  # too many fields, not a JSON object, a cell that is not text
    QUOTING = "bad quoting"
    NO_AUDIO = "missing audio"
    EVICTED = "audio in iCloud only"
    UNREADABLE = "unreadable audio"
    EMPTY_AUDIO = "empty audio"
    TRUNCATED = "truncated audio"
    NO_TEXT = "no text"
    TOO_LONG = "too long"
    TOKENS = "too many tokens"
    DURATION = "wrong duration"
    LANGUAGE = "unknown language"
    SAME_AUDIO = "duplicate audio"
    SAME_ROW = "duplicate row"


@dataclass(frozen=True)
class Problem:
    """A row that was left out, and why; line 0 if its line is not known, or a whole file is. file: see Sample."""

    line: int
    what: str
    kind: Kind = Kind.UNREADABLE
    file: str = ""

    def __str__(self) -> str:
        place = place_of(self.file, self.line)
        return f"{place}: {self.what}" if place else self.what


def place_of(file: str, line: int) -> str:
    """Name the place of a row in words; a row that is a whole file has no line."""
    return " ".join(filter(None, [file, f"line {line}" if line else ""]))


def counts(problems: Iterable[Problem]) -> str:
    """Such as '3 missing audio, 1 no text', the most frequent first."""
    return ", ".join(f"{number} {kind}" for kind, number in Counter(p.kind for p in problems).most_common())


def listed(problems: Iterable[Problem], shown: int) -> list[str]:
    """Return a line for each of the first few; those that say the same are one, with how many there are."""
    alike: dict[str, list[Problem]] = {}
    for problem in problems:
        alike.setdefault(problem.what, []).append(problem)
    groups = [*alike.values()]
    lines = [f"{first}{f' (and {len(more)} more)' * bool(more)}" for first, *more in groups[:shown]]
    left = sum(map(len, groups[shown:]))
    return [*lines, f"and {left} more"] if left else lines


def write_problems(path: Path, problems: Sequence[tuple[Path, Sequence[Problem]]]) -> None:
    """Write a CSV with the columns manifest, line, kind, what."""
    folders = {manifest: manifest if manifest.is_dir() else manifest.parent for manifest, _ in problems}
    rows = (
        (folders[manifest] / p.file if p.file else manifest, p.line, p.kind, p.what)
        for manifest, found in problems
        for p in found
    )
    write_table(path, ("manifest", "line", "kind", "what"), rows)
