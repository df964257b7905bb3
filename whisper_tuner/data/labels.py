"""Transcripts -> the token ids that the decoder learns to write; and which transcripts fit, told without torch.

A label is  <|fr|><|transcribe|><|notimestamps|> text <|endoftext|>  for multilingual models and
<|notimestamps|> text <|endoftext|>  for English-only ones. The decoder start token is not part of it: the model
puts it in front when it shifts the labels to make the decoder's input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from whisper_tuner.errors import ConfigError, DataError, ModelError
from whisper_tuner.hub import loading, model_file, settings_of
from whisper_tuner.languages import UNSPACED, language_code, text_language

if TYPE_CHECKING:
    from transformers import WhisperForConditionalGeneration, WhisperTokenizer

IGNORED = -100  # the label value that the loss leaves out
MULTILINGUAL_VOCABULARY = 51_865  # tokens; OpenAI takes a model with at least so many for multilingual
LAYOUT = "Give a folder in transformers layout, or a hub id."


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
        text = _spaced(text, self.leading_space)
        ids = [*self.prefix, *self.tokenizer(text, add_special_tokens=False).input_ids, self.end]
        if len(ids) > self.max_tokens:
            raise DataError(f"the text makes {len(ids)} tokens, but the decoder takes {self.max_tokens}")
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


@dataclass(frozen=True)
class TokenLimit:
    """`longest` tokens for the text itself: the decoder's positions without prompt and end-of-text."""

    base_model: str
    longest: int
    leading_space: bool

    def excess(self, text: str) -> str:
        """Why the decoder cannot hold this text, or ''."""
        if len(text.encode()) + 1 <= self.longest:
            return ""  # Whisper's tokens are byte-level, so a text never has more tokens than bytes
        tokens = self._count(_spaced(text, self.leading_space))
        return f"the text makes {tokens} tokens, but the decoder takes {self.longest}" if tokens > self.longest else ""

    @cached_property
    def _count(self) -> Callable[[str], int]:
        with loading(f"{self.base_model}: its tokenizer does not load", remedy="Copy the model again."):
            if file := model_file(self.base_model, "tokenizer.json"):
                from tokenizers import Tokenizer

                tokenizer = Tokenizer.from_file(str(file))
                return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
            from transformers import WhisperTokenizer

            slow = WhisperTokenizer.from_pretrained(self.base_model)
            return lambda text: len(slow(text, add_special_tokens=False).input_ids)


def token_limit(base_model: str, *, language: str = "", task: str = "transcribe") -> TokenLimit:
    """The limit of a model's folder or hub id, for speech in `language`; what `label_encoder` says, without loading it.

    Raises ConfigError for a language that it does not know, ModelError.
    """
    config, generation = settings_of(base_model, "config.json"), settings_of(base_model, "generation_config.json")
    if not config:
        raise ModelError(f"{base_model} has no config.json", remedy=LAYOUT)
    vocabulary, positions = config.get("vocab_size"), config.get("max_target_positions", 448)
    if type(vocabulary) is not int or type(positions) is not int:
        what = f"{base_model}: config.json does not give vocab_size and max_target_positions as whole numbers"
        raise ModelError(what, remedy=LAYOUT)
    multilingual = _is_multilingual(generation.get("is_multilingual"), vocabulary)
    spoken = _known_language(language, generation) if multilingual else "en"
    prompt = 3 if multilingual else 1  # <|fr|><|transcribe|><|notimestamps|>
    return TokenLimit(base_model, positions - prompt - 1, leading_space=text_language(spoken, task) not in UNSPACED)


def is_multilingual(model: WhisperForConditionalGeneration) -> bool:
    """Whether the decoder's prompt names a language."""
    return _is_multilingual(getattr(model.generation_config, "is_multilingual", None), model.config.vocab_size)


def _is_multilingual(stated: object, vocabulary: int) -> bool:
    """As the model states, else by vocabulary size, as OpenAI does."""
    return vocabulary >= MULTILINGUAL_VOCABULARY if stated is None else bool(stated)


def _spaced(text: str, leading_space: bool) -> str:
    return f" {text}" if leading_space and not text.startswith(" ") else text


def _known_language(language: str, generation: dict) -> str:
    stated = generation.get("lang_to_id")
    known = {token.strip("<|>") for token in stated} if isinstance(stated, dict) else set()
    if (plain := language.strip().strip("<|>").lower()) in known:
        return plain  # without `language_code`, which imports half a second of transformers
    code = language_code(language)
    if known and code not in known:
        raise ConfigError(
            f"the model does not know the language '{language}'", remedy=f"It knows: {', '.join(sorted(known))}."
        )
    return code


def _token_id(tokenizer: WhisperTokenizer, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    if found is None or found == tokenizer.unk_token_id:
        raise ModelError(f"the tokenizer has no token {token}", remedy="Use the tokenizer that belongs to the model.")
    return found
