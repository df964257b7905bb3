"""The log-mels of audio files, computed once and kept on disk."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import soxr
import torch
from transformers import WhisperFeatureExtractor

from whisper_tuner.data.audio import CLIP_S, load_audio
from whisper_tuner.data.features import log_mel
from whisper_tuner.data.kept_values import KeptValues
from whisper_tuner.errors import TunerError
from whisper_tuner.files import content_hash, hash_of

FORMAT = 2  # raise it when decoding, resampling or the layout of a value changes: old entries are then ignored
STORED = np.dtype("<f2")
SETTLED_NS = 3_000_000_000  # a file may be changed again within a tick of its time stamp, which is 2 s on FAT
SLOWEST, FASTEST = 0.1, 10.0
REPORT_S = 1.0  # between two calls of `progress`, and to a stop

Progress = Callable[[int, int], None]
"""Called with (clips done, clips in all)."""


class FeatureStore:
    """Keeps log-mels under the hash of the audio's content, the extractor's settings and the speed.

    The content is hashed when a file of this path, size and time is seen for the first time. Values are always rounded
    to fp16, so that they do not depend on whether they were stored. Threads and processes may share a store. It keeps
    all that it was ever given, about 16 kB for a second of audio (80 bands), until `runs clean --cache`.
    warn: told once, if nothing can be written; log-mels are then computed each time.
    """

    def __init__(
        self,
        directory: str | Path,
        extractor: WhisperFeatureExtractor,
        *,
        warn: Callable[[str], None] = lambda what: None,
    ):
        self.directory, self.extractor = Path(directory), extractor
        what = f"log-mels cannot be kept in {self.directory}"
        slower = "they are computed each time, which is slower"
        self._kept = KeptValues(self.directory, lambda reason: warn(f"{what}: {reason}; {slower}"))
        self._settings = hash_of(json.dumps([FORMAT, extractor.to_dict()], sort_keys=True).encode())

    def log_mel(self, path: str | Path, speed: float = 1.0) -> np.ndarray:
        """Return the log-mel of an audio file played `speed` times as fast, float32 [80|128, frames].

        Raises DataError or MissingProgram.
        """
        audio = _Audio.of(path)
        key = self._key(audio, speed)
        value = self._kept.get(key)
        if value is None:
            value = self._compute(audio, speed, key)
        return np.frombuffer(value, STORED).reshape(self.extractor.feature_size, -1).astype(np.float32)

    def prepare(
        self,
        paths: Iterable[str | Path],
        progress: Progress = lambda done, total: None,
        *,
        speeds: Sequence[float] = (1.0,),
        threads: int | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Compute what is not stored yet, in the order of `paths`, on all cores or so many threads.

        progress is called once a second. It ends soon after stopped() is true. Of files that cannot be read it says
        nothing: log_mel does.
        """
        todo = deque((path, speed) for path in paths for speed in speeds)
        total, threads, before = len(todo), threads or os.cpu_count() or 1, torch.get_num_threads()
        # Threads in which torch computes alone: its own helpers wait busily, which is many times slower.
        pool = ThreadPoolExecutor(threads, "log-mels", initializer=torch.set_num_threads, initargs=(1,))
        try:
            with pool:
                running = {pool.submit(self._work_off, todo) for _ in range(min(threads, total))}
                try:
                    while running and not stopped():
                        ended, running = wait(running, REPORT_S)
                        for one in ended:
                            one.result()
                        progress(total - len(todo), total)
                finally:
                    todo.clear()
        finally:
            torch.set_num_threads(before)  # for threads that begin later

    def _work_off(self, todo: deque[tuple[str | Path, float]]) -> None:
        while self._kept.is_writable:
            try:
                path, speed = todo.popleft()
            except IndexError:
                return
            with contextlib.suppress(TunerError, OSError):
                audio = _Audio.of(path)
                key = self._key(audio, speed)
                if key not in self._kept:
                    self._compute(audio, speed, key)

    def _key(self, audio: _Audio, speed: float) -> bytes:
        content = self._kept.get(audio.key)
        if content is None:
            content = audio.hash_content()
            if audio.is_settled and audio == _Audio.of(audio.path):
                self._kept.put(audio.key, content)
        return hash_of(self._settings + content + float(speed).hex().encode())

    def _compute(self, audio: _Audio, speed: float, key: bytes) -> bytes:
        waveform = load_audio(audio.path, self.extractor.sampling_rate, CLIP_S * max(1.0, speed))
        if not SLOWEST <= speed <= FASTEST:  # soxr would go on for ever with some numbers
            raise ValueError(f"a speed of {speed}")
        if speed != 1:  # about n / speed samples: faster and higher, as a tape would be
            waveform = soxr.resample(waveform, speed, 1.0, quality="HQ")
        value = log_mel(waveform, self.extractor).astype(STORED).tobytes()
        is_unchanged = self._kept.is_writable and self._key(_Audio.of(audio.path), speed) == key
        if is_unchanged:
            self._kept.put(key, value)
        return value


@dataclass(frozen=True)
class _Audio:
    """A file as it was when it was looked at."""

    path: Path
    size: int
    changed_ns: int
    is_settled: bool = field(compare=False)  # another change will have another time

    @classmethod
    def of(cls, path: str | Path) -> _Audio:
        try:
            found = Path(path).stat()
        except OSError:
            load_audio(path)  # raises the error that names the file and what to do
            raise
        changed = found.st_mtime_ns
        return cls(Path(path), found.st_size, changed, abs(time.time_ns() - changed) > SETTLED_NS)

    @property
    def key(self) -> bytes:
        return hash_of(f"{self.size} {self.changed_ns} ".encode() + os.fsencode(self.path.absolute()))

    def hash_content(self) -> bytes:
        try:
            return content_hash(self.path)
        except OSError:
            load_audio(self.path)  # as above
            raise
