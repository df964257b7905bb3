"""`multimac doctor`: what a check finds, and running checks one after another."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from whisper_tuner.errors import ExitStatus, TunerError


class State(StrEnum):
    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row. `figures` are what was measured, for --json; `name` and `seconds` are filled in by `examine`."""

    state: State
    detail: str
    remedy: str = ""
    figures: dict = field(default_factory=dict)
    name: str = ""
    seconds: float = 0.0


Tell = Callable[[str], None]  # takes a word on what a slow check is doing


@dataclass(frozen=True)
class Check:
    name: str
    look: Callable[[], Finding]


def ok(detail: str, **figures) -> Finding:
    return Finding(state=State.OK, detail=detail, figures=figures)


def skipped(detail: str) -> Finding:
    return Finding(state=State.SKIPPED, detail=detail)


def warning(detail: str, remedy: str, **figures) -> Finding:
    return Finding(state=State.WARNING, detail=detail, remedy=remedy, figures=figures)


def problem(detail: str, remedy: str = "", **figures) -> Finding:
    return Finding(state=State.PROBLEM, detail=detail, remedy=remedy, figures=figures)


def examine(checks: Sequence[Check], show: Tell = lambda name: None) -> list[Finding]:
    """Run all checks in order. One that raises is a problem itself and never hides those after it."""
    findings = []
    for check in checks:
        show(check.name)
        started = time.perf_counter()
        finding = _look(check)
        seconds = round(time.perf_counter() - started, 3)
        findings.append(dataclasses.replace(finding, name=check.name, seconds=seconds))
    return findings


def _look(check: Check) -> Finding:
    try:
        return check.look()
    except TunerError as error:
        return problem(error.args[0], error.remedy)
    except ImportError as error:
        return problem(f"a package does not load: {error}", "Run: make setup")
    except Exception as error:  # an accelerator fails with whatever it likes: that is a finding, not a crash
        said = str(error).strip().splitlines()[0] if str(error).strip() else ""
        return problem(f"the check itself failed: {type(error).__name__}: {said}"[:500], "Send us this row.")


def exit_status(findings: Sequence[Finding]) -> ExitStatus:
    """HOST, as for any other host that is not fit to train, if there is a problem; warnings are allowed."""
    return ExitStatus.HOST if any(finding.state is State.PROBLEM for finding in findings) else ExitStatus.OK
