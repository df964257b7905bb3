"""Which language is spoken, and which one is written: of what is translated, the text is English."""

from __future__ import annotations

from collections.abc import Iterable

from whisper_tuner.errors import ConfigError

UNSPACED = frozenset({"zh", "yue", "ja", "th", "lo", "my", "km", "bo"})  # languages written without spaces


def language_code(language: str | None) -> str:
    """`fr` for `fr`, `French` or `<|fr|>`. Raises ConfigError."""
    # Half a second to import; what needs a language alone must not wait for torch as well.
    from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

    plain = (language or "").strip().strip("<|>").lower()
    code = TO_LANGUAGE_CODE.get(plain, plain)
    if code not in LANGUAGES:
        what = f"unknown language '{language}'" if plain else "a multilingual Whisper needs a language"
        raise ConfigError(what, remedy="Set language to a code or an English name, such as fr or French.")
    return code


def text_language(spoken: str | None, task: str) -> str | None:
    """The code of the language that is written: for labels, references and what a model writes.

    `spoken` is the code of the speech's, None if a model is to find it out. Whisper translates into English alone.
    """
    return "en" if task == "translate" else spoken


def joined(pieces: Iterable[str], language: str | None) -> str:
    """One text of its pieces, as its language (a code) is written."""
    return ("" if language in UNSPACED else " ").join(filter(None, pieces))
