"""Waveforms -> Whisper's log-mel features at their real length, cached on disk.

The feature extractor pads every clip to 30 s before it looks at it. Here only the frames that touch the speech are
computed and kept; `pad_log_mel` appends the constant frames that padding the audio would have given.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from pathlib import Path

import numpy as np
import soxr
from transformers import WhisperFeatureExtractor

from whisper_tuner.data.audio import load_audio
from whisper_tuner.files import DISK

FORMAT = 1  # raise it when decoding, resampling or the file layout changes: old entries are then ignored
_DIGEST_BYTES = 16
_LOG_FLOOR = -10.0  # log10 of the extractor's smallest power, 1e-10
_DYNAMIC_RANGE = 8.0  # the extractor lifts everything to at most this far below the loudest value


def log_mel(waveform: np.ndarray, extractor: WhisperFeatureExtractor) -> np.ndarray:
    """float32 [80|128, frames] of a waveform [n], cut at the extractor's full length (30 s as a rule).

    `frames` counts each STFT window that touches the waveform: about n / hop_length + 1.
    """
    hop, half_window = extractor.hop_length, extractor.n_fft // 2
    frames = (len(waveform) + half_window - 1) // hop + 1
    padded_length = hop * frames + extractor.n_fft
    if padded_length >= extractor.n_samples:
        return extracted(waveform, extractor, padding="max_length")[:, : min(frames, extractor.nb_max_frames)]
    # Zeros past the last frame: the STFT mirrors the signal at its end, which would put speech where padding belongs.
    padded = np.pad(waveform, (0, padded_length - len(waveform)))
    return extracted(padded, extractor, padding="do_not_pad")[:, :frames]


def extracted(
    waveform: np.ndarray, extractor: WhisperFeatureExtractor, *, padding: str, truncation: bool = True
) -> np.ndarray:
    """What the extractor itself makes, float32 [80|128, frames]; with truncation, at most of its full length."""
    made = extractor(
        waveform,
        sampling_rate=extractor.sampling_rate,
        padding=padding,
        truncation=truncation,
        return_tensors="np",
    )
    return made.input_features[0].astype(np.float32)


def pad_log_mel(mel: np.ndarray, frames: int) -> np.ndarray:
    """`mel` [n_mels, t] extended to [n_mels, frames] with the extractor's value for digital silence; never cut."""
    if mel.shape[1] >= frames:
        return mel
    loudest = mel.max() * 4.0 - 4.0  # undo the extractor's (x + 4) / 4
    silence = (max(_LOG_FLOOR, loudest - _DYNAMIC_RANGE) + 4.0) / 4.0
    return np.pad(mel, ((0, 0), (0, frames - mel.shape[1])), constant_values=np.float32(silence))


class FeatureCache:
    """Log-mels on disk under the hash of the audio's content and of the extractor's settings.

    Safe for several processes at once: an entry that is half written fails its hash, and is computed again.
    """

    def __init__(self, directory: str | Path, extractor: WhisperFeatureExtractor):
        self.directory = Path(directory)
        self.extractor = extractor
        settings = json.dumps([FORMAT, extractor.to_dict()], sort_keys=True)
        self._settings = hashlib.blake2b(settings.encode(), digest_size=_DIGEST_BYTES).digest()

    def log_mel(self, path: str | Path, speed: float = 1.0) -> np.ndarray:
        """float32 [80|128, frames] of an audio file; see `log_mel`. Raises DataError or MissingProgram.

        speed: what lasts a second is played in 1 / speed seconds.
        """
        entry = self._entry(Path(path), speed)
        mel = _read(entry)
        if mel is None:
            waveform = load_audio(path, self.extractor.sampling_rate)
            if speed != 1.0:
                waveform = soxr.resample(waveform, speed * self.extractor.sampling_rate, self.extractor.sampling_rate)
            mel = log_mel(waveform, self.extractor)
            _write(entry, mel)
        return mel

    def _entry(self, path: Path, speed: float) -> Path:
        key = hashlib.blake2b(self._settings, digest_size=_DIGEST_BYTES)
        if speed != 1.0:
            key.update(f"{speed}".encode())
        try:
            with path.open("rb") as audio:
                while block := audio.read(1 << 20):
                    key.update(block)
        except OSError:
            load_audio(path)  # raises the error that names the file and what to do
            raise
        name = key.hexdigest()
        return self.directory / name[:2] / f"{name}.mel"


def _read(entry: Path) -> np.ndarray | None:
    """The stored array, or None if there is none or it is damaged."""
    try:
        raw = entry.read_bytes()
    except FileNotFoundError:
        return None
    digest, body = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != digest:
        return None
    return np.load(io.BytesIO(body), allow_pickle=False)


def _write(entry: Path, mel: np.ndarray) -> None:
    """Not atomic: an entry that is half written, by a killed process or by another one right now, fails its hash.

    If the disk is full the entry is dropped, and the features are computed again in the next epoch.
    """
    body = io.BytesIO()
    np.save(body, np.ascontiguousarray(mel), allow_pickle=False)
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_bytes(hashlib.blake2b(body.getvalue(), digest_size=_DIGEST_BYTES).digest() + body.getvalue())
    except OSError as error:
        if error.errno not in DISK:
            raise
        with contextlib.suppress(OSError):
            entry.unlink()
