"""What a WAV states of its length. A program that writes into a pipe does not know it, and puts a placeholder."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import BinaryIO

import soundfile

# What programs write in place of a length, among them Python scripts (2,000,000,000), SoX (0x7FFFF000), and ffmpeg (the
# last); less a header, or rounded to whole frames.
PLACEHOLDERS = (2_000_000_000, 0x7FFFF000, 0x80000000, 0xFFFFFFFF)
NEAR = 256
MOST = 0xFFFFFFFF  # bytes


def data_chunk(file: BinaryIO) -> tuple[int, int] | None:
    """(where the samples begin, their bytes as stated) in a WAV; None in what is none."""
    file.seek(0)
    riff = file.read(12)
    if riff[:4] != b"RIFF" or riff[8:] != b"WAVE":
        return None
    while len(chunk := file.read(8)) == 8:
        length = struct.unpack("<I", chunk[4:])[0]
        if chunk[:4] == b"data":
            return file.tell(), length
        file.seek(length + length % 2, 1)
    return None


def is_placeholder(stated: int) -> bool:
    return any(abs(stated - value) <= NEAR for value in PLACEHOLDERS)


def is_cut(path: Path) -> bool:
    """Tell if a WAV ends before its header says, which libsndfile does not report."""
    with path.open("rb") as file:
        begin, stated = data_chunk(file) or (0, 0)
        return not is_placeholder(stated) and begin + stated > file.seek(0, io.SEEK_END)


def streamed(path: Path) -> soundfile.SoundFile | None:
    """Open a WAV that states a length of 0 and has samples, as if it stated its own; None for any other file.

    libsndfile reads other placeholders to the end of the file by itself. Raises as SoundFile does, and ValueError for a
    file of more bytes than it would read.
    """
    try:
        file = path.open("rb")
    except OSError:
        return None  # told by whoever opens it next
    with file:
        begin, stated = data_chunk(file) or (0, 1)
        if file.seek(0, io.SEEK_END) > MOST and (is_placeholder(stated) or not stated):
            raise ValueError("its header does not say how long it is")
        if stated or _has_chunks(file, begin):
            return None
    return _Streamed(path, begin)


def _has_chunks(file: BinaryIO, at: int) -> bool:
    """Tell if nothing but whole chunks, or nothing at all, stands between a place and the end."""
    end = file.seek(0, io.SEEK_END)
    while at + 8 <= end:
        file.seek(at)
        name, length = struct.unpack("<4sI", file.read(8))
        if not name.strip().isalnum():
            return False
        at += 8 + length + length % 2
    return at in (end, end + 1)


class _Streamed(soundfile.SoundFile):
    """Closes the file that it reads."""

    def __init__(self, path: Path, begin: int):
        self._stated = _Stated(path, begin)
        super().__init__(self._stated)

    def close(self) -> None:
        super().close()
        self._stated.close()


class _Stated(io.FileIO):
    """Puts the length of the samples into the header as it is read."""

    def __init__(self, path: Path, begin: int):
        super().__init__(path)
        self._field = begin - 4
        self._length = struct.pack("<I", path.stat().st_size - begin)

    def readinto(self, buffer) -> int:
        at = self.tell()
        count = super().readinto(buffer) or 0
        for place, byte in enumerate(self._length, self._field - at):
            if 0 <= place < count:
                buffer[place : place + 1] = bytes([byte])
        return count
