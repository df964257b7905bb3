"""Clips taken out of longer recordings, and out of data sets that hold audio themselves; each becomes a FLAC."""

from __future__ import annotations

import contextlib
import hashlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import soundfile

from whisper_tuner.data.audio import REFUSED, SAMPLE_RATE, load_audio, mono, opened, parts
from whisper_tuner.data.audio_check import SHORTEST_S
from whisper_tuner.data.formats.rows import ID_COLUMNS, AudioNames, BadRow, Cells, Part, Row, cell
from whisper_tuner.data.formats.times import DIFFERENT_S, NO_TIME, OVERHANG_S, TIME_COLUMNS, is_whole, span_of
from whisper_tuner.errors import TunerError
from whisper_tuner.files import atomic_path
from whisper_tuner.problems import Kind

STEM_LETTERS = 60


class Recording:
    """A long file, of which spans are read without decoding the rest where libsndfile can."""

    def __init__(self, path: Path):
        """Raises DataError, MissingProgram."""
        self._path, self._held = path, contextlib.ExitStack()
        self._file = self._held.enter_context(opened(path))
        self.seconds = self._file.frames / self._file.samplerate

    def span(self, start: float, seconds: float) -> np.ndarray:
        """Mono float32 [n] at SAMPLE_RATE. Raises DataError, or one of REFUSED."""
        self._file.seek(min(round(start * self._file.samplerate), self._file.frames))
        return np.concatenate([*mono(parts(self._file, seconds, self._path))])

    def close(self) -> None:
        self._held.close()


class Cutter:
    """Gives the rows of a part with a file of its own for each clip, below `folder`. Those that are there stay."""

    def __init__(self, part: Part, folder: Path, max_duration_s: float):
        self._part, self._folder, self._max_duration_s = part, folder, max_duration_s
        self._names = AudioNames((part.folder, *part.beside), part.bounds)
        self._open: tuple[Path, Recording] | None = None
        self._refused: dict[Path, str] = {}
        self.written = self.kept = 0

    def rows(self) -> Iterator[Row]:
        try:
            for row in self._part.rows():
                cells = row.cells
                try:
                    row = row if isinstance(cells, BadRow) else self._own(row, cells)
                except BadRow as reason:
                    row = row._replace(cells=reason)
                yield row
        finally:
            self._close()

    def _own(self, row: Row, cells: Cells) -> Row:
        """Put a file of its own in the place of a part of a recording, or of audio inside of the data set."""
        audio = self._part.reading.audio_names
        held = next((cells[name] for name in audio if cells.get(name)), None)
        start, seconds = span_of(cells)
        if isinstance(held, dict) and held.get("bytes"):
            clip = self._from_bytes(cells, held, None if start is None else seconds)
            usual_id = clip.stem
        elif start is None:
            return row
        else:
            if not (name := cell(cells, audio)):
                raise BadRow(Kind.NO_AUDIO, "no audio path")
            path = self._names.find(name)
            clip = self._from_recording(path, start, seconds)
            usual_id = name if clip == path else f"{name}-{round(start * 1000):08d}"
        rest = {name: value for name, value in cells.items() if name not in TIME_COLUMNS and name not in audio}
        return row._replace(cells={**rest, audio[0]: str(clip.absolute())}, usual_id=usual_id)

    def _from_bytes(self, cells: Cells, held: dict, stated: float | None) -> Path:
        """stated: how long its row says that the part of a recording is."""
        data = held["bytes"]
        stem = Path(str(held.get("path") or cell(cells, ID_COLUMNS) or "clip")).stem
        clip = _flac(self._folder, stem, hashlib.blake2b(data, digest_size=6).hexdigest())
        if self._there(clip):
            return clip
        try:
            samples = _decoded(data, Path(str(held.get("path") or "")).suffix, self._max_duration_s + 1)
        except TunerError as error:
            raise BadRow(Kind.UNREADABLE, f"its audio cannot be read: {_one_line(error)}") from None
        seconds = len(samples) / SAMPLE_RATE
        self._check_length(stem, seconds)
        if stated is not None and abs(stated - seconds) > DIFFERENT_S:
            what = f"its audio lasts {seconds:.2f} s, but its row names a part of {stated:g} s"
            raise BadRow(Kind.DURATION, what)
        return self._write(clip, samples)

    def _from_recording(self, path: Path, start: float, seconds: float | None) -> Path:
        if not path.is_file():
            raise BadRow(Kind.NO_AUDIO, f"no such audio file: {path}")
        if seconds is None:
            what = "its row says where its clip begins, but neither its end nor its duration"
            raise BadRow(Kind.DURATION, f"{what}; {NO_TIME}")
        if not (start >= 0 and seconds >= SHORTEST_S):
            raise BadRow(Kind.DURATION, f"a clip that begins at {start:g} s and lasts {seconds:g} s")
        self._check_length(path.name, seconds)
        clip = flac_of(self._folder, path, start, seconds)
        if self._there(clip):
            return clip
        recording = self._recording(path)
        if start and is_whole(start, seconds, recording.seconds):
            return path
        if start + max(seconds - OVERHANG_S, SHORTEST_S) > recording.seconds:
            ends = f"{path.name} ends at {recording.seconds:.2f} s"
            raise BadRow(Kind.TRUNCATED, f"its clip ends at {start + seconds:.2f} s, but {ends}")
        try:
            return self._write(clip, recording.span(start, seconds))
        except (TunerError, *REFUSED) as error:
            raise BadRow(Kind.UNREADABLE, f"{path.name} cannot be read: {_one_line(error)}") from None

    def _check_length(self, name: str, seconds: float) -> None:
        if seconds > self._max_duration_s:
            raise BadRow(Kind.TOO_LONG, f"a part of {name} lasts {seconds:.1f} s, more than {self._max_duration_s:g} s")

    def _recording(self, path: Path) -> Recording:
        if self._open and self._open[0] == path:
            return self._open[1]
        self._close()
        if path not in self._refused:
            try:
                self._open = path, Recording(path)
                return self._open[1]
            except (TunerError, OSError) as error:
                self._refused[path] = f"{path.name} cannot be read: {_one_line(error)}"
        raise BadRow(Kind.UNREADABLE, self._refused[path])

    def _close(self) -> None:
        if self._open:
            self._open[1].close()
        self._open = None

    def _there(self, clip: Path) -> bool:
        there = clip.is_file()
        self.kept += there
        return there

    def _write(self, clip: Path, samples: np.ndarray) -> Path:
        write_flac(clip, samples)
        self.written += 1
        return clip


def flac_of(folder: Path, recording: Path, start: float, seconds: float) -> Path:
    """Name the file of a part of a recording: another name once the recording is another one."""
    stat = recording.stat()
    source = f"{recording.absolute()} {stat.st_size} {stat.st_mtime_ns}".encode()
    at = f"{round(start * 1000):08d}-{round(seconds * 1000):05d}"
    return _flac(folder, f"{recording.stem[:STEM_LETTERS]}-{at}", hashlib.blake2b(source, digest_size=4).hexdigest())


def _flac(folder: Path, stem: str, digest: str) -> Path:
    safe = re.sub(r"[^\w.-]+", "_", stem)[: STEM_LETTERS + 16].strip(".") or "clip"
    return folder / f"{safe}-{digest}.flac"


def write_flac(clip: Path, samples: np.ndarray) -> None:
    """samples: mono float32 [n] at SAMPLE_RATE."""
    clip.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(clip, durable=False) as part:
        soundfile.write(part, np.clip(samples, -1, 1), SAMPLE_RATE, format="FLAC", subtype="PCM_16")


def _decoded(data: bytes, suffix: str, longest_s: float) -> np.ndarray:
    """Mono float32 [n] at SAMPLE_RATE. Raises DataError, MissingProgram, without a path."""
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(data)
        file.flush()
        try:
            return load_audio(Path(file.name), longest_s=longest_s)
        except TunerError as error:
            told = error.args[0].removeprefix(f"{file.name} ").replace(file.name, "it")  # a name that nobody knows
            error.args = (told,)
            raise


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
