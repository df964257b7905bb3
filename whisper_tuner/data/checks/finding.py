"""What a check is, and what it finds."""

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
    """What a check has to be given besides the manifests."""

    TEXT = ""
    AUDIO = "audio"  # facts of decoded audio
    HEARD = "heard"  # what a model has heard


@dataclass(frozen=True, kw_only=True)
class Kind:
    """means: what is wrong, and what it does to training. remedy: what to do about it.

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
    """One row, or the first of several rows, and what is wrong with it. line 0: of the manifest as a whole.

    rows: how many it is about. badness: the higher, the earlier it is shown among those of its kind.
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
    rows: int = 1
    badness: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Check:
    kinds: tuple[Kind, ...]
    find: Callable[[Material], Iterable[Finding]]
    needs: Needs = Needs.TEXT


def of_row(kind: Kind, row: Row, what: str, *, badness: float = 0.0, rows: int = 1) -> Finding:
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
        rows=rows,
        badness=badness,
    )
