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


def current_commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parent).stdout.strip()


def write_section(name: str, body: str, commit: str = "") -> None:
    """Replace or add the section of benchmark `name`; `commit` is what was measured, if not what is checked out."""
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    when = f"{datetime.date.today()}, commit {commit or current_commit()}, {machine}"
    section = f"## {name}\n\n{when}\n\n{body.strip()}\n"
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else HEAD
    sections = [part for part in re.split(r"(?m)^(?=## )", text) if not part.startswith(f"## {name}\n")]
    RESULTS.write_text("\n".join(part.rstrip() + "\n" for part in [*sections, section]), encoding="utf-8")
