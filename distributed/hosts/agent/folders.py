"""A host's folders: which master they work for, one at a time, as each sends files of its own; and where they are.

For that each host makes marks, empty files, and looks for those of the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from .session import children

PRIVATE = ".sync"
RECORD, IN_USE = "master", "in-use"  # in there: id and name, touched when files are sent; a lock
STARTS_S = 120.0  # from the last file that is sent to the processes that work with it
MARK = ".multimac-mark-"


def other_master(private: Path, master: list) -> tuple:
    """Tell the name of another one than `master`, [id, name], whose files these are, and whether it works here now."""
    record = private / RECORD
    with contextlib.suppress(OSError, ValueError):
        number, name = record.read_text(encoding="utf-8").split("\n")
        if number != master[0]:
            return name, abs(time.time() - record.stat().st_mtime) < STARTS_S or in_use(private)
    return "", False


def in_use(private: Path) -> bool:
    with contextlib.suppress(OSError), (private / IN_USE).open("r+") as lock:  # NFS locks no file opened for reading
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def claim(private: Path, master: list) -> None:
    with contextlib.suppress(OSError):  # a host that needs nothing may have a full disk
        (private / RECORD).write_text("\n".join(master), encoding="utf-8")


def hold(project: Path) -> None:
    """Show other masters, until this process ends, that it works in the folder; only where a sync has been."""
    with contextlib.suppress(OSError):
        lock = os.open(str(project / PRIVATE / IN_USE), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)


class Folders:
    def __init__(self):
        self._marks: list = []
        children.append(self)

    def mark(self, folders: list, master: list) -> dict:
        """Mark each folder, or the nearest one above that exists; the marks go when the agent ends.

        Answers with `marks` ([its name, names that lead from it to the folder]), and another master of the first folder
        (`master`), which works in it now (`busy`).
        """
        marks = []
        for folder in map(resolved, folders):
            there = next(path for path in (folder, *folder.parents) if os.path.isdir(str(path)))  # noqa: PTH112 - Path.is_dir raises for what may not be looked into
            path = there / f"{MARK}{os.urandom(8).hex()}"
            self._marks.append(path)
            with contextlib.suppress(OSError):  # who cannot write there replaces and removes nothing
                path.touch(mode=0o600)
            marks.append([path.name, list(folder.parts[len(there.parts) :])])
        other, busy = other_master(resolved(folders[0]) / PRIVATE, master)
        return {"marks": marks, "master": other, "busy": busy}

    def seen(self, folders: list, marks: list) -> dict:
        """Tell which marks are in a folder or above it, each with the names that lead from it to the folder."""
        found = []
        for folder in map(resolved, folders):
            for place in (folder, *folder.parents):
                names = list(folder.parts[len(place.parts) :])
                found += [[mark, names] for mark in marks if os.path.lexists(str(place / mark))]
        return {"seen": found}

    def kill(self) -> None:
        for path in self._marks:
            with contextlib.suppress(OSError):
                path.unlink()


def resolved(folder: str) -> Path:
    return Path(folder).expanduser().resolve()
