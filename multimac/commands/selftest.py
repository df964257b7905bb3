"""`multimac selftest`: proves on its owner's machines what this project assumes of them, and writes a report of it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.table import Table
from rich.text import Text
from typer import Option

from distributed.checkup.findings import Finding, exit_status
from distributed.checkup.probes.probe import secrets
from distributed.checkup.selftest.asking import Desk
from distributed.checkup.selftest.run import CHECKS, LID, VERDICTS, Check, as_row, cleaned, report_of, rows_of, run
from distributed.hosts.keep_awake import awake
from distributed.plan.hosts_file import load_hosts
from distributed.ssh.host import Host, Hosts
from multimac.view.progress import working
from multimac.view.terminal import Console
from whisper_tuner.errors import ConfigError, ExitStatus
from whisper_tuner.files import check_writable, write_atomically
from whisper_tuner.text import harmless

from .options import command

STYLES = {"pass": "green", "fail": "bold red", "not known": "yellow"}
VERDICT_WIDTH, NAME_WIDTH = 9, 22


@command("selftest")
@awake()
def selftest(
    hosts: Annotated[Path | None, Option("--hosts", help="Hosts file. [default: this machine alone]")] = None,
    out: Annotated[Path, Option(help="Where to write the report.")] = Path("report.json"),
    lid: Annotated[bool, Option("--lid", help="At the end, watch for a minute while you close a lid.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print only the report, as JSON.")] = False,
) -> ExitStatus:
    """Check what this program assumes of your machines: about 5 minutes, with a report to send us."""
    console = Console(stderr=as_json)
    machines = load_hosts(hosts) if hosts else Hosts(master=Host(address="localhost"), workers=())
    _check_writable(out)
    desk = Desk(hosts=machines)
    _introduce(console, desk)
    entries: list[dict] = []
    began, interrupted = time.monotonic(), False
    try:
        _show_all(console, desk, [*CHECKS, *([LID] if lid else [])], entries)
    except KeyboardInterrupt:
        interrupted = True
        console.print("stopped; what was started is ended on all hosts")
    finally:
        desk.held.close()
        for place in desk.places:
            place.machine.close()
        entries = [cleaned(desk, entry) for entry in entries]  # later checks may have made more names known
        report = json.dumps(report_of(machines, entries, whole=not interrupted), indent=1)
        write_atomically(out, report + "\n")
        if as_json:
            print(harmless(report))
    rows = [row for entry in entries for row in rows_of(entry)]
    _sum_up(console, rows, out, time.monotonic() - began)
    return ExitStatus.INTERRUPTED if interrupted else exit_status(rows)


def _check_writable(out: Path) -> None:
    """Try to write before five minutes of work. Raises ConfigError."""
    remedy = "Name another file with --out."
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"{out} is {'a' if out.is_dir() else 'in no'} folder", remedy=remedy)
    check_writable(out.parent, remedy)


def _introduce(console: Console, desk: Desk) -> None:
    """Say which letter stands for which host: rows and report know hosts by letters alone."""
    for host in desk.hosts.all:
        desk.sanitizer.learn([host.address], desk.letter(host))
        desk.sanitizer.learn([host.user] if host.user else [], "USER")
    desk.learn(secrets(), "A")
    named = ", ".join(f"{desk.letter(host)} is {host.address}" for host in desk.hosts.all)
    console.print(f"{named}. This takes about 5 minutes; Ctrl-C ends it everywhere.")


def _show_all(console: Console, desk: Desk, checks: Sequence[Check], entries: list[dict]) -> None:
    """Each row appears when it is known."""
    with working(console) as tell:
        desk.tell, desk.ask_user = tell, console.print
        for entry in run(desk, checks):
            entries.append(entry)
            for row in rows_of(entry):
                console.print(_line(row))


def _line(found: Finding) -> Table:
    """Make one row of the table: each is printed alone, as soon as it is known."""
    table = Table.grid(padding=(0, 1), expand=False)
    for width in (VERDICT_WIDTH, NAME_WIDTH):
        table.add_column(width=width, overflow="fold")
    table.add_column(overflow="fold")
    row = as_row(found)
    table.add_row(Text(row["verdict"], STYLES[row["verdict"]]), Text(row["name"]), Text(row["meaning"]))
    return table


def _sum_up(console: Console, rows: Sequence[Finding], out: Path, seconds: float) -> None:
    count = Counter(VERDICTS[row.severity] for row in rows)
    console.print(", ".join(f"{verdict}: {count[verdict]}" for verdict in STYLES) + f" ({seconds:.0f} s)")
    what = "it contains no names, addresses, keys or paths. Please look through it, and send it to us: docs/mac.md"
    console.print(f"{out}: {what}", soft_wrap=True)
