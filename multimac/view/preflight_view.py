"""Shows a preflight's report on the terminal: hosts by checks, the links between them, what to mend."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distributed.checkup.findings import Severity, worst
from distributed.checkup.links import Pair
from distributed.checkup.look import HostFacts
from distributed.checkup.preflight import Report
from whisper_tuner.text import counted

from .terminal import fitting

CHECKS = ("ssh", "python", "packages", "code", "clock", "disk", "memory", "device", "links")
# Problems without a column of their own are shown where they belong.
COLUMN = {"folder": "disk", "system": "python", "files": "disk", "rivals": "packages"}
STYLES = {Severity.ERROR: "red", Severity.WARNING: "yellow"}
MARKS = {Severity.ERROR: "✗", Severity.WARNING: "!"}


def show_preflight(console: Console, report: Report) -> None:
    """Print one line if all is well, else the tables. Raises HostError or ConfigError with all problems."""
    if report.problems:
        show(console, report, errors=False)
        report.raise_if_errors()
    elif report.network:
        console.print(report.network, soft_wrap=True)
    console.print(report.summary(), soft_wrap=True)


def show(console: Console, report: Report, *, errors: bool = True) -> None:
    """Print the tables and problems. errors: of those, also errors, which else follow as the report's exception."""
    console.print(fitting(console, _hosts(report), heads=2))
    if report.pairs:
        console.print()
        console.print(fitting(console, _links(report)))
    if report.network:
        console.print(report.network, soft_wrap=True)
    console.print()
    for problem in report.problems if errors else report.warnings:
        console.print(Text.assemble((f"{problem.severity}:", STYLES[problem.severity]), f" {problem}"))
    counts = {"error": len(report.errors), "warning": len(report.warnings)}
    words = [counted(count, word) for word, count in counts.items() if count]
    console.print(f"{', '.join(words) or 'all well'} ({report.seconds:.1f} s)")


def _hosts(report: Report) -> Table:
    table = Table(header_style="bold", box=None, padding=(0, 1, 0, 0))
    table.add_column("")
    table.add_column("host", overflow="fold")
    for check in CHECKS:
        table.add_column(check, no_wrap=True)
    for number, facts in enumerate(report.hosts, 1):
        table.add_row(str(number), Text(facts.name), *(_cell(facts, check, report) for check in CHECKS))
    return table


def _cell(facts: HostFacts, check: str, report: Report) -> Text:
    own = [p for p in report.problems if facts.name in p.hosts and COLUMN.get(p.check, p.check) == check]
    text = _fact(facts, check, report)
    if not own:
        return Text(text)
    severity = worst(own)
    return Text.assemble((MARKS[severity], STYLES[severity]), f" {text}" if text else "")


def _fact(facts: HostFacts, check: str, report: Report) -> str:
    known, versions = facts.facts, facts.facts.get("versions", {})
    if check == "ssh":
        return ("here" if facts is report.hosts[0] else "ok") if facts.reached else ""
    if check == "python" and known.get("training"):
        return ".".join(map(str, known["python"]))
    if check == "packages" and known.get("training"):
        return str(len(versions))
    if check == "code" and facts.differ is not None:
        return "to send" if facts.differ else "same"
    if check == "clock" and facts.clock_ahead_s is not None:
        return f"{facts.clock_ahead_s:+.1f} s"
    if check == "disk" and facts.space:
        return f"{facts.space['free'] / 1e9:.0f} GB"
    if check == "memory" and known:
        return f"{known['memory']['total'] / 1e9:.0f} GB"
    if check == "device":
        return facts.device or ""
    if check == "links":
        mine = [pair for pair in report.pairs if facts.name in (pair.source, pair.target)]
        return f"{sum(pair.failed is None for pair in mine)}/{len(mine)}" if mine else ""
    return ""


def _links(report: Report) -> Table:
    """Make the table of links, from row to column: Mbit/s, and ms there and back."""

    def cell(pair: Pair | None, *, itself: bool) -> Text | str:
        if pair is None:
            return "" if itself else "?"
        if pair.failed:
            return Text(pair.failed, style="red")
        assert pair.latency_s is not None  # it was reached
        speed = "?" if pair.mbit is None else f"{pair.mbit:.0f}"
        return f"{speed} / {pair.latency_s * 1000:.1f}"

    found = {(pair.source, pair.target): pair for pair in report.pairs}
    table = Table(header_style="bold", box=None, padding=(0, 1, 0, 0))
    table.add_column("Mbit/s / ms", overflow="fold", max_width=20)
    for number, _ in enumerate(report.hosts, 1):
        table.add_column(f"-> {number}", justify="right")
    for number, source in enumerate(report.hosts, 1):
        cells = [cell(found.get((source.name, target.name)), itself=source is target) for target in report.hosts]
        name = f"{number} {source.interface} {source.address}" if source.interface else f"{number} {source.name}"
        table.add_row(Text(name), *cells)
    return table
