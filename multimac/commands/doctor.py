"""`multimac doctor`: is this machine fit to train."""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from rich.table import Table
from rich.text import Text
from typer import Option

from distributed.checkup.doctor.machine import FOR_HOSTS, machine_checks, service_checks
from distributed.checkup.findings import Finding, Severity, Tell, examine, exit_status, problem
from distributed.plan.hosts_file import HOSTS_FILE
from distributed.plan.job import resolve
from multimac.view.progress import working
from multimac.view.terminal import Console
from whisper_tuner.config import ConfigFile, Profile
from whisper_tuner.errors import ExitStatus

from .options import CONFIG, Config, command

STYLES = {Severity.OK: "green", Severity.SKIPPED: "dim", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}


@command("doctor")
def doctor(
    deep: Annotated[bool, Option("--deep", help="Also try the GPU, two ranks and audio files: a minute.")] = False,
    profile: Annotated[str, Option(help="Check what this profile needs, with batches as large as its own.")] = "",
    hosts: Annotated[bool, Option("--hosts", help="Also check SSH, network and firewall, as hosts need them.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print only the findings, as JSON.")] = False,
    config: Config = CONFIG,
) -> ExitStatus:
    """Check whether this machine can train; exit status 5 if not."""
    file = ConfigFile(config) if profile else None
    job = resolve(file, profile) if file else None
    hosts = hosts or (config.parent / HOSTS_FILE).exists() or bool(file and file.has("distributed", profile))
    runs = job.profile.runs_dir if job else config.absolute().parent / "runs"
    services = [check for check in service_checks() if hosts or check.name not in FOR_HOSTS]
    with working(Console(stderr=True, highlight=False)) as show:  # stdout holds the result alone
        findings = examine([*machine_checks(job, runs), *services], show)
        if deep:
            findings += _deep(job.profile if job else None, show)
    if as_json:
        print(json.dumps(report(findings, profile, deep), indent=1))
    else:
        _print(Console(), findings, deep, hosts)
    return exit_status(findings)


def _deep(profile: Profile | None, show: Tell) -> list[Finding]:
    show("loading torch")
    try:
        from distributed.checkup.doctor.deep import deep_checks
        from exogym import device as devices

        device = devices.choose(profile.device if profile else None)
    except (ImportError, OSError, ValueError) as error:  # a broken package, or a device that is not there
        found = problem(f"they cannot run: {error}", "First fix what the rows above report.")
        return [found.named("deep checks")]
    return examine(deep_checks(profile, device, show), show)


def report(findings: Sequence[Finding], profile: str, deep: bool) -> dict:
    return {
        "format": 1,
        "created": round(time.time()),
        "platform": platform.platform(),
        "profile": profile or None,
        "deep": deep,
        "exit_status": int(exit_status(findings)),
        "findings": [
            {
                "state": state(found),
                "detail": found.what,
                "remedy": found.remedy,
                "figures": found.figures,
                "name": found.check,
                "seconds": found.seconds,
            }
            for found in findings
        ],
    }


def state(found: Finding) -> str:
    """Name the severity of a finding as doctor does."""
    return "problem" if found.is_error else found.severity


def _print(console: Console, findings: Sequence[Finding], deep: bool, hosts: bool) -> None:
    table = Table(header_style="bold", expand=False)
    table.add_column("check", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("detail and remedy", overflow="fold")
    for finding in findings:
        remedy = [(f"\n{finding.remedy}", "bold")] if finding.remedy else []
        named = Text(state(finding), STYLES[finding.severity])
        table.add_row(finding.check, named, Text.assemble(finding.what, *remedy))
    console.print(table)
    count = Counter(finding.severity for finding in findings)
    more = "" if deep else " `doctor --deep` tries accelerator, ranks and audio for real (a minute)."
    warnings = f"warnings: {count[Severity.WARNING]}"
    if count[Severity.ERROR]:
        console.print(f"Not fit to train. Problems: {count[Severity.ERROR]}, {warnings}.", style="red")
    else:
        console.print(f"{f'Fit to train; {warnings}' if count[Severity.WARNING] else 'All well'}.{more}")
    if not hosts:
        console.print("For several machines: `multimac doctor --hosts` on each, `multimac hosts check`.")
