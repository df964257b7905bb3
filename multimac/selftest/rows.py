"""What a check of the self-test comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Verdict(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "not known"


@dataclass(frozen=True, kw_only=True)
class Row:
    """`meaning` is what it means for a run; `figures` are what was measured."""

    name: str
    verdict: Verdict
    meaning: str
    figures: dict = field(default_factory=dict)


def passed(name: str, meaning: str, **figures) -> Row:
    return Row(name=name, verdict=Verdict.PASS, meaning=meaning, figures=figures)


def failed(name: str, meaning: str, **figures) -> Row:
    return Row(name=name, verdict=Verdict.FAIL, meaning=meaning, figures=figures)


def unknown(name: str, meaning: str, **figures) -> Row:
    return Row(name=name, verdict=Verdict.UNKNOWN, meaning=meaning, figures=figures)
