"""The shells that a user of a host may have. Those that are not installed are skipped by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

# As `sh` a Mac has bash 3.2, and may have dash or zsh (man sh, /private/var/select/sh).
SYSTEM_SHELLS = ("sh", "dash", "bash", "zsh", "busybox")
LOGIN_SHELLS = (*SYSTEM_SHELLS, "fish", "tcsh")


def installed(name: str, folder: Path, called: str = "") -> Path:
    """The shell; called: the name by which it is to know itself, as zsh and busybox do."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed: sh tools/system_packages.sh")
    folder.mkdir(exist_ok=True)
    path = folder / (called or {"busybox": "ash"}.get(name, name))
    path.symlink_to(program)
    return path
