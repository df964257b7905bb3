"""RESULTS.md: one section per benchmark, written by the benchmark itself, with date, commits and machine."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from lab.machine import lacking

RESULTS = Path(__file__).with_name("RESULTS.md")
HEAD = "# Results\n\nWritten by the scripts in this folder; misses stand here too.\n"


def current_commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parent).stdout.strip()


def table(head: Sequence, rows: Iterable[Sequence]) -> list[str]:
    first, *others = (f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows))
    return [first, "|---" * len(head) + "|", *others]


def listed(misses: Iterable[str]) -> list[str]:
    """A list of them under its title, or nothing."""
    lines = [f"- {miss}" for miss in misses]
    return ["", "Misses:", "", *lines] if lines else []


def write_section(name: str, body: Sequence[str], commits: Iterable[str] = ()) -> None:
    """Replace or add the section of benchmark `name`; `commits` are what was measured, if not what is checked out."""
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    machine += "".join(f", without {what}" for what in lacking)
    when = f"{datetime.date.today()}, commit {', '.join(dict.fromkeys(commits)) or current_commit()}, {machine}"
    section = "\n".join([f"## {name}", "", when, "", *body, ""])
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else HEAD
    sections = [part for part in re.split(r"(?m)^(?=## )", text) if not part.startswith(f"## {name}\n")]
    RESULTS.write_text("\n".join(part.rstrip() + "\n" for part in [*sections, section]), encoding="utf-8")
