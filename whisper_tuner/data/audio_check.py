"""Checks whether audio files can be read, and how long they are, without decoding them whole.

Results are kept by path, size and modification time, so checking ten thousand clips again takes a second.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import soundfile

from whisper_tuner.data.audio import REFUSED, duration, open_sound
from whisper_tuner.data.wav_header import is_cut
from whisper_tuner.errors import TunerError
from whisper_tuner.fact_store import FactStore, file_stamp
from whisper_tuner.files import content_hash, download_remedy, is_evicted
from whisper_tuner.problems import Kind

FACT = "header 2"  # raise its number when a check is added or mended: results of older versions are then ignored
SHORTEST_S = 0.02  # less than one window of the log-mel
EDGE_FRAMES = 1600  # a tenth of a second at 16 kHz, decoded at the beginning and at the end
_THREADS = 8


@dataclass(frozen=True)
class Header:
    """Describes an audio file. stamp: "" if there is no such file; kind: "" for a file without a problem.

    digest: the hash of its content, where that was asked for.
    """

    size: int = 0
    stamp: str = ""
    seconds: float = 0.0
    kind: str = ""
    what: str = ""
    digest: str = ""


class Stopped(Exception):
    """The caller has asked to stop."""


class AudioIndex:
    """The headers of audio files. Those that were read before are taken from a store, if one is given.

    Once `stop` is set, opening files raises Stopped.
    """

    def __init__(self, store: FactStore | None = None, stop: threading.Event | None = None):
        self._store, self._stop = store, stop or threading.Event()
        self._headers: dict[str, Header] = {}
        self._unsaved: set[str] = set()

    def fill(self, paths: Iterable[Path]) -> None:
        """Read the headers of all these files, several at once."""
        named = {str(path.absolute()): path for path in paths}
        with ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="headers") as pool:
            found = dict(zip(named, pool.map(_present, named.values()), strict=True))
            stamps = {name: header.stamp for name, header in found.items() if header.stamp}
            known = self._store.known(FACT, stamps) if self._store else {}
            unread = [name for name in stamps if name not in known]
            for name in found.keys() - unread:
                header = found[name]
                self._headers[name] = Header(header.size, header.stamp, *known[name]) if name in known else header
            read = pool.map(self._read, [named[name] for name in unread], [found[name] for name in unread])
            for name, header in zip(unread, read, strict=True):
                self._headers[name] = header
                self._unsaved.add(name)

    def __getitem__(self, path: Path) -> Header:
        if (name := str(path.absolute())) not in self._headers:
            self.fill([path])
        return self._headers[name]

    def twins(self, paths: Iterable[Path]) -> dict[Path, Path]:
        """Map each file that has the content of an earlier one to that one. Only files of equal size are read."""
        sizes: dict[int, list[Path]] = {}
        for path in paths:
            sizes.setdefault(self[path].size, []).append(path)
        alike = [path for group in sizes.values() if len(group) > 1 for path in group]
        with ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="digests") as pool:
            list(pool.map(self._digest, [path for path in alike if not self[path].digest]))
        first: dict[str, Path] = {}
        return {path: same for path in alike if (same := first.setdefault(self[path].digest, path)) != path}

    def save(self) -> None:
        headers = {name: self._headers[name] for name in self._unsaved if self._headers[name].stamp}
        if self._store:
            values = {name: [one.seconds, one.kind, one.what, one.digest] for name, one in headers.items()}
            self._store.keep(FACT, {name: one.stamp for name, one in headers.items()}, values)
        self._unsaved.clear()

    def _read(self, path: Path, header: Header) -> Header:
        if self._stop.is_set():
            raise Stopped
        try:
            return Header(header.size, header.stamp, *examine(path))
        except (OSError, ValueError) as error:  # it may also go away meanwhile
            return _not_there(path, error)

    def _digest(self, path: Path) -> None:
        if self._stop.is_set():
            raise Stopped
        try:
            digest = content_hash(path).hex()
        except OSError:
            digest = str(path)
        name = str(path.absolute())
        self._headers[name] = replace(self[path], digest=digest)
        self._unsaved.add(name)


def _present(path: Path) -> Header:
    """Return size and stamp of a file that can be read, or what is wrong with it."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        return _not_there(path, error)
    if is_evicted(found):
        return Header(kind=Kind.EVICTED, what=f"{path} is in iCloud only. {download_remedy(path.parent)}")
    return Header(found.st_size, file_stamp(found))


def _not_there(path: Path, error: Exception) -> Header:
    reason = getattr(error, "strerror", None) or error
    is_gone = isinstance(error, FileNotFoundError)
    what = f"no such audio file: {path}" if is_gone else f"{str(path)[:200]} cannot be opened: {reason}"
    return Header(kind=Kind.NO_AUDIO, what=what)


def examine(path: Path) -> tuple[float, str, str]:
    """Return (seconds, kind, what): its length, or what is wrong. Decodes the first and last tenth of a second."""
    if path.stat().st_size == 0:
        return 0.0, Kind.EMPTY_AUDIO, f"{path} is an empty file"
    try:
        file = open_sound(path)
    except (*REFUSED, OSError, TunerError):  # damaged, or of a format that needs another program
        try:
            seconds = duration(path)
        except (TunerError, OSError) as error:
            return 0.0, Kind.UNREADABLE, " - ".join(str(error).split("\n  "))
        return (seconds, "", "") if seconds >= SHORTEST_S else (seconds, Kind.EMPTY_AUDIO, f"{path} holds no audio")
    with file:
        seconds = file.frames / file.samplerate
        if seconds < SHORTEST_S:
            return seconds, Kind.EMPTY_AUDIO, f"{path} holds {seconds:g} s of audio"
        if not _edges_decode(file, path) or is_cut(path):
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
    """Tell if an MP3's first frame, behind an ID3 tag, has a Xing, Info or VBRI header."""
    with mp3.open("rb") as file:
        head = file.read(10)
        tag = sum((byte & 127) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=False))
        file.seek(10 + tag if head[:3] == b"ID3" else 0)
        first = file.read(1024)
    return any(mark in first for mark in (b"Xing", b"Info", b"VBRI"))
