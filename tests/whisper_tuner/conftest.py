"""Tiny random Whispers with a byte-level tokenizer, and audio to feed them; nothing is downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from whisper_tuner.config import Profile
from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.labels import TIMESTAMPS
from whisper_tuner.model.base_model import load_base

LANGUAGE_TOKENS = [f"<|{code}|>" for code in LANGUAGES]
# In the published order: transformers' tokenizer works a language's id out from it.
SPECIAL = ["<|startoftranscript|>", *LANGUAGE_TOKENS, "<|translate|>", "<|transcribe|>"]
SPECIAL += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]


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


def write_whisper(folder: Path, *, multilingual: bool, seconds: int, timestamps: int = 0) -> Path:
    tokenizer = _tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    end, start = tokenizer.eos_token_id, ids["<|startoftranscript|>"]
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    config = WhisperConfig(
        vocab_size=len(tokenizer) + timestamps,
        num_mel_bins=80,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=50 * seconds,
        max_target_positions=64,
        init_std=0.2,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **special,
    )
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config)
    languages = {
        "lang_to_id": {token: ids[token] for token in LANGUAGE_TOKENS},
        "task_to_id": {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]},
    }
    model.generation_config = GenerationConfig(
        **special,
        is_multilingual=multilingual,
        **(languages if multilingual else {}),
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        max_length=24,
        return_timestamps=False,
    )
    WhisperProcessor(WhisperFeatureExtractor(chunk_length=seconds), tokenizer).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def _tokenizer() -> WhisperTokenizer:
    """One token for each byte, then end-of-text (which is also pad, as on the hub), then the special tokens."""
    vocabulary = {char: number for number, char in enumerate(bytes_to_unicode().values())}
    vocabulary["<|endoftext|>"] = len(vocabulary)
    tokenizer = WhisperTokenizer(vocab=vocabulary, merges=[], pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.set_prefix_tokens()
    return tokenizer
