"""What is known of files and takes long to find out: kept in one SQLite file, for all commands of a project."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisper_tuner.files import hash_of

if TYPE_CHECKING:
    import sqlite3

CACHE = "cache"  # the folder below a project's store in which everything can be computed anew
FILE = "facts.sqlite"
MOST_BYTES = 1 << 30  # then the older half is dropped
LOCKED_S = 5.0  # others write for a moment; a process that has the file for longer is frozen
# SQLite's errors that are not damage, as they may be over the next time, or are the disk's.
KEPT_AS_IT_IS = {"BUSY", "CANTOPEN", "FULL", "IOERR", "LOCKED", "NOMEM", "PERM", "READONLY"}
TABLE = (
    "CREATE TABLE IF NOT EXISTS facts"
    " (kind TEXT, name BLOB, stamp TEXT, value BLOB, digest BLOB, PRIMARY KEY (kind, name))"
)

UNUSABLE: set[tuple[Path, bool]] = set()  # files of which this process has said so; True: to write to


def file_stamp(found: os.stat_result) -> str:
    """Return size and time of a file, by which a change is noticed."""
    return f"{found.st_size} {found.st_mtime_ns}"


class FactStore:
    """JSON values by kind and name. Each has a stamp, and is known as long as that is the same.

    Threads and processes may share the file, and may be killed at any moment. A damaged value counts as unknown, and a
    damaged file is made anew. Where the file cannot be used, as on a disk that is full or read-only, a process says so
    once, and goes on without it.
    """

    def __init__(self, cache: Path):
        self.file = cache / FILE

    def known(self, kind: str, stamps: Mapping[str, str]) -> dict[str, Any]:
        """Return the values of those names that are known with the given stamps."""

        def read(database: sqlite3.Connection) -> dict[str, Any]:
            found = {}
            database.execute("BEGIN")  # one lock for all
            for name, stamp in stamps.items():
                row = (kind, os.fsencode(name), stamp)
                query = "SELECT value, digest FROM facts WHERE kind = ? AND name = ? AND stamp = ?"
                for value, digest in database.execute(query, row):
                    if isinstance(value, bytes) and digest == _digest(*row, value):
                        found[name] = json.loads(value)
            return found

        return (self._use(read, writes=False) if stamps else None) or {}

    def keep(self, kind: str, stamps: Mapping[str, str], values: Mapping[str, Any]) -> None:
        """Keep these values, in place of older ones of their names."""

        def write(database: sqlite3.Connection) -> None:
            for name, value in values.items():
                row, content = (kind, os.fsencode(name), stamps[name]), json.dumps(value).encode()
                database.execute("REPLACE INTO facts VALUES (?, ?, ?, ?, ?)", (*row, content, _digest(*row, content)))
            names = ("page_count", "freelist_count", "page_size")
            pages, free, page_bytes = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
            if (pages - free) * page_bytes > MOST_BYTES:
                database.execute("DELETE FROM facts WHERE rowid <= (SELECT (min(rowid) + max(rowid)) / 2 FROM facts)")

        if values:
            self._use(write, writes=True)

    def _use(self, work: Callable[[sqlite3.Connection], Any], *, writes: bool) -> Any:
        """Return what `work` gives, None where the file cannot be used. Each time it is opened anew: no lock stays."""
        if (self.file, writes) in UNUSABLE:
            return None
        try:
            import sqlite3
        except ImportError:  # some Pythons are built without it
            self._say("this Python has no sqlite3", writes)
            return None
        for is_last in (False, True):
            try:
                if not writes and not self.file.exists():
                    return None
                self.file.parent.mkdir(parents=True, exist_ok=True)
                # Only a new file is opened here: to close one ends the locks that another thread has on it.
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
                opened = self.file.stat().st_ino
                with contextlib.closing(sqlite3.connect(self.file, timeout=LOCKED_S)) as database, database:
                    database.text_factory = bytes
                    database.execute("PRAGMA synchronous = OFF")  # a power cut may damage it, a killed process does not
                    database.execute(TABLE)
                    return work(database)
            except OSError as error:
                self._say(error.strerror or str(error), writes)
                return None
            except sqlite3.Error as error:
                name = getattr(error, "sqlite_errorname", "SQLITE_ERROR")
                if name == "SQLITE_READONLY_DBMOVED":  # removed meanwhile, as `runs clean --cache` does
                    continue
                if is_last or name.split("_")[1] in KEPT_AS_IT_IS:
                    self._say(str(error), writes)
                    return None
                with contextlib.suppress(OSError):
                    if self.file.stat().st_ino == opened:  # else another process has made a new one
                        Path(f"{self.file}-journal").unlink(missing_ok=True)  # else it would be played back
                        self.file.unlink(missing_ok=True)
        return None

    def _say(self, reason: str, writes: bool) -> None:
        is_known = (self.file, not writes) in UNUSABLE
        UNUSABLE.add((self.file, writes))
        if is_known:
            return
        what = f"what is known of files cannot be kept in {self.file}: {reason}"
        logging.getLogger(__name__).warning(f"{what}; it is found out each time, which is slower")


def _digest(kind: str, name: bytes, stamp: str, value: bytes) -> bytes:
    return hash_of(b"\0".join([kind.encode(), name, stamp.encode(), value]))
