"""What a decoded clip tells of itself: loudness, clipping, silence, edges, channels, and a print to compare it by."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import soundfile

from whisper_tuner.data.audio import REFUSED, UNCOUNTED, read_channels
from whisper_tuner.errors import TunerError

FRAME_S = 0.02
EDGE_S = 0.005  # a word that begins by itself is quiet so long, one that is cut into is not
QUIETEST_DB = -100.0
FULL_SCALE = 0.998
STEP = 1.5 / 32768  # samples this near to the highest one are as high, whatever 16 bits made of them
# Silence is what lies so far below a clip's loud frames. A noisy room is silent too where nobody speaks: up to 6 dB
# over its quietest tenth, but never closer than 20 dB to the speech.
BELOW_SPEECH_DB, ABOVE_NOISE_DB, NEAREST_DB = 40.0, 6.0, 20.0
SEGMENTS, BANDS = 17, 9  # of a print
PRINT_BITS = (SEGMENTS - 1) * (BANDS - 1)
LOWEST_HZ, HIGHEST_HZ = 200.0, 3600.0  # what every recording of speech has, also one of 8 kHz
WINDOW_S = 0.032
FAINTEST_DB = -70.0  # of a clip with a print
LOUD_DB = 20.0  # below a clip's loud frames: from the first to the last such moment its print is taken
FINE_S, SMOOTHED = 0.002, 10  # over 20 ms


@dataclass(frozen=True, slots=True)
class Facts:
    """Describes one clip; levels are in dB of full scale. `problem` says why it could not be decoded.

    level: of its loud frames, the 95th percentile. spread: from its quiet to its loud frames, dB. clipped: the share of
    samples in flat tops. begins_s, ends_s: silence there. silent: the share of silent frames. first, last: level of the
    first and last 5 ms, compared with `level`. balance: of the loudest channel to the quietest, dB. cancelled: how much
    the mean of the channels is below them, dB. missing_s: how much shorter it is than its header says. digest: of the
    mono waveform. print: 128 bits that hardly change with loudness, codec, and silence at the edges; "" where there is
    too little sound.
    """

    rate: int = 0
    channels: int = 0
    seconds: float = 0.0
    peak: float = 0.0
    level: float = QUIETEST_DB
    spread: float = 0.0
    clipped: float = 0.0
    offset: float = 0.0
    begins_s: float = 0.0
    ends_s: float = 0.0
    silent: float = 0.0
    first: float = QUIETEST_DB
    last: float = QUIETEST_DB
    balance: float = 0.0
    cancelled: float = 0.0
    missing_s: float = 0.0
    digest: str = ""
    print: str = ""
    problem: str = ""

    @property
    def sounding_s(self) -> float:
        """Without the silence at its edges."""
        return max(0.0, self.seconds - self.begins_s - self.ends_s)


def measure(path: Path) -> Facts:
    """Decodes a clip whole. Never raises for a file that cannot be decoded."""
    try:
        samples, rate = read_channels(path)
    except (TunerError, OSError) as error:
        return Facts(problem=" - ".join(str(error).split("\n  ")))
    facts, stated_s = facts_of(samples, rate), 0.0
    with contextlib.suppress(*REFUSED, OSError):
        info = soundfile.info(path)
        if info.format != "MP3" and info.frames != UNCOUNTED:  # in an MP3 its length is guessed
            stated_s = info.frames / info.samplerate
    return replace(facts, missing_s=round(max(0.0, stated_s - facts.seconds), 2))


def facts_of(samples: np.ndarray, rate: int) -> Facts:
    """samples: float32 [n, channels]."""
    mono = samples.mean(axis=1)
    offset = float(mono.mean())
    frames = frame_levels(mono - offset, rate)
    level = float(np.percentile(frames, 95))
    sounds = np.flatnonzero(frames > silence_below(frames))
    begins, ends = (int(sounds[0]), len(frames) - 1 - int(sounds[-1])) if len(sounds) else (len(frames), 0)
    channels = _decibels(np.sqrt(np.square(samples - samples.mean(axis=0)).mean(axis=0)))
    short = max(1, round(EDGE_S * rate))
    edges = [_decibels(np.sqrt(np.square(part - offset).mean())) - level for part in (mono[:short], mono[-short:])]
    return Facts(
        rate=rate,
        channels=samples.shape[1],
        seconds=len(mono) / rate,
        peak=float(np.abs(samples).max()),
        level=round(level, 1),
        spread=round(level - float(np.percentile(frames, 5)), 1),
        clipped=_clipped(samples),
        offset=round(offset, 5),
        begins_s=round(begins * FRAME_S, 2),
        ends_s=round(ends * FRAME_S, 2),
        silent=round(1 - len(sounds) / len(frames), 3),
        first=round(float(edges[0]), 1),
        last=round(float(edges[1]), 1),
        balance=round(float(channels.max() - channels.min()), 1),
        cancelled=round(float(channels.max() - _decibels(np.sqrt(np.square(mono - offset).mean()))), 1),
        digest=hashlib.blake2b(np.rint(mono * 32768).astype("<i4").tobytes(), digest_size=12).hexdigest(),
        print=_print(_loud_part(mono - offset, rate, level), rate) if level > FAINTEST_DB else "",
    )


def _decibels(values):
    return 20 * np.log10(np.maximum(values, 10 ** (QUIETEST_DB / 20)))


def silence_below(frames: np.ndarray) -> float:
    """The level in dB below which a frame is silent, in a clip with these levels."""
    level, noise = (float(np.percentile(frames, part)) for part in (95, 10))
    return min(level - NEAREST_DB, max(level - BELOW_SPEECH_DB, noise + ABOVE_NOISE_DB))


def frame_levels(mono: np.ndarray, rate: int) -> np.ndarray:
    """Return levels in dB of full scale, one for each FRAME_S. mono: float32 [n]."""
    n = max(1, round(FRAME_S * rate))
    whole = mono[: len(mono) // n * n] if len(mono) >= n else np.pad(mono, (0, n - len(mono)))
    return _decibels(np.sqrt(np.square(whole.reshape(-1, n)).mean(axis=1)))


def _clipped(samples: np.ndarray) -> float:
    """The share of samples in flat tops, of three samples or more, at full scale or at the channel's own highest value.

    What was clipped and then made quieter has them below full scale.
    """
    worst = 0.0
    for channel in samples.T:
        height = np.abs(channel)
        peak = float(height.max())
        if peak < 0.01:  # so quiet that its few steps make flat tops by themselves
            continue
        top = height >= min(peak - STEP, FULL_SCALE)
        run = top[2:] & top[1:-1] & top[:-2]
        if run.any():
            flat = np.zeros(len(top), bool)
            flat[:-2] |= run
            flat[1:-1] |= run
            flat[2:] |= run
            worst = max(worst, float(flat.mean()))
    return round(worst, 5)


def _loud_part(mono: np.ndarray, rate: int, level: float) -> np.ndarray:
    """Cut from the first loud moment to the last one, to 2 ms: where it begins must not depend on codec or noise."""
    n = max(1, round(FINE_S * rate))
    summed = np.concatenate([[0.0], np.cumsum(np.square(mono), dtype=np.float64)])[::n]
    power = (summed[SMOOTHED:] - summed[:-SMOOTHED]) / (SMOOTHED * n)
    loud = np.flatnonzero(power > 10 ** ((level - LOUD_DB) / 10))
    return mono[loud[0] * n : (loud[-1] + SMOOTHED) * n] if len(loud) else mono[:0]


def _print(sound: np.ndarray, rate: int) -> str:
    """128 bits: whether the step from one band to the next grows from one segment of time to the next (Haitsma 2002).

    The segments are parts of the clip's sound, not of a fixed length.
    """
    size = round(WINDOW_S * rate)
    if len(sound) < 4 * size:
        return ""
    hop = max(1, min(size // 2, (len(sound) - size) // (2 * SEGMENTS)))
    windows = np.lib.stride_tricks.sliding_window_view(sound, size)[::hop] * np.hanning(size).astype(np.float32)
    power = np.square(np.abs(np.fft.rfft(windows, axis=1)))
    hertz = np.fft.rfftfreq(size, 1 / rate)
    limits = np.searchsorted(hertz, np.geomspace(LOWEST_HZ, HIGHEST_HZ, BANDS + 1))
    bands = np.add.reduceat(power[:, : limits[-1]], limits[:-1], axis=1)  # [windows, bands]
    at = np.linspace(0, len(bands), SEGMENTS + 1).astype(int)[:-1]
    energy = np.log(np.add.reduceat(bands, at, axis=0) + 1e-12)
    steps = np.diff(np.diff(energy, axis=1), axis=0)
    return np.packbits(steps > 0).tobytes().hex()
