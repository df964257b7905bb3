"""What a WAV states of its length. A program that writes into a pipe does not know it, and puts a placeholder."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import BinaryIO

# Besides 0. Less a header, or rounded to whole frames. SoX writes the second, ffmpeg the last.
PLACEHOLDERS = (2_000_000_000, 0x7FFFF000, 0x80000000, 0xFFFFFFFF)
NEAR = 256


def is_cut(path: Path) -> bool:
    """Tell if a WAV ends before its header says. libsndfile does not report it, and reads to the end."""
    with path.open("rb") as file:
        begin, stated = _data_chunk(file)
    return begin + stated > path.stat().st_size and all(abs(stated - value) > NEAR for value in PLACEHOLDERS)


def _data_chunk(file: BinaryIO) -> tuple[int, int]:
    """(where the samples begin, their bytes as stated) in a WAV; zeros in what is none."""
    riff = file.read(12)
    while riff[:4] == b"RIFF" and riff[8:] == b"WAVE" and len(chunk := file.read(8)) == 8:
        length = struct.unpack("<I", chunk[4:])[0]
        if chunk[:4] == b"data":
            return file.tell(), length
        file.seek(length + length % 2, 1)
    return 0, 0


class Stated(io.FileIO):
    """A WAV that states a length of 0, read as if it stated that of what follows."""

    def __init__(self, path: Path):
        super().__init__(path)
        begin, _ = _data_chunk(self)
        name, length = struct.unpack("<4sI", self.read(8).ljust(8, b"\0"))
        rest = self.seek(0, io.SEEK_END) - begin
        is_empty = name.strip().isalnum() and 8 + length <= rest + 1  # another chunk follows
        self._field, self._length = begin - 4, struct.pack("<I", 0 if is_empty else rest)
        self.seek(0)

    def readinto(self, buffer) -> int:
        at, count = self.tell(), super().readinto(buffer) or 0
        for place, byte in enumerate(self._length, self._field - at):
            if 0 <= place < count:
                buffer[place : place + 1] = bytes([byte])
        return count

    def __del__(self) -> None:
        self.close()  # soundfile does not
