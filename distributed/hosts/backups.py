"""Keeps out of Time Machine's backups what is large and can be made anew; models, logs and settings stay in them."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .paths import STORE

TMUTIL = "/usr/bin/tmutil"
# Below a project folder: packages, copies of models and audio, caches. Checkpoints are as large as several models and
# new every few minutes; a run whose Mac is lost goes on from those of another host.
MADE_ANEW = (".venv", STORE, ".cache", ".wheelhouse", ".sync")


def exclude_from_backups(*folders: Path) -> None:
    """On a Mac, those of the folders that exist. The mark is an attribute of theirs, and needs no root (man tmutil).

    Nobody waits for it: without it backups are larger, and that is all.
    """
    if platform.system() == "Darwin" and (found := existing(folders)) and Path(TMUTIL).exists():
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen([TMUTIL, "addexclusion", *found], **quiet)


def existing(folders: Sequence[Path]) -> list[str]:
    return [str(folder.absolute()) for folder in folders if folder.is_dir() and not folder.is_symlink()]
