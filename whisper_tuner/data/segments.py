"""Values on disk under keys of 16 bytes, in a few files that several processes read and write at once.

    NAME.data    values, one after the other
    NAME.index   for each value a record of fixed length: its key, hash and place, and a checksum of all this

Values are only ever appended, by the one process that has locked the segment; others write to another segment
meanwhile. Nothing is flushed to the disk: what a power cut or a killed process leaves fails its hash.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import BinaryIO, NamedTuple

from whisper_tuner.files import private

KEY_BYTES = 16
NAME = "[0-9a-f]*"  # of a segment; macOS puts files of its own, such as ._NAME.data, on some drives
FULL_BYTES = 2 << 30  # of a segment; some file systems have no files of 4 GiB
_CHECKED = Struct("<16s16sQQ")  # key, hash of the value, its offset and size
_RECORD = Struct("<48s8s")  # these, and a hash of them


class _Place(NamedTuple):
    segment: str
    record: int  # where it begins in the index
    digest: bytes
    offset: int
    size: int


class Segments:
    """A mapping from keys to values. Threads may share it.

    A value is compared with its hash when this process reads it for the first time. Whatever is damaged is not there.
    unwritable: told the reason once, if nothing can be written, as on a full disk; `is_writable` is False from then on.
    """

    def __init__(self, directory: Path, unwritable: Callable[[str], None] = lambda reason: None):
        self.directory, self._unwritable = directory, unwritable
        self.is_writable = True
        self._places: dict[bytes, _Place] = {}
        self._intact: set[_Place] = set()  # whose values were compared
        self._known: dict[str, int] = {}  # bytes of each index that are read
        self._own: Path | None = None  # segment's data
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return self._find(key) is not None

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            place = self._find(key)
        if place is None:
            return None
        value = b""  # fewer bytes than there should be if the file is damaged, or gone
        with contextlib.suppress(OSError), (self.directory / f"{place.segment}.data").open("rb", buffering=0) as data:
            value = os.pread(data.fileno(), place.size, place.offset)
        if len(value) == place.size and (place in self._intact or hash_of(value) == place.digest):
            self._intact.add(place)
            return value
        self._forget(key, place)
        return None

    def put(self, key: bytes, value: bytes) -> None:
        """Keep a value, unless another process has done so, or others hold all segments just now."""
        with self._lock:
            if not self.is_writable or self._find(key) is not None:
                return
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                with self._locked_segment() as data:
                    path = Path(data.name).with_suffix(".index")
                    path.touch(mode=0o600)
                    with path.open("r+b", buffering=0) as index:  # to write to at any place
                        self._places[key] = _append(data, index, key, value)
            except BlockingIOError:
                pass  # another process was so quick as to lock the segment that this one had made
            except OSError as error:
                self.is_writable = False
                self._unwritable(error.strerror or str(error))

    def _find(self, key: bytes) -> _Place | None:
        if key not in self._places:  # it may have been added since the last time, by whatever process
            for path in sorted(self.directory.glob(f"{NAME}.index")):
                with contextlib.suppress(OSError):
                    if path.stat().st_size >= self._known.get(path.stem, 0) + _RECORD.size:
                        self._read_index(path)
        return self._places.get(key)

    def _read_index(self, path: Path) -> None:
        begin = self._known.get(path.stem, 0)
        with path.open("rb") as file:
            file.seek(begin)
            raw = file.read()
        end = _whole(len(raw))
        for at, (checked, checksum) in enumerate(_RECORD.iter_unpack(raw[:end])):
            if hash_of(checked)[:8] == checksum:
                key, digest, offset, size = _CHECKED.unpack(checked)
                self._places[key] = _Place(path.stem, begin + at * _RECORD.size, digest, offset, size)
        self._known[path.stem] = begin + end

    def _forget(self, key: bytes, place: _Place) -> None:
        """Remove a value from the index too: whoever reads that next should not come upon the damage again."""
        with self._lock:
            if self._places.get(key) == place:
                del self._places[key]
            self._intact.discard(place)
        index = self.directory / f"{place.segment}.index"
        with contextlib.suppress(OSError), index.open("r+b", buffering=0) as file:
            _write(file, place.record, bytes(_RECORD.size))

    def _locked_segment(self) -> BinaryIO:
        """Open the data of the first one that has room and that no other process writes to, or of a new one.

        Waits for nobody: whoever has a lock may be frozen.
        """
        for path in sorted(self.directory.glob(f"{NAME}.data")):
            with contextlib.suppress(OSError):
                if path.stat().st_size < FULL_BYTES:
                    return _locked(path.open("r+b", buffering=0), is_own=path == self._own)
        self._own = self.directory / f"{secrets.token_hex(8)}.data"
        return _locked(open(self._own, "xb", buffering=0, opener=private), is_own=True)


def _locked(file: BinaryIO, *, is_own: bool) -> BinaryIO:
    """Lock a file. is_own: this process has made it, and may use it also where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if not is_own or isinstance(error, BlockingIOError):
            file.close()
            raise
    return file


def hash_of(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=KEY_BYTES).digest()


def _append(data: BinaryIO, index: BinaryIO, key: bytes, value: bytes) -> _Place:
    """Write a value and its record, over half a record that a killed process may have left at the end of the index."""
    offset, record = data.seek(0, os.SEEK_END), _whole(index.seek(0, os.SEEK_END))
    place = _Place(Path(data.name).stem, record, hash_of(value), offset, len(value))
    try:
        _write(data, offset, value)
        checked = _CHECKED.pack(key, place.digest, place.offset, place.size)
        _write(index, record, _RECORD.pack(checked, hash_of(checked)[:8]))
    except OSError:
        for file, size in ((index, record), (data, offset)):
            with contextlib.suppress(OSError):
                file.truncate(size)
        raise
    return place


def _whole(size: int) -> int:
    return size - size % _RECORD.size


def _write(file: BinaryIO, begin: int, value: bytes) -> None:
    file.seek(begin)
    rest = memoryview(value)
    while rest:
        rest = rest[file.write(rest) :]
