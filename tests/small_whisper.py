"""Tiny random Whispers with a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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

LANGUAGE_TOKENS = [f"<|{code}|>" for code in LANGUAGES]
# In the published order: transformers' tokenizer works a language's id out from it.
SPECIAL = ["<|startoftranscript|>", *LANGUAGE_TOKENS, "<|translate|>", "<|transcribe|>"]
SPECIAL += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]


def write_whisper(
    folder: Path,
    *,
    multilingual: bool,
    seconds: int,
    timestamps: int = 0,
    texts: int = 256,
    added: Sequence[str] = (),
) -> Path:
    """timestamps: how many the tokenizer does not name. texts: tokens of text. added: tokens behind all others."""
    tokenizer = _tokenizer(texts)
    tokenizer.add_tokens(list(added))
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


def _tokenizer(texts: int) -> WhisperTokenizer:
    """One token for each byte, then end-of-text (which is also pad, as on the hub), then the special tokens."""
    vocabulary = {char: number for number, char in enumerate(bytes_to_unicode().values())}
    vocabulary |= {f"filler{number}": number for number in range(len(vocabulary), texts)}
    vocabulary["<|endoftext|>"] = len(vocabulary)
    tokenizer = WhisperTokenizer(vocab=vocabulary, merges=[], pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.set_prefix_tokens()
    return tokenizer
