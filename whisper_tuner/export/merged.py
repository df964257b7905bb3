"""What every export begins with: a trained model without adapters, and what its runtime is to be told."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import WhisperForConditionalGeneration, WhisperProcessor


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The model in float32 on the CPU, adapters merged."""

    model: WhisperForConditionalGeneration
    processor: WhisperProcessor


@dataclass(frozen=True, kw_only=True)
class Speech:
    """language: the code of what is spoken, None if the runtime is to find it out; `en` for an English-only model."""

    language: str | None
    task: str = "transcribe"
