"""What a check finds, and how one is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whisper_tuner.data.checks.material import Material, Row


class Severity(StrEnum):
    ERROR = "error"  # nothing can be learned from the row, or it makes the figures wrong: --fix leaves it out
    WARNING = "warning"  # a person should look
    INFO = "info"


class Needs(StrEnum):
    """Say what a check has to be given besides the manifests."""

    TEXT = ""
    AUDIO = "audio"  # facts of decoded audio
    HEARD = "heard"  # what a model has heard


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of finding. means: what is wrong, and what it does to training. remedy: what to do about it.

    unusable: training leaves such a row out by itself, also from a test set. repairs: --fix changes its text.
    """

    name: str
    severity: Severity
    means: str
    remedy: str
    unusable: bool = False
    repairs: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One row, or the first of several rows, and what is wrong with it. Line 0 stands for the manifest as a whole.

    among: all rows, where this is about several. badness: the higher, the earlier it is shown among those of its kind.
    """

    kind: Kind
    part: str
    manifest: Path
    line: int
    what: str
    id: str = ""
    text: str = ""
    audio: Path | None = None
    seconds: float = 0.0
    among: tuple[Row, ...] = ()
    badness: float = 0.0

    @property
    def rows(self) -> int:
        """Count the rows that this is about."""
        return len(self.among) or 1

    def each(self) -> list[Finding]:
        """Return a finding for every row that this is about."""
        return [of_row(self.kind, row, self.what, badness=self.badness) for row in self.among] or [self]


Find = Callable[["Material"], Iterable[Finding]]


@dataclass(frozen=True, kw_only=True)
class Check:
    kinds: tuple[Kind, ...]
    find: Find
    needs: Needs
    place: int


CHECKS: list[Check] = []


def check(*kinds: Kind, needs: Needs = Needs.TEXT, place: int) -> Callable[[Find], Find]:
    """Register a function that finds these kinds.

    place: among all checks. Findings of one severity are listed in this order, what spoils most first.
    """

    def register(find: Find) -> Find:
        CHECKS.append(Check(kinds=kinds, find=find, needs=needs, place=place))
        return find

    return register


def of_row(kind: Kind, row: Row, what: str, *, badness: float = 0.0, among: Iterable[Row] = ()) -> Finding:
    """Return a finding about one row, or about several of which this is the first. among: those."""
    sample = row.sample
    return Finding(
        kind=kind,
        part=row.part,
        manifest=row.manifest,
        line=sample.line,
        what=what,
        id=sample.id,
        text=sample.text,
        audio=sample.audio,
        seconds=sample.duration_s,
        among=tuple(among),
        badness=badness,
    )
