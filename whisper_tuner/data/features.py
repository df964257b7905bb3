"""Waveforms -> Whisper's log-mel features at their real length.

The feature extractor pads every clip to 30 s before it looks at it. Here only the frames that touch the speech are
computed; `pad_log_mel` appends the constant frames that padding the audio would have given.
"""

from __future__ import annotations

import numpy as np
from transformers import WhisperFeatureExtractor

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
    """Return what the extractor itself makes, float32 [80|128, frames]; with truncation, at most of its full length."""
    made = extractor(
        waveform,
        sampling_rate=extractor.sampling_rate,
        padding=padding,
        truncation=truncation,
        return_tensors="np",
    )
    return made.input_features[0].astype(np.float32)


def relative_to_loudest(mel: np.ndarray) -> np.ndarray:
    """`mel` with everything lifted to at most the dynamic range below its loudest value, as the extractor does."""
    return np.maximum(mel, mel.max() - np.float32(_DYNAMIC_RANGE / 4.0))


def pad_log_mel(mel: np.ndarray, frames: int) -> np.ndarray:
    """`mel` [n_mels, t] extended to [n_mels, frames] with the extractor's value for digital silence; never cut."""
    if mel.shape[1] >= frames:
        return mel
    loudest = mel.max() * 4.0 - 4.0  # undo the extractor's (x + 4) / 4
    silence = (max(_LOG_FLOOR, loudest - _DYNAMIC_RANGE) + 4.0) / 4.0
    return np.pad(mel, ((0, 0), (0, frames - mel.shape[1])), constant_values=np.float32(silence))
