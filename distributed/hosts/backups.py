"""Keeps out of Time Machine's backups what is large and can be made anew; models, logs and settings stay in them."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .paths import STORE

TMUTIL = "/usr/bin/tmutil"
# Below a project folder: packages, copies of models and audio, caches. Checkpoints are as large as several models and
# new every few minutes; a run whose Mac is lost goes on from those of another host.
MADE_ANEW = (".venv", STORE, ".cache", ".wheelhouse", ".sync")
TOLD = Path(STORE, "left-out-of-backups")  # there once the user has been told


def exclude_from_backups(*folders: Path) -> str:
    """On a Mac, those of the folders that exist. The mark is an attribute of theirs, and needs no root (man tmutil).

    Nobody waits for it: without it backups are larger, and that is all. Returns what is to be told, the first time.
    """
    if platform.system() != "Darwin" or not (found := existing(folders)) or not Path(TMUTIL).exists():
        return ""
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen([TMUTIL, "addexclusion", *found], **quiet)
    with contextlib.suppress(OSError):
        TOLD.parent.mkdir(mode=0o700, exist_ok=True)
        TOLD.touch(exist_ok=False)
        return f"Time Machine leaves out from now on, as can be made anew: {', '.join(found)} (docs/removing.md)"
    return ""


def existing(folders: Sequence[Path]) -> list[str]:
    return [str(folder.absolute()) for folder in folders if folder.is_dir() and not folder.is_symlink()]
