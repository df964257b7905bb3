"""RESULTS.md: one section per benchmark, written by the benchmark itself, with date, commit and machine."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")
HEAD = "# Results\n\nWritten by the scripts in this folder; misses stand here too.\n"


def write_section(name: str, body: str) -> None:
    """Replace or add the section of benchmark `name`."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=RESULTS.parent
    )
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    when = f"{datetime.date.today()}, commit {commit.stdout.strip()}, {machine}"
    section = f"## {name}\n\n{when}\n\n{body.strip()}\n"
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else HEAD
    sections = [part for part in re.split(r"(?m)^(?=## )", text) if not part.startswith(f"## {name}\n")]
    RESULTS.write_text("\n".join(part.rstrip() + "\n" for part in [*sections, section]), encoding="utf-8")
