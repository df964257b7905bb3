"""Tiny random Whispers, and audio to feed them; nothing is downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from small_whisper import write_whisper
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from whisper_tuner.config import Profile
from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.labels import TIMESTAMPS
from whisper_tuner.model.base_model import load_base


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def multilingual_folder(tmp_path_factory) -> Path:
    """A multilingual checkpoint that hears 5 s at once."""
    return write_whisper(tmp_path_factory.mktemp("models") / "multilingual", multilingual=True, seconds=5)


@pytest.fixture(scope="session")
def english_folder(tmp_path_factory) -> Path:
    """An English-only checkpoint that hears 30 s at once, as published ones do."""
    return write_whisper(tmp_path_factory.mktemp("models") / "english", multilingual=False, seconds=30)


@pytest.fixture(scope="session")
def timestamps_folder(tmp_path_factory) -> Path:
    """A multilingual checkpoint with timestamps, which its tokenizer does not name: older ones on the hub do not."""
    folder = tmp_path_factory.mktemp("models") / "timestamps"
    return write_whisper(folder, multilingual=True, seconds=5, timestamps=TIMESTAMPS)


@pytest.fixture
def timestamps(timestamps_folder) -> tuple[WhisperForConditionalGeneration, WhisperProcessor]:
    return load_base(timestamps_folder)


@pytest.fixture
def multilingual(multilingual_folder) -> tuple[WhisperForConditionalGeneration, WhisperProcessor]:
    return load_base(multilingual_folder)


@pytest.fixture
def english(english_folder) -> tuple[WhisperForConditionalGeneration, WhisperProcessor]:
    return load_base(english_folder)


@pytest.fixture(scope="session")
def clips(tmp_path_factory) -> list[Sample]:
    """Twenty clips of noise, 0.3 to 4.1 s."""
    folder = tmp_path_factory.mktemp("clips")
    samples = []
    for number in range(20):
        seconds = 0.3 + 0.2 * number
        path = write_audio(folder / f"{number}.wav", seconds=seconds, seed=number)
        samples.append(
            Sample(id=f"clip{number}", audio=path, text=f"text {number}", duration_s=seconds, line=number + 2)
        )
    return samples


@pytest.fixture(scope="session")
def profile_of() -> Callable[..., Profile]:
    """The profile with these settings, of no model and no clips; of clips that are not padded, unless it says so."""
    return lambda **settings: Profile(base_model="", train=Path(), **{"audio_context": "cropped", **settings})


@pytest.fixture
def need_program() -> Callable[[str], str]:
    """Path of a system program; without it the test is skipped by name, or fails where CI is true."""

    def need(name: str) -> str:
        found = shutil.which(name)
        if found is None and os.environ.get("CI") == "true":
            pytest.fail(f"{name} is not installed")
        return found or pytest.skip(f"{name} is not installed")

    return need


@pytest.fixture
def audio_file() -> Callable[..., Path]:
    return write_audio


def write_audio(path: Path, *, seconds: float, rate: int = 16_000, channels: int = 1, seed: int = 0, **options) -> Path:
    """Noise under a 440 Hz tone."""
    time = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(seed).normal(0, 0.02, (len(time), channels))
    soundfile.write(path, noise + 0.3 * np.sin(2 * np.pi * 440 * time)[:, None], rate, **options)
    return path
