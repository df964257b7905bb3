"""What every check comes to, a Finding, and the running of checks one after another."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from whisper_tuner.errors import ExitStatus, TunerError


class Severity(StrEnum):
    OK = "ok"
    SKIPPED = "skipped"  # not looked at, or not known
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Says what a check has found, and what to do about it.

    check: what was looked at. hosts: the addresses that it concerns; none where only this machine is looked at.
    status: of an error, CONFIG if the hosts file is wrong, DATA for the master's own files. figures: what was
    measured, for --json. seconds: how long the check took.
    """

    what: str
    remedy: str = ""
    severity: Severity = Severity.ERROR
    check: str = ""
    hosts: tuple[str, ...] = ()
    status: ExitStatus = ExitStatus.HOST
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def host(self) -> str:
        return ", ".join(self.hosts)

    @property
    def is_error(self) -> bool:
        return self.severity is Severity.ERROR

    def named(self, check: str) -> Finding:
        return dataclasses.replace(self, check=check)

    def __str__(self) -> str:
        text = f"{self.host}: {self.what}" if len(self.hosts) == 1 else self.what
        return f"{text}\n  {self.remedy}" if self.remedy else text


Tell = Callable[[str], None]  # takes a word on what a slow check is doing


@dataclass(frozen=True)
class Check:
    name: str
    look: Callable[[], Finding]


def ok(what: str, **figures: Any) -> Finding:
    return Finding(what=what, severity=Severity.OK, figures=figures)


def skipped(what: str, **figures: Any) -> Finding:
    return Finding(what=what, severity=Severity.SKIPPED, figures=figures)


def warning(what: str, remedy: str, **figures: Any) -> Finding:
    return Finding(what=what, remedy=remedy, severity=Severity.WARNING, figures=figures)


def problem(what: str, remedy: str = "", **figures: Any) -> Finding:
    return Finding(what=what, remedy=remedy, figures=figures)


def worst(findings: Iterable[Finding]) -> Severity:
    """Return the severity of the worst of some findings; OK without any."""
    order = [*Severity]
    return max((found.severity for found in findings), key=order.index, default=Severity.OK)


def examine(checks: Sequence[Check], show: Tell = lambda name: None) -> list[Finding]:
    """Run all checks in order. One that raises is a problem itself and never hides those after it."""
    findings = []
    for check in checks:
        show(check.name)
        started = time.perf_counter()
        try:
            found = check.look()
        except TunerError as error:
            found = problem(error.args[0], error.remedy)
        except ImportError as error:
            found = problem(f"a package does not load: {error}", "Run: make setup")
        except Exception as error:  # an accelerator fails with whatever it likes: that is a finding, not a crash
            said = str(error).strip().splitlines()[0] if str(error).strip() else ""
            found = problem(f"the check itself failed: {type(error).__name__}: {said}"[:500], "Send us this row.")
        seconds = round(time.perf_counter() - started, 3)
        findings.append(dataclasses.replace(found, check=check.name, seconds=seconds))
    return findings


def exit_status(findings: Iterable[Finding]) -> ExitStatus:
    """Return HOST if there is an error, as for any host that is not fit to train; warnings are allowed."""
    return ExitStatus.HOST if worst(findings) is Severity.ERROR else ExitStatus.OK
