"""Which transcripts fit the decoder: counts tokens as labels.LabelEncoder does, without torch and transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from whisper_tuner.errors import ConfigError, ModelError
from whisper_tuner.hub import model_file
from whisper_tuner.json_text import parse_json
from whisper_tuner.languages import UNSPACED, language_code, text_language
from whisper_tuner.loading import loading

MULTILINGUAL_VOCABULARY = 51_865  # tokens; OpenAI takes a model with at least so many for multilingual


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
        spaced = f" {text}" if self.leading_space and not text.startswith(" ") else text
        tokens = self._count(spaced)
        return f"the text makes {tokens} tokens, and the decoder takes {self.longest}" if tokens > self.longest else ""

    @cached_property
    def _count(self) -> Callable[[str], int]:
        if file := model_file(self.base_model, "tokenizer.json"):
            from tokenizers import Tokenizer

            with loading(f"{file} does not load", remedy="Copy the model again."):
                tokenizer = Tokenizer.from_file(str(file))
            return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
        from transformers import WhisperTokenizer

        with loading(f"{self.base_model} has no tokenizer", remedy="Copy the model again."):
            slow = WhisperTokenizer.from_pretrained(self.base_model)
        return lambda text: len(slow(text, add_special_tokens=False).input_ids)


def token_limit(base_model: str, *, language: str = "", task: str = "transcribe") -> TokenLimit:
    """The limit of a model's folder or hub id, for speech in `language`.

    Raises ConfigError for a language that it does not know, ModelError.
    """
    config, generation = settings_of(base_model, "config.json"), settings_of(base_model, "generation_config.json")
    if not config:
        raise ModelError(
            f"{base_model} has no config.json", remedy="Give a folder in transformers layout, or a hub id."
        )
    stated = generation.get("is_multilingual")
    vocabulary, positions = config.get("vocab_size", 0), config.get("max_target_positions", 448)
    if type(vocabulary) is not int or type(positions) is not int:
        raise ModelError(
            f"{base_model}: config.json is damaged: vocab_size or max_target_positions is no whole number",
            remedy="Copy the model again.",
        )
    multilingual = vocabulary >= MULTILINGUAL_VOCABULARY if stated is None else bool(stated)
    spoken = _code(language, generation) if multilingual else "en"
    prompt = 3 if multilingual else 1  # <|fr|><|transcribe|><|notimestamps|>
    longest = positions - prompt - 1
    return TokenLimit(base_model, longest, leading_space=text_language(spoken, task) not in UNSPACED)


def settings_of(base_model: str, name: str) -> dict:
    """A JSON file of a model; empty if it has none."""
    file = model_file(base_model, name)
    if file is None:
        return {}
    try:
        stored = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} is damaged: {error}", remedy="Copy the model again.") from None
    return stored if isinstance(stored, dict) else {}


def _code(language: str, generation: dict) -> str:
    stated = generation.get("lang_to_id")
    known = {token.strip("<|>") for token in stated} if isinstance(stated, dict) else set()
    if (plain := language.strip().strip("<|>").lower()) in known:
        return plain
    code = language_code(language)
    if known and code not in known:
        raise ConfigError(
            f"the model does not know the language '{language}'", remedy=f"It knows: {', '.join(sorted(known))}."
        )
    return code
