"""What is wrong with rows of a manifest: its kinds, their counts, and the list `data-problems.csv`."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from whisper_tuner.files import write_atomically


class Kind(StrEnum):
    COLUMNS = "wrong columns"  # too many fields, no JSON object, a cell that is no text
    QUOTING = "bad quoting"
    NO_AUDIO = "missing audio"
    UNREADABLE = "unreadable audio"
    EMPTY_AUDIO = "empty audio"
    TRUNCATED = "truncated audio"
    NO_TEXT = "empty text"
    TOO_LONG = "too long"
    TOKENS = "too many tokens"
    DURATION = "wrong duration"
    SAME_ID = "duplicate id"
    SAME_AUDIO = "duplicate audio"
    SAME_ROW = "duplicate row"


@dataclass(frozen=True)
class Problem:
    """A row (or sample) left out, and why; line 0 when no manifest line is known."""

    line: int
    what: str
    kind: Kind = Kind.UNREADABLE

    def __str__(self) -> str:
        return f"line {self.line}: {self.what}" if self.line else self.what


def counts(problems: Iterable[Problem]) -> str:
    """'3 missing audio, 1 empty text', the most frequent first."""
    return ", ".join(f"{number} {kind}" for kind, number in Counter(p.kind for p in problems).most_common())


def write_problems(path: Path, problems: Mapping[Path, Sequence[Problem]]) -> None:
    """A CSV of manifest, line, kind, what."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["manifest", "line", "kind", "what"])
    for manifest, found in problems.items():
        writer.writerows([manifest, problem.line, problem.kind, problem.what] for problem in found)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue())
