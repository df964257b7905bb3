"""Keeps this machine from falling asleep while a process trains."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path


def keep_awake(pid: int) -> str:
    """Hold off idle sleep until process `pid` ends, however it ends; returns what does it, "" if nothing can.

    A closed lid puts a laptop to sleep all the same.
    """
    command = keeper(pid, platform.system(), systemd=Path("/run/systemd/system").is_dir())
    if not command or shutil.which(command[0]) is None:
        return ""
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen(command, start_new_session=True, **quiet)
    return Path(command[0]).name


def keeper(pid: int, system: str, *, systemd: bool) -> Sequence[str]:
    """The command that ends with process `pid`; empty where there is none."""
    if system == "Darwin":
        return ["/usr/bin/caffeinate", "-i", "-m", "-s", "-w", str(pid)]
    if system == "Linux" and systemd:
        block = ["--what=sleep:idle", "--who=multimac", "--why=training", "--mode=block"]
        return ["systemd-inhibit", *block, "tail", f"--pid={pid}", "-f", "/dev/null"]
    return []
