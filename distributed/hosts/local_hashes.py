"""SHA-256 of the files that are sent, remembered so that a large file is read once and not at every sync."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from whisper_tuner.errors import DataError
from whisper_tuner.files import write_atomically
from whisper_tuner.json_text import parse_json

from .code import SyncItem


@dataclass(frozen=True, kw_only=True)
class HashedFile:
    """A file to send, as it was when it was hashed."""

    item: SyncItem
    size: int
    sha256: str


class LocalHashes:
    """Hashes by path, size and modification time, in a JSON file. It is safe to lose; a damaged one is made anew."""

    def __init__(self, index: Path):
        self.index = index
        try:
            self.known: dict[str, list] = dict(parse_json(index.read_text()))
        except (OSError, ValueError, TypeError):
            self.known = {}
        self.changed = False

    def file(self, item: SyncItem) -> HashedFile:
        """Raises DataError for a file that cannot be read."""
        path = item.local.resolve()
        try:
            stat = path.stat()
            match self.known.get(str(path)):
                case [stat.st_size, stat.st_mtime_ns, str(digest)] if re.fullmatch("[0-9a-f]{64}", digest):
                    pass
                case _:
                    with path.open("rb") as stream:
                        digest = hashlib.file_digest(stream, "sha256").hexdigest()
                    self.known[str(path)] = [stat.st_size, stat.st_mtime_ns, digest]
                    self.changed = True
        except OSError as error:
            raise unreadable(item, error) from error
        return HashedFile(item=item, size=stat.st_size, sha256=digest)

    def save(self) -> None:
        """Where it cannot be saved, on a full disk for example, the files are hashed again the next time."""
        if self.changed:
            with contextlib.suppress(OSError):
                self.index.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.index, json.dumps(self.known), durable=False)


def unreadable(item: SyncItem, error: OSError) -> DataError:
    remedy = "Look at its permissions, or whether it was moved."
    return DataError(f"{item.local}: cannot be read: {error.strerror}", remedy=remedy)
