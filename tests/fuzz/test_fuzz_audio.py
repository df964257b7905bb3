"""Audio: headers that lie, frames that are noise, names that mislead."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
from damage import damaged
from fuzzing import fuzz, outcome
from hypothesis import example

from whisper_tuner.data import audio
from whisper_tuner.data.audio_check import AudioIndex

NOISE = np.random.default_rng(1).uniform(-0.5, 0.5, 800).astype(np.float32)
LONGEST = 32 * audio.SAMPLE_RATE  # what a few kilobytes may become


def encoded(form: str, **more) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, NOISE, 16_000, format=form, **more)
    return file.getvalue()


def heard(file: Path, data: bytes, *, whole: bytes | None = None) -> None:
    """Header, length and sound agree; a file that is `whole` sounds as what was written."""
    file.write_bytes(data)
    header = outcome(lambda: AudioIndex()[file])
    seconds = outcome(audio.duration, file, names=file)
    waveform = outcome(audio.load_audio, file, names=file)
    assert str(file) in header.what if header.kind else header.what == ""
    if not header.kind:
        assert seconds == header.seconds > 0
    if waveform is not None:
        assert waveform.ndim == 1 and waveform.dtype == np.float32 and 0 < len(waveform) < LONGEST
        assert np.abs(waveform).max() < audio.LOUDEST
        assert np.array_equal(waveform, audio.load_audio(file))
    if data == whole:
        assert not header.kind and header.seconds == len(NOISE) / 16_000
        assert np.abs(waveform - NOISE).max() < 1e-4


@pytest.fixture(scope="module")
def alone():
    """libsndfile by itself: ffmpeg, which is asked for what it refuses, takes long to start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audio, "find_program", lambda name: None)
        yield


WAV, FLOATS, FLAC, MP3 = encoded("WAV"), encoded("WAV", subtype="FLOAT"), encoded("FLAC"), encoded("MP3")
ENDLESS = FLAC[:21] + b"\xff" * 5 + FLAC[26:]  # it states 2^36 frames


@fuzz("audio.wav", damaged(WAV, FLOATS), cost=2)
@example(data=WAV[:24] + (2**31 - 1).to_bytes(4, "little") + WAV[28:])
@example(data=FLOATS[:-400] + np.float32([np.nan, np.inf]).tobytes() * 50)
@example(data=WAV[:24] + (1).to_bytes(4, "little") + WAV[28:] + bytes(10_000))
@example(data=WAV)
@example(data=FLOATS)
def test_wav(folder: Path, alone, data: bytes):
    heard(folder / "audio.wav", data, whole=FLOATS if data == FLOATS else WAV)


@fuzz("audio.flac", damaged(FLAC), cost=2)
@example(data=ENDLESS)
@example(data=FLAC)
def test_flac(folder: Path, alone, data: bytes):
    heard(folder / "audio.flac", data, whole=FLAC)


@fuzz("audio.mp3", damaged(MP3), cost=2)
def test_mp3(folder: Path, alone, data: bytes):
    heard(folder / "audio.mp3", data)


@fuzz("audio.ogg", damaged(encoded("OGG"), encoded("OGG", subtype="OPUS")), cost=2)
def test_ogg(folder: Path, alone, data: bytes):
    heard(folder / "audio.ogg", data)


@fuzz("audio.raw", damaged(WAV), cost=10)
def test_raw(folder: Path, alone, data: bytes):
    heard(folder / "audio.raw", data)


@fuzz("audio, with ffmpeg", damaged(FLAC, MP3), few=1, cost=50)
@example(data=ENDLESS)
def test_with_ffmpeg(folder: Path, data: bytes):
    heard(folder / "caf\udce9.m4a", data)
