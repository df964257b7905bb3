"""Checks whether audio files can be read, and how long they are, without decoding them whole.

Results are kept by path, size and modification time, so checking ten thousand clips again takes a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import struct
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import soundfile

from whisper_tuner.data.audio import REFUSED, duration, open_sound
from whisper_tuner.data.problems import Kind
from whisper_tuner.errors import TunerError
from whisper_tuner.files import download_remedy, is_evicted, write_atomically
from whisper_tuner.json_text import parse_json

FORMAT = 1  # raise it when a check is added: results of older versions are then ignored
SHORTEST_S = 0.02  # less than one window of the log-mel
EDGE_FRAMES = 1600  # a tenth of a second at 16 kHz, decoded at the beginning and at the end
_THREADS = 8
_STREAMED = (0, 0x7FFFF000, 0x7FFFFFFF, 0xFFFFFFFF)  # lengths in a WAV header that mean "not known when it was written"


@dataclass(frozen=True)
class Header:
    """`kind` is empty for a file without a problem; `digest` is of its content, where that was asked for.

    Raises ValueError for values that no file can have.
    """

    size: int
    changed: int  # ns
    seconds: float = 0.0
    kind: str = ""
    what: str = ""
    digest: str = ""

    def __post_init__(self) -> None:
        numbers, texts = (self.size, self.changed, self.seconds), (self.kind, self.what, self.digest)
        if not all(isinstance(number, int | float) for number in numbers) or not 0 <= self.seconds < math.inf:
            raise ValueError("no size, time or length of a file")
        if not all(isinstance(text, str) for text in texts) or self.kind not in ("" if self.seconds else None, *Kind):
            raise ValueError("no kind of problem")


class Stopped(Exception):
    """The caller has asked to stop."""


class AudioIndex:
    """Headers of audio files, kept in a JSON file if one is given. If that is lost or damaged, it is made again.

    Once `stop` is set, opening files raises Stopped.
    """

    def __init__(self, file: Path | None = None, stop: threading.Event | None = None):
        self._file, self._stop = file, stop or threading.Event()
        self._known = _load(file) if file else {}
        self._fresh: dict[str, Header] = {}

    def fill(self, paths: Iterable[Path]) -> None:
        """Read the headers of all these files, several at once."""
        named = {str(path): path for path in paths}
        with ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="headers") as pool:
            try:
                self._fresh.update(zip(named, pool.map(self._look, named.values()), strict=True))
            except BaseException:  # Stopped, or Ctrl-C
                self._fresh = self._known | self._fresh
                raise

    def __getitem__(self, path: Path) -> Header:
        if str(path) not in self._fresh:
            self._fresh[str(path)] = self._look(path)
        return self._fresh[str(path)]

    def twins(self, paths: Iterable[Path]) -> dict[Path, Path]:
        """Each file that has the content of an earlier one -> that one. Only files of equal size are read."""
        sizes: dict[int, list[Path]] = {}
        for path in paths:
            sizes.setdefault(self[path].size, []).append(path)
        alike = [path for group in sizes.values() if len(group) > 1 for path in group]
        with ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="digests") as pool:
            list(pool.map(self._digest, [path for path in alike if not self[path].digest]))
        first: dict[str, Path] = {}
        return {path: same for path in alike if (same := first.setdefault(self[path].digest, path)) != path}

    def save(self) -> None:
        if self._file and self._fresh and self._fresh != self._known:
            files = {path: astuple(header) for path, header in self._fresh.items()}
            with contextlib.suppress(OSError):  # no permission, disk full: the headers are read again next time
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._file, json.dumps({"format": FORMAT, "files": files}), durable=False)

    def _look(self, path: Path) -> Header:
        """What is known of a file, if it is as it was then; else it is opened."""
        try:
            stat, known = path.stat(), self._known.get(str(path))
            if is_evicted(stat):
                what = f"{path} is in iCloud only. {download_remedy(path.parent)}"
                return Header(0, 0, kind=Kind.EVICTED, what=what)
            if known and (known.size, known.changed) == (stat.st_size, stat.st_mtime_ns):
                return known
            if self._stop.is_set():
                raise Stopped
            return Header(stat.st_size, stat.st_mtime_ns, *examine(path))
        except FileNotFoundError:  # it may also go away meanwhile
            return Header(0, 0, kind=Kind.NO_AUDIO, what=f"no such audio file: {path}")
        except (OSError, ValueError) as error:  # ValueError: a NUL in its name
            reason = getattr(error, "strerror", None) or error
            return Header(0, 0, kind=Kind.NO_AUDIO, what=f"{str(path)[:200]} cannot be opened: {reason}")

    def _digest(self, path: Path) -> None:
        if self._stop.is_set():
            raise Stopped
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        except OSError:
            digest = str(path)
        self._fresh[str(path)] = replace(self[path], digest=digest)


def examine(path: Path) -> tuple[float, str, str]:
    """(seconds, kind, what): its length, or what is wrong with it. Decodes the first and last tenth of a second."""
    if path.stat().st_size == 0:
        return 0.0, Kind.EMPTY_AUDIO, f"{path} is an empty file"
    try:
        file = open_sound(path)
    except (*REFUSED, OSError, TunerError):
        return _examine_slowly(path)
    with file:
        seconds = file.frames / file.samplerate
        if seconds < SHORTEST_S:
            return seconds, Kind.EMPTY_AUDIO, f"{path} holds {seconds:g} s of audio"
        if not _edges_decode(file, path) or _cut_wav(path):
            return seconds, Kind.TRUNCATED, f"{path} ends before its header says, or is damaged; copy it again"
    return seconds, "", ""


def _edges_decode(file: soundfile.SoundFile, path: Path) -> bool:
    expected = min(EDGE_FRAMES, file.frames)
    try:
        begins = len(file.read(EDGE_FRAMES)) == expected
        if file.format == "MP3" and not _says_its_length(path):
            return begins  # its length is a guess from the file's size, so its end cannot be checked
        file.seek(file.frames - expected)
        return begins and len(file.read(EDGE_FRAMES)) == expected
    except soundfile.LibsndfileError:
        return False


def _says_its_length(mp3: Path) -> bool:
    """Whether an MP3's first frame, behind an ID3 tag, has a Xing, Info or VBRI header."""
    with mp3.open("rb") as file:
        head = file.read(10)
        tag = sum((byte & 127) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=False))
        file.seek(10 + tag if head[:3] == b"ID3" else 0)
        first = file.read(1024)
    return any(mark in first for mark in (b"Xing", b"Info", b"VBRI"))


def _examine_slowly(path: Path) -> tuple[float, str, str]:
    """For files that libsndfile refuses: damaged ones, and formats that need another program."""
    try:
        seconds = duration(path)
    except (TunerError, OSError) as error:
        return 0.0, Kind.UNREADABLE, " - ".join(str(error).split("\n  "))
    return (seconds, "", "") if seconds >= SHORTEST_S else (seconds, Kind.EMPTY_AUDIO, f"{path} holds no audio")


def _cut_wav(path: Path) -> bool:
    """Whether a WAV's data chunk is longer than the file, which libsndfile does not report."""
    end = path.stat().st_size
    with path.open("rb") as file:
        riff = file.read(12)
        if riff[:4] != b"RIFF" or riff[8:] != b"WAVE":
            return False
        while len(chunk := file.read(8)) == 8:
            name, length = chunk[:4], struct.unpack("<I", chunk[4:])[0]
            if name == b"data":
                return length not in _STREAMED and file.tell() + length > end
            file.seek(length + length % 2, 1)
    return False


def _load(file: Path) -> dict[str, Header]:
    try:
        stored = parse_json(file.read_text(encoding="utf-8"))
        if stored["format"] != FORMAT:
            return {}
        return {path: Header(*values) for path, values in stored["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
