"""Transcripts -> the token ids that the decoder learns to write.

A label is  <|fr|><|transcribe|><|notimestamps|> text <|endoftext|>  for multilingual models and
<|notimestamps|> text <|endoftext|>  for English-only ones. The decoder start token is not part of it: the model
puts it in front when it shifts the labels to make the decoder's input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import WhisperForConditionalGeneration, WhisperTokenizer

from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.problems import Kind, Problem
from whisper_tuner.data.token_limit import MULTILINGUAL_VOCABULARY
from whisper_tuner.errors import DataError, ModelError
from whisper_tuner.languages import UNSPACED, language_code, text_language

IGNORED = -100  # the label value that the loss leaves out


@dataclass(frozen=True, kw_only=True)
class LabelEncoder:
    """Turns a transcript into label ids; `prefix` holds the prompt tokens without the decoder start token.

    `leading_space`: Whisper's own text begins with one, and runtimes join the pieces of a long recording on it.
    """

    tokenizer: WhisperTokenizer
    prefix: tuple[int, ...]
    end: int
    max_tokens: int
    leading_space: bool

    def encode(self, text: str) -> list[int]:
        """Label ids of one transcript. Raises DataError if the decoder has no room for it."""
        spaced = f" {text}" if self.leading_space and not text.startswith(" ") else text
        ids = [*self.prefix, *self.tokenizer(spaced, add_special_tokens=False).input_ids, self.end]
        if len(ids) > self.max_tokens:
            raise DataError(f"the text makes {len(ids)} tokens, and the decoder takes {self.max_tokens}")
        return ids


def label_encoder(
    model: WhisperForConditionalGeneration,
    tokenizer: WhisperTokenizer,
    *,
    language: str | None = None,
    task: str = "transcribe",
) -> LabelEncoder:
    """The encoder that fits a model; `language` is that of the speech, a code or an English name, and goes into the
    prompt. English-only models use neither it nor the task.

    Raises ConfigError for a language or task that the model does not know, ModelError for a tokenizer that lacks
    Whisper's tokens.
    """
    spoken = language_code(language) if is_multilingual(model) else "en"
    prompt = [f"<|{spoken}|>", f"<|{task}|>"] if is_multilingual(model) else []
    return LabelEncoder(
        tokenizer=tokenizer,
        prefix=tuple(_token_id(tokenizer, token) for token in (*prompt, "<|notimestamps|>")),
        end=model.config.eos_token_id,
        max_tokens=model.config.max_target_positions,
        leading_space=text_language(spoken, task) not in UNSPACED,
    )


def is_multilingual(model: WhisperForConditionalGeneration) -> bool:
    """Whether the decoder's prompt names a language: as the model states, else by vocabulary size, as OpenAI does."""
    stated = getattr(model.generation_config, "is_multilingual", None)
    return model.config.vocab_size >= MULTILINGUAL_VOCABULARY if stated is None else bool(stated)


def split_encodable(samples: Iterable[Sample], encoder: LabelEncoder) -> tuple[list[Sample], list[Problem]]:
    """The samples whose text the decoder can hold, and a Problem for each of the others."""
    kept, problems = [], []
    for sample in samples:
        try:
            encoder.encode(sample.text)
            kept.append(sample)
        except DataError as error:
            problems.append(Problem(sample.line, f"{sample.id}: {error}", Kind.TOKENS))
    return kept, problems


def pad_labels(labels: Sequence[Sequence[int]]) -> torch.Tensor:
    """int64 [B, longest], filled up with -100; not with the pad token, which is end-of-text and has to be learnt."""
    padded = torch.full((len(labels), max(map(len, labels))), IGNORED, dtype=torch.int64)
    for row, ids in zip(padded, labels, strict=True):
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
    return padded


def _token_id(tokenizer: WhisperTokenizer, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    if found is None or found == tokenizer.unk_token_id:
        raise ModelError(f"the tokenizer has no token {token}", remedy="Use the tokenizer that belongs to the model.")
    return found
