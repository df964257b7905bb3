"""Long recordings made of short clips with pauses between, of which it is known what is said where."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr

from whisper_tuner.data.audio import SAMPLE_RATE, load_audio

DATA = Path(__file__).parents[2] / "bundled" / "data"
NOISE = 0.0003


@dataclass(frozen=True)
class Long:
    """texts, middles: of the clips, and where each has its middle, in s. They have silence of their own at the ends."""

    path: Path
    texts: list[str]
    middles: list[float]

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def said(self, begin: float, end: float) -> str:
        """Of the clips whose middle lies between."""
        return " ".join(text for text, at in zip(self.texts, self.middles, strict=True) if begin < at <= end)


def joined(
    path: Path,
    seconds: float,
    *,
    folder: Path = DATA,
    first: int = 0,
    pauses: Sequence[float] = (0.5, 0.8, 0.6),
    silence: tuple[float, float] = (0.2, 0.2),
    rate: int = SAMPLE_RATE,
    channels: int = 1,
) -> Long:
    """Clips of folder/train.csv from row `first` on, until they last so long. silence: before and after them."""
    rng = np.random.default_rng(0)
    noise = lambda s: (NOISE * rng.standard_normal(round(s * SAMPLE_RATE))).astype(np.float32)  # noqa: E731
    sound, texts, middles = [noise(silence[0])], [], []
    with (folder / "train.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))[first:]
    for number, row in enumerate(rows):
        clip = load_audio(folder / row["audio_path"])
        sound += [clip + noise(len(clip) / SAMPLE_RATE)[: len(clip)], noise(pauses[number % len(pauses)])]
        texts.append(row["transcription"])
        middles.append((sum(map(len, sound[:-1])) - len(clip) / 2) / SAMPLE_RATE)
        if middles[-1] > seconds:
            break
    whole = np.concatenate([*sound, noise(silence[1])])
    if rate != SAMPLE_RATE:
        whole = soxr.resample(whole, SAMPLE_RATE, rate)
    soundfile.write(
        path, np.stack([whole] * channels, axis=1), rate, subtype="FLOAT" if path.suffix == ".wav" else None
    )
    return Long(path, texts, middles)
