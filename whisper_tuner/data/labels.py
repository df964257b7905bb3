"""Transcripts -> the token ids that the decoder learns to write; and which transcripts fit, told without torch.

The decoder reads  <|startoftranscript|><|fr|><|transcribe|><|notimestamps|> text, and learns to write  text
<|endoftext|>; English-only models have neither language nor task. With timestamps it is
<|startoftranscript|><|fr|><|transcribe|><|0.00|> text<|2.40|>, and the two timestamps are learnt too; a text in several
parts has two for each. A previous text stands before all that:  <|startofprev|> previous text.

A clip without speech has no text: only end-of-text is learnt, right after the prompt (or <|0.00|>). OpenAI's
<|nospeech|> stands in the place of the language instead, but `generate` is given the language, and never asks for it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from whisper_tuner.config import Profile
from whisper_tuner.errors import ConfigError, DataError, ModelError
from whisper_tuner.hub import loading, model_file, settings_of
from whisper_tuner.languages import UNSPACED, language_code, text_language
from whisper_tuner.timed_text import Said

if TYPE_CHECKING:
    from transformers import WhisperForConditionalGeneration, WhisperTokenizer

IGNORED = -100  # the label value that the loss leaves out
MULTILINGUAL_START = 50_258  # <|startoftranscript|> in OpenAI's multilingual models; it is 50257 in English-only ones
NO_TIMESTAMPS, PREVIOUS = "<|notimestamps|>", "<|startofprev|>"
TIMESTAMP_S = 0.02
TIMESTAMPS_SHARE = 0.5  # the only one that was compared with 0: benchmarks/quality.py
TIMESTAMPS = 1501  # tokens, <|0.00|> to <|30.00|>
TIMESTAMP = re.compile(r"<\|\d+\.\d\d\|>")
LAYOUT = "Give a folder in transformers layout, or a hub id."


@dataclass(frozen=True)
class Label:
    """The ids that the decoder is given, `prompt`, and those that it learns to write after them, `written`."""

    prompt: tuple[int, ...]
    written: tuple[int, ...]

    def __len__(self) -> int:
        """Positions of the decoder that it takes."""
        return len(self.prompt) + len(self.written) - 1

    @property
    def inputs(self) -> list[int]:
        """Return what the decoder reads at each position."""
        return [*self.prompt, *self.written[:-1]]

    @property
    def targets(self) -> list[int]:
        """Return what the decoder is to write at each position; IGNORED inside the prompt."""
        return [IGNORED] * (len(self.prompt) - 1) + [*self.written]


@dataclass(frozen=True, kw_only=True)
class LabelEncoder:
    """Turns a transcript into a Label.

    language: the code of the profile's, "" for an English-only model. start: the decoder start token. first_timestamp:
    the id of <|0.00|>, None for a model without timestamps.
    """

    tokenizer: WhisperTokenizer
    language: str
    task: str
    start: int
    end: int
    max_tokens: int
    first_timestamp: int | None = None

    def encode(
        self, text: str, *, language: str = "", task: str = "", timed: Sequence[Said] = (), previous: str = ""
    ) -> Label:
        """The label of one transcript; an empty one says that there is no speech.

        language: a code; it and the task, if they are not the profile's; English-only models ignore both. timed: the
        text in its parts, if it is to have timestamps; it has none where the decoder has no room for them. previous:
        what was said before, cut to its end as Whisper does. Raises DataError if the decoder has no room for the text,
        or a language is unknown.
        """
        spoken = (language or self.language) if self.language else ""
        task = (task or self.task) if self.language else self.task
        ids = self._ids(text, spoken, task)
        prompt: tuple[int, ...] = (self.start,)
        try:
            if self.language:
                prompt += self._token(f"<|{spoken}|>"), self._token(f"<|{task}|>")
        except ModelError as error:
            raise DataError(error.args[0]) from None  # of a row: that of the profile was looked up at once
        label = Label((*prompt, self._token(NO_TIMESTAMPS)), (*ids, self.end))
        if len(label) > self.max_tokens:
            raise DataError(f"the text makes {len(label)} tokens, but the decoder takes {self.max_tokens}")
        if timed:
            with_parts: list[int] = []
            for part in timed:
                with_parts.append(self._timestamp(part.start))
                if part.text:  # `generate` lets no timestamp follow the first one at once
                    with_parts += [*self._ids(part.text, spoken, task), self._timestamp(part.end)]
            with_times = Label(prompt, (*with_parts, self.end))
            label = with_times if len(with_times) <= self.max_tokens else label
        # As Whisper's own decoding: at most the last 223 tokens of the usual 448 positions.
        room = min(self.max_tokens // 2 - 1, self.max_tokens - len(label) - 1)
        if previous and room > 0:
            before = self._ids(previous, spoken, task)[-room:]
            label = Label((self._token(PREVIOUS), *before, *label.prompt), label.written)
        return label

    def _ids(self, text: str, spoken: str, task: str) -> list[int]:
        return self.tokenizer(_spaced(text, spoken or "en", task), add_special_tokens=False).input_ids

    def _timestamp(self, seconds: float) -> int:
        if self.first_timestamp is None:
            raise DataError("the model has no timestamp tokens")
        return self.first_timestamp + min(max(0, round(seconds / TIMESTAMP_S)), TIMESTAMPS - 1)

    def _token(self, token: str) -> int:
        return token_id(self.tokenizer, token)


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
    multilingual, end = is_multilingual(model), model.config.eos_token_id
    if not isinstance(end, int):
        raise ModelError(f"config.json does not give eos_token_id as one whole number: {end!r}", remedy=LAYOUT)
    encoder = LabelEncoder(
        tokenizer=tokenizer,
        language=language_code(language) if multilingual else "",
        task=task if multilingual else "transcribe",
        start=model.config.decoder_start_token_id,
        end=end,
        max_tokens=model.config.max_target_positions,
        first_timestamp=first_timestamp(tokenizer.get_vocab(), model.config.vocab_size),
    )
    for token in (NO_TIMESTAMPS, *([f"<|{encoder.language}|>", f"<|{encoder.task}|>"] if multilingual else [])):
        token_id(tokenizer, token)
    return encoder


def first_timestamp(ids: Mapping[str, int], vocabulary: int) -> int | None:
    """Return the id of <|0.00|>, which follows <|notimestamps|>; older tokenizers do not name it. None if a model of so
    many tokens has none. ids: of the tokenizer's tokens.
    """
    first = ids.get(NO_TIMESTAMPS, vocabulary) + 1
    is_other = any(number == first and token != "<|0.00|>" for token, number in ids.items())
    return None if is_other or vocabulary < first + TIMESTAMPS else first


def added_words(tokenizer: WhisperTokenizer) -> dict[int, str]:
    """Return the words that were added to Whisper's vocabulary, by their ids: they stand behind its timestamps.

    Raises ModelError.
    """
    known, special = token_id(tokenizer, NO_TIMESTAMPS), set(tokenizer.all_special_ids)
    added = {token: text for text, token in tokenizer.get_added_vocab().items() if token > known}
    return {token: text for token, text in added.items() if token not in special and not TIMESTAMP.fullmatch(text)}


def check_special_tokens(profile: Profile) -> None:
    """Raises ConfigError for a setting that needs tokens which the base model lacks; ModelError."""
    base = profile.base_model
    if not profile.timestamps_share and not profile.previous_text_share:
        return
    for key, there in zip(("timestamps_share", "previous_text_share"), _special_tokens(base), strict=True):
        if getattr(profile, key) and not there:
            lacks = "timestamp tokens" if key == "timestamps_share" else f"token {PREVIOUS}"
            remedy = f"Set {key} = 0, or train a model that has them, such as openai/whisper-tiny."
            raise ConfigError(f"{key} = {getattr(profile, key):g}: {base} has no {lacks}", remedy=remedy)


def with_timestamps(profile: Profile) -> Profile:
    """Return the profile with its timestamps_share, chosen by what the base model can where it names none.

    Raises ModelError.
    """
    if profile.timestamps_share is not None:
        return profile
    can_join = not profile.caches_encoder and _special_tokens(profile.base_model)[0]
    return dataclasses.replace(profile, timestamps_share=TIMESTAMPS_SHARE if can_join else 0.0)


def _special_tokens(base_model: str) -> tuple[bool, bool]:
    """Tell whether a model has timestamps, and a token for previous text; without transformers, which takes a second to
    import. Raises ModelError.
    """
    try:
        stored = settings_of(base_model, "tokenizer.json")
        ids = dict(stored["model"]["vocab"] if stored else settings_of(base_model, "vocab.json"))
        named = [(each["content"], each["id"]) for each in stored["added_tokens"]] if stored else ()
        ids |= dict(named or settings_of(base_model, "added_tokens.json"))
        vocabulary = settings_of(base_model, "config.json").get("vocab_size", 0)
        return first_timestamp(ids, vocabulary) is not None, PREVIOUS in ids
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{base_model}: its tokenizer does not load", remedy="Copy the model again.") from None


@dataclass(frozen=True)
class TokenLimit:
    """`longest` tokens for the text itself: the decoder's positions without prompt and end-of-text.

    language: the code of the profile's, "" for an English-only model. languages: all that the model knows, if it says.
    """

    base_model: str
    longest: int
    language: str
    task: str
    languages: frozenset[str] = frozenset()

    def knows(self, language: str) -> bool:
        """Tell if a row may be in this language, a code; an English-only model ignores it."""
        return not self.language or not self.languages or language in self.languages

    def excess(self, text: str, language: str = "", task: str = "") -> str:
        """Why the decoder cannot hold this text, or ''. language: a code, and task, if they are not the profile's."""
        if len(text.encode()) + 1 <= self.longest:
            return ""  # Whisper's tokens are byte-level, so a text never has more tokens than bytes
        spoken = (language or self.language) if self.language else "en"
        tokens = self._count(_spaced(text, spoken, task or self.task))
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
    multilingual = _is_multilingual(generation.get("is_multilingual"), config.get("decoder_start_token_id"))
    stated = generation.get("lang_to_id")
    languages = frozenset(token.strip("<|>") for token in stated) if isinstance(stated, dict) else frozenset()
    prompt = 3 if multilingual else 1  # <|fr|><|transcribe|><|notimestamps|>
    return TokenLimit(
        base_model,
        positions - prompt - 1,
        language=_known_language(language, languages) if multilingual else "",
        task=task,
        languages=languages,
    )


def is_multilingual(model: WhisperForConditionalGeneration) -> bool:
    """Tell if the decoder's prompt names a language."""
    stated = getattr(model.generation_config, "is_multilingual", None)
    return _is_multilingual(stated, model.config.decoder_start_token_id)


def folder_is_multilingual(base_model: str | Path) -> bool:
    """Tell the same of a model that is not loaded. Raises ModelError."""
    stated = settings_of(base_model, "generation_config.json").get("is_multilingual")
    return _is_multilingual(stated, settings_of(base_model, "config.json").get("decoder_start_token_id"))


def _is_multilingual(stated: object, start: object) -> bool:
    """Go by what the model states, else by its start token: the size of a vocabulary with added words tells nothing."""
    return isinstance(start, int) and start >= MULTILINGUAL_START if stated is None else bool(stated)


def _spaced(text: str, spoken: str, task: str) -> str:
    """Whisper's own text begins with a space, and runtimes join the pieces of a long recording on it."""
    has_space = text_language(spoken, task) not in UNSPACED
    return f" {text}" if text and has_space and not text.startswith(" ") else text


def _known_language(language: str, known: frozenset[str]) -> str:
    if (plain := language.strip().strip("<|>").lower()) in known:
        return plain
    code = language_code(language)
    if known and code not in known:
        remedy = f"It knows: {', '.join(sorted(known))}."
        raise ConfigError(f"the model does not know the language '{language}'", remedy=remedy)
    return code


def token_id(tokenizer: WhisperTokenizer, token: str) -> int:
    """Return the id of a special token. Raises ModelError."""
    found = tokenizer.convert_tokens_to_ids(token)
    if found is None or found == tokenizer.unk_token_id:
        raise ModelError(f"the tokenizer has no token {token}", remedy="Use the tokenizer that belongs to the model.")
    assert isinstance(found, int)  # of one token
    return found
