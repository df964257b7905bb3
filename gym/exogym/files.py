"""Files that are whole and on the disk, also after a power cut."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.platform == "darwin":
    import fcntl


def rename_durably(*renames: tuple[Path, Path]) -> None:
    """Each (part, path): only when all parts are on the disk they get their names, which are then synced too."""
    for part, _ in renames:
        sync(part)
    for part, path in renames:
        part.replace(path)
    for folder in dict.fromkeys(path.parent for _, path in renames):
        sync(folder)


def sync(path: Path) -> None:
    """A file's content, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    """On macOS fsync leaves data in the drive's cache. F_FULLFSYNC empties it, but not every file system has that."""
    if sys.platform == "darwin":
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
        except OSError:
            pass
    os.fsync(descriptor)
