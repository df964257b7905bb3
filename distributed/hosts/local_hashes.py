"""SHA-256 of the files that are sent, remembered so that a large file is read once and not at every sync."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable
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


def hashed_files(items: Iterable[SyncItem], index: Path) -> list[HashedFile]:
    """index: hashes by path, size and modification time. It is safe to lose; a damaged one is made anew.

    Where it cannot be saved, on a full disk for example, the files are hashed again the next time. Raises DataError.
    """
    try:
        known = dict(parse_json(index.read_text()))
    except (OSError, ValueError, TypeError):
        known = {}
    before = dict(known)
    files = [_hashed(item, known) for item in items]
    if known != before:
        with contextlib.suppress(OSError):
            index.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(index, json.dumps(known), durable=False)
    return files


def _hashed(item: SyncItem, known: dict[str, list]) -> HashedFile:
    path = item.local.resolve()
    try:
        stat = path.stat()
        match known.get(str(path)):
            case [stat.st_size, stat.st_mtime_ns, str(digest)] if re.fullmatch("[0-9a-f]{64}", digest):
                pass
            case _:
                with path.open("rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
                known[str(path)] = [stat.st_size, stat.st_mtime_ns, digest]
    except OSError as error:
        raise unreadable(item, error) from error
    return HashedFile(item=item, size=stat.st_size, sha256=digest)


def unreadable(item: SyncItem, error: OSError) -> DataError:
    remedy = "Look at its permissions, or whether it was moved."
    return DataError(f"{item.local}: cannot be read: {error.strerror}", remedy=remedy)
