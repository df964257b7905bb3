"""Audio files of any usual kind -> mono float32 waveforms at the model's sample rate.

libsndfile reads WAV, FLAC, OGG and MP3 itself, many times faster than a child process. What it cannot read (M4A/AAC,
video files) goes through ffmpeg or, on a Mac without ffmpeg, through the system's own `afconvert`.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import soundfile
import soxr

from whisper_tuner.errors import DataError, MissingProgram

SAMPLE_RATE = 16_000  # Hz, of every Whisper model
UNCOUNTED = 2**63 - 1  # the frames that libsndfile gives for a FLAC that was written into a pipe
LOWEST_RATE = 1000  # Hz; a lower rate means a damaged header, and resampling would turn the file into gigabytes
LOUDEST = 1e6  # full scale is 1; a float WAV may hold more, but infinity and NaN are damage
# What soundfile raises for a file that it cannot read: ValueError for an unknown length or a name that is not UTF-8,
# TypeError for a name that ends in .raw, MemoryError for a header that states an absurd length.
REFUSED = (soundfile.LibsndfileError, ValueError, TypeError, MemoryError)
# Names and tags may be of any encoding. Without an input of their own, programs would read the user's keyboard.
CAPTURED = {"stdin": subprocess.DEVNULL, "capture_output": True, "encoding": "utf-8", "errors": "replace"}
# A non-interactive SSH session on a Mac starts with a bare PATH that lacks both of Homebrew's folders.
HOMEBREW_FOLDERS = ("/opt/homebrew/bin", "/usr/local/bin")


def load_audio(path: str | Path, sample_rate: int = SAMPLE_RATE) -> np.ndarray:
    """Mono float32 waveform [n] in [-1, 1] at `sample_rate` Hz.

    Raises DataError (missing, damaged or empty file) or MissingProgram (a format that needs ffmpeg), naming the file.
    """
    samples, rate = read_channels(path, sample_rate)
    waveform = samples.mean(axis=1)
    if rate != sample_rate:
        # What librosa calls soxr_hq, without librosa's two seconds of import.
        waveform = soxr.resample(waveform, rate, sample_rate, quality="HQ")
    if len(waveform) == 0:
        raise DataError(f"{path} holds no audio", remedy="Remove it from the manifest.")
    return np.ascontiguousarray(waveform, dtype=np.float32)


def read_channels(path: str | Path, sample_rate: int = SAMPLE_RATE) -> tuple[np.ndarray, int]:
    """(float32 [n, channels], samples a second) of a file as it is; `sample_rate` where another program decodes it.

    Raises as `load_audio` does.
    """
    path = Path(path)
    _require_file(path)
    try:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except REFUSED as error:
        samples, rate = _convert(path, sample_rate, reason=str(error)), sample_rate
    if rate < LOWEST_RATE:
        raise DataError(f"{path} states {rate} samples a second", remedy="Its header is damaged: copy it again.")
    if len(samples) == 0:
        raise DataError(f"{path} holds no audio", remedy="Remove it from the manifest.")
    if not np.abs(samples).max() < LOUDEST:
        raise DataError(f"{path} holds values that cannot be audio", remedy="Convert it again, or remove it.")
    return samples, rate


def duration(path: str | Path) -> float:
    """Length in seconds, from the header where the format allows. Raises as `load_audio` does."""
    path = Path(path)
    _require_file(path)
    try:
        info = soundfile.info(path)
        if info.frames != UNCOUNTED:
            return info.duration
    except REFUSED:
        pass
    return _probed_duration(path) or len(load_audio(path)) / SAMPLE_RATE


def find_program(name: str) -> str | None:
    """Full path of a program on PATH or in Homebrew's folders, or None."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *HOMEBREW_FOLDERS]))


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"no such audio file: {path}", remedy="Check its path.")


def _probed_duration(path: Path) -> float:
    """Seconds by ffprobe, which reads only the header; 0 where it is not installed or does not know."""
    if not (ffprobe := find_program("ffprobe")):
        return 0.0
    ask = ["-v", "error", "-select_streams", "a:0", "-show_entries", "stream=duration", "-of", "csv=p=0"]
    said = subprocess.run([ffprobe, *ask, f"file:{path}"], **CAPTURED)
    try:
        seconds = float(said.stdout.split()[0]) if said.returncode == 0 else 0.0
    except (IndexError, ValueError):
        return 0.0
    return seconds if 0 < seconds < math.inf else 0.0


def _convert(path: Path, sample_rate: int, reason: str) -> np.ndarray:
    """Samples [n, channels] of a file that libsndfile refuses, by an external program.

    Channels stay as they are: ffmpeg's own mix to mono is louder than their mean, and can clip.
    """
    with tempfile.TemporaryDirectory(prefix="multimac-audio-") as folder:
        wav = converted(path, Path(folder) / "audio.wav", sample_rate, reason)
        return soundfile.read(wav, dtype="float32", always_2d=True)[0]


def converted(
    path: Path,
    wav: Path,
    sample_rate: int = SAMPLE_RATE,
    reason: str = "libsndfile cannot read it",
    *,
    by_clock: bool = False,
) -> Path:
    """`wav`, with what an external program makes of `path`. Raises DataError, MissingProgram.

    by_clock: with silence where a video's sound begins later than its picture, so that times of subtitles fit.
    """
    result = subprocess.run(_conversion_command(path, wav, sample_rate, reason, by_clock), **CAPTURED)
    if result.returncode != 0 or not wav.exists():
        said = (result.stderr.strip() or result.stdout.strip() or reason).splitlines()[-1]
        raise DataError(
            f"{path} cannot be decoded: {said.removeprefix(f'file:{path}: ')}",
            remedy="Convert it to WAV or FLAC, or remove it.",
        )
    return wav


def _conversion_command(path: Path, wav: Path, sample_rate: int, reason: str, by_clock: bool) -> list[str]:
    if ffmpeg := find_program("ffmpeg"):
        # The file: prefix stops a name such as `http:x.m4a` from being taken for a protocol.
        decode = [ffmpeg, "-nostdin", "-v", "error", "-y", "-i", f"file:{path}", "-map", "0:a:0"]
        padded = ["-af", "aresample=async=1:first_pts=0"] if by_clock else []
        return [*decode, *padded, "-ar", str(sample_rate), "-c:a", "pcm_f32le", str(wav)]
    if afconvert := find_program("afconvert"):
        return [afconvert, "-f", "WAVE", "-d", f"LEF32@{sample_rate}", str(path), str(wav)]
    raise MissingProgram(
        f"{path} needs ffmpeg: {reason}",
        remedy="Install it with `brew install ffmpeg` or `apt-get install ffmpeg`, or convert the file to WAV or FLAC.",
    )
