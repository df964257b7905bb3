"""Values on disk under keys of 16 bytes, each in a file of its own, which several processes read and write at once.

A file holds the value's hash and the value, and appears whole. Nothing is flushed to the disk: what a power cut leaves
fails its hash.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from whisper_tuner.files import HASH_BYTES, atomic_path, hash_of


class KeptValues:
    """A mapping from keys to values. Threads may share it.

    A value is compared with its hash when this process reads it for the first time. Whatever is damaged is not there.
    unwritable: told the reason once, if nothing can be written, as on a full disk; `is_writable` is False from then on.
    """

    def __init__(self, directory: Path, unwritable: Callable[[str], None] = lambda reason: None):
        self.directory, self._unwritable = directory, unwritable
        self.is_writable, self._telling = True, threading.Lock()
        self._intact: dict[bytes, int] = {}  # sizes of the values that were compared

    def __contains__(self, key: bytes) -> bool:
        return self._file(key).exists()

    def get(self, key: bytes) -> bytes | None:
        file = self._file(key)
        try:
            with file.open("rb", buffering=0) as kept:
                digest, value = kept.read(HASH_BYTES), kept.readall()
        except OSError:
            return None
        if self._intact.get(key) != len(value):
            if hash_of(value) != digest:
                with contextlib.suppress(OSError):
                    file.unlink()
                return None
            self._intact[key] = len(value)
        return value

    def put(self, key: bytes, value: bytes) -> None:
        """Keep a value, unless this or another process has done so."""
        if not self.is_writable or key in self:
            return
        file = self._file(key)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(file, durable=False) as part:
                part.write_bytes(hash_of(value) + value)
        except OSError as error:
            with self._telling:
                if self.is_writable:
                    self.is_writable = False
                    self._unwritable(error.strerror or str(error))

    def _file(self, key: bytes) -> Path:
        name = key.hex()
        return self.directory / name[:2] / name  # Finder and others are slow with many files in one folder
