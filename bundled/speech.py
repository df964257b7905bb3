"""Speech from espeak-ng, which must be installed."""

import io
import subprocess
from dataclasses import dataclass

import numpy as np
import soundfile
import soxr

SAMPLE_RATE = 16_000


@dataclass(frozen=True, kw_only=True)
class Speaker:
    voice: str  # espeak-ng voice, with an optional variant: "en-gb", "en-us+f2"
    words_per_minute: int = 170
    pitch: int = 50  # 0 to 99


def speak(text: str, speaker: Speaker) -> np.ndarray:
    """float32 [n] at 16 kHz, in -1..1."""
    command = ["espeak-ng", "--stdout", "-v", speaker.voice, "-s", str(speaker.words_per_minute)]
    command += ["-p", str(speaker.pitch), "--", text]
    wav = subprocess.run(command, check=True, capture_output=True).stdout
    audio, rate = soundfile.read(io.BytesIO(wav), dtype="float32")
    audio = soxr.resample(audio, rate, SAMPLE_RATE)
    return audio / max(np.abs(audio).max(), 1e-3) * 0.7


def espeak_version() -> str:
    return subprocess.run(["espeak-ng", "--version"], check=True, capture_output=True, text=True).stdout.split("  ")[0]
