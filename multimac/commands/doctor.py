"""`multimac doctor`: is this machine fit to train."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from distributed.hosts.paths import PROJECT
from distributed.plan.job import resolve
from multimac.doctor.checks import Check, Finding, State, examine, exit_status, problem, skipped
from multimac.doctor.machine import machine_checks
from multimac.doctor.services import service_checks
from whisper_tuner.config import ConfigFile, Profile
from whisper_tuner.errors import ConfigError, ExitStatus

STYLES = {State.OK: "green", State.SKIPPED: "dim", State.WARNING: "yellow", State.PROBLEM: "bold red"}


def doctor(config: Path, profile: str, *, deep: bool = False, as_json: bool = False) -> ExitStatus:
    job = resolve(ConfigFile(config), profile) if profile else None
    chosen = job.profile if job else None
    runs = chosen.runs_dir if chosen else PROJECT / "runs"
    checks = [*machine_checks(job, runs), *service_checks()]
    wrong = None
    with _progress() as show:
        findings = examine(checks, lambda check: show(check.name))
        if deep and any(finding.name == "packages" and finding.state is State.PROBLEM for finding in findings):
            findings.append(dataclasses.replace(skipped("once the packages are right"), name="deep checks"))
        elif deep:
            try:
                findings += _deep(chosen, show)
            except ConfigError as error:  # of the device asked for; what was found until then is shown all the same
                wrong = error
    status = wrong.exit_status if wrong else exit_status(findings)
    if as_json:
        print(json.dumps(report(findings, profile, deep, status), indent=1))
    else:
        _print(Console(highlight=False), findings, deep)
    if wrong:
        raise wrong
    return status


def report(findings: Sequence[Finding], profile: str, deep: bool, status: ExitStatus) -> dict:
    return {
        "format": 1,
        "created": round(time.time()),
        "platform": platform.platform(),
        "profile": profile or None,
        "deep": deep,
        "exit_status": int(status),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def _deep(profile: Profile | None, show) -> list[Finding]:
    show("loading the bundled Whisper")
    try:
        from exogym import device as devices
        from exogym.errors import SettingError
        from multimac.doctor.deep import deep_checks
    except (ImportError, OSError) as error:
        return [
            dataclasses.replace(problem(f"a package does not load: {error}", "Run: make setup"), name="deep checks")
        ]

    current = ""

    def name(check: Check) -> None:
        nonlocal current
        current = check.name
        show(current)

    try:
        device = devices.choose(profile.device if profile else None)
    except SettingError as error:
        raise ConfigError(str(error), remedy="Set device to auto or cpu.") from None
    checks = deep_checks(profile, device, lambda text: show(f"{current}: {text}"))
    return examine(checks, name)


@contextlib.contextmanager
def _progress() -> Iterator:
    """On stderr, so that stdout holds the result alone."""
    console = Console(stderr=True, highlight=False)
    with console.status("") as status:
        yield lambda text: status.update(f"[dim]{text}[/dim]")


def _print(console: Console, findings: Sequence[Finding], deep: bool) -> None:
    table = Table(header_style="bold", expand=False)
    table.add_column("check", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("detail and remedy", overflow="fold")
    for finding in findings:
        remedy = f"\n[bold]{escape(finding.remedy)}[/bold]" if finding.remedy else ""
        style = STYLES[finding.state]
        table.add_row(finding.name, f"[{style}]{finding.state}[/{style}]", f"{escape(finding.detail)}{remedy}")
    console.print(table)
    count = {state: sum(finding.state is state for finding in findings) for state in State}
    more = "" if deep else " `doctor --deep` tries accelerator, ranks and audio for real (a minute)."
    warnings = f"warnings: {count[State.WARNING]}"
    if count[State.PROBLEM]:
        console.print(f"Not fit to train. Problems: {count[State.PROBLEM]}, {warnings}.", style="red")
    elif count[State.WARNING]:
        console.print(f"Fit to train; {warnings}.{more}")
    else:
        console.print(f"All well.{more}")
