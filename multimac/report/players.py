"""Recordings inside the page, small, so that a reader can hear what the model heard."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

from whisper_tuner.data.audio import CLIP_S, REFUSED, SAMPLE_RATE, load_audio, read_channels
from whisper_tuner.errors import TunerError

BARS = 240  # of a waveform
MOST_BYTES = 10_000_000  # of all recordings of a page, as they stand in it
# Safari plays OGG only since 2025. MP3 needs about 6 kB for a second of speech, FLAC three times as much.
FORMATS = {"MP3": "audio/mpeg", "FLAC": "audio/flac"}
GONE, DAMAGED = "The recording is not here any more.", "The recording cannot be read."
FULL = "The recording is left out: the page would become too large."


@dataclass(frozen=True)
class Player:
    """An address for <audio>, or why there is none."""

    address: str = ""
    missing: str = ""


class Players:
    def __init__(self, folders: Sequence[Path] = (), most_bytes: int = MOST_BYTES):
        """folders: where a relative path may begin."""
        self._folders, self.left = folders, most_bytes

    def of(self, path: Path) -> Player:
        """Never raises: a report without sound is still a report."""
        try:
            found = next((place for folder in self._folders if (place := folder / path).is_file()), None)
            if found is None:
                return Player(missing=GONE)
            kind, data = encoded(found)
        except (TunerError, OSError, *REFUSED):
            return Player(missing=DAMAGED)
        address = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        if len(address) > self.left:
            return Player(missing=FULL)
        self.left -= len(address)
        return Player(address=address)


def encoded(path: Path) -> tuple[str, bytes]:
    """Return media type and content, 16 kHz mono as models hear it. Raises TunerError, OSError or one of REFUSED."""
    name = next(name for name in FORMATS if name in soundfile.available_formats())
    content = io.BytesIO()
    soundfile.write(content, load_audio(path, longest_s=CLIP_S), SAMPLE_RATE, format=name)
    return FORMATS[name], content.getvalue()


def wave(audio: Path) -> str:
    """Draw the highest and lowest sample of each of BARS stretches, as an SVG path in a box of BARS by 2."""
    try:
        samples, _ = read_channels(audio)
    except (TunerError, OSError):
        return ""
    mono = samples.mean(axis=1)
    ends = np.linspace(0, len(mono), BARS + 1).astype(int)
    spans = [(begin, max(end, begin + 1)) for begin, end in itertools.pairwise(ends) if begin < len(mono)]
    lines = ((mono[begin:end].min(), mono[begin:end].max()) for begin, end in spans)
    return "".join(f"M{at} {-high:.3f}V{-low + 0.004:.3f}" for at, (low, high) in enumerate(lines))
