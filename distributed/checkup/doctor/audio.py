"""Writes one file of each audio format, and reads it back."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import numpy as np
import soundfile

from distributed.checkup.findings import Finding, Tell, ok, problem, warning
from whisper_tuner.data.audio import SAMPLE_RATE, find_program, load_audio
from whisper_tuner.errors import TunerError

FORMATS = {"wav": "PCM_16", "flac": "PCM_16", "ogg": "VORBIS", "mp3": "MPEG_LAYER_III"}
SECONDS, PITCH = 2.0, 440.0  # Hz
ALIKE = 0.98  # cosine similarity; lossy codecs give 0.999 and more
SLACK = 0.15  # seconds that a codec may add


def check_audio_formats(tell: Tell) -> Finding:
    wrong, read = [], []
    with tempfile.TemporaryDirectory(prefix="multimac-doctor-") as folder:
        source = Path(folder) / "tone.wav"
        soundfile.write(source, tone(44_100), 44_100, subtype="PCM_16")
        for kind in (*FORMATS, "m4a"):
            tell(kind)
            try:
                path = _encode(source, kind)
            except TunerError as error:
                return warning(f"read: {', '.join(read)}; not m4a: {error.args[0]}", error.remedy)
            said = _problem(path)
            (wrong if said else read).append(said or kind)
    if wrong:
        return problem("; ".join(wrong), "Reinstall soundfile (`make setup`) and ffmpeg. Send us this with --json.")
    return ok(f"{', '.join(read)} decode to what was encoded")


def tone(rate: int) -> np.ndarray:
    """Make a tone, float32 [n, 2]: both channels alike, as most recordings of one microphone."""
    time = np.arange(int(SECONDS * rate)) / rate
    wave = (0.3 * np.sin(2 * np.pi * PITCH * time)).astype(np.float32)
    return np.stack([wave, wave], axis=1)


def _encode(source: Path, kind: str) -> Path:
    path = source.with_name(f"encoded.{kind}")
    if kind != "m4a":
        samples, rate = soundfile.read(source, dtype="float32")
        soundfile.write(path, samples, rate, format=kind.upper(), subtype=FORMATS[kind])
        return path
    if ffmpeg := find_program("ffmpeg"):
        command = [ffmpeg, "-nostdin", "-v", "error", "-i", str(source), "-c:a", "aac", str(path)]
    elif afconvert := find_program("afconvert"):
        command = [afconvert, "-f", "m4af", "-d", "aac", str(source), str(path)]
    else:
        raise TunerError("neither ffmpeg nor afconvert", remedy="`brew install ffmpeg`, for M4A and video files.")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    if done.returncode or not path.exists():
        said = done.stderr.strip().splitlines() or ["it wrote nothing"]
        raise TunerError(f"{Path(command[0]).name} cannot write AAC: {said[-1]}")
    return path


def _problem(path: Path) -> str:
    """Say what is wrong with an encoded tone as it is read; empty if nothing is."""
    try:
        found = load_audio(path)
    except TunerError as error:
        return error.args[0]
    if abs(len(found) / SAMPLE_RATE - SECONDS) > SLACK:
        return f"{path.suffix[1:]} lasts {len(found) / SAMPLE_RATE:.2f} s instead of {SECONDS:g}"
    time = np.arange(len(found)) / SAMPLE_RATE
    waves = [np.sin(2 * np.pi * PITCH * time), np.cos(2 * np.pi * PITCH * time)]  # of any phase: codecs add a delay
    share = sum(float(found @ wave) ** 2 / float(wave @ wave) for wave in waves) / max(float(found @ found), 1e-12)
    return "" if share**0.5 >= ALIKE else f"{path.suffix[1:]} decodes to something else (similarity {share**0.5:.2f})"
