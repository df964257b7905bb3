"""Which master a host's project folder works for: one at a time, as each sends files of its own to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

RECORD, IN_USE = "master", "in-use"  # in .sync: id and name, touched when files are sent; a lock
STARTS_S = 120.0  # from the last file that is sent to the processes that work with it


def other_master(private: Path, master: list) -> tuple:
    """The name of another one than `master`, [id, name], whose files these are, and whether it works here now."""
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
    """Until this process ends, other masters see that it works in the folder; only where a sync has been."""
    with contextlib.suppress(OSError):
        lock = os.open(str(project / ".sync" / IN_USE), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
