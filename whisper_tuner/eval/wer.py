"""Word and character error rates over a whole set, raw and after Whisper's own text normalisation.

The rates are corpus-level: all errors divided by all reference words. A mean of the clips' rates would let a one-word
clip count as much as a minute of speech. Raw rates also compare case and punctuation, so they tell how a model writes.
Normalised rates compare only what is said; Whisper's published figures are of this kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jiwer

from whisper_tuner.languages import UNSPACED


@dataclass(frozen=True, kw_only=True)
class ErrorRates:
    """Counts of words, and of characters for `cer`. Rates are fractions; they pass 1 when much is inserted."""

    wer: float
    cer: float
    words: int  # in the references
    substitutions: int
    deletions: int
    insertions: int

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions


def error_rates(references: Sequence[str], hypotheses: Sequence[str]) -> ErrorRates:
    """Rates of a whole set. An empty reference adds its hypothesis as insertions; with no reference words at all the
    rate is the number of insertions. Raises ValueError for lists of different length.
    """
    words = jiwer.process_words(list(references), list(hypotheses))
    characters = jiwer.process_characters(list(references), list(hypotheses))
    return ErrorRates(
        wer=float(words.wer),
        cer=float(characters.cer),
        words=sum(map(len, words.references)),
        substitutions=words.substitutions,
        deletions=words.deletions,
        insertions=words.insertions,
    )


def text_normalizer(language: str | None) -> Callable[[str], str]:
    """Whisper's normaliser for a text's language (a code): English has its own; others lose case, punctuation, symbols.

    Languages written without spaces are split into characters, so that their WER means something.
    """
    from whisper_normalizer.basic import BasicTextNormalizer
    from whisper_normalizer.english import EnglishTextNormalizer

    if language == "en":
        return EnglishTextNormalizer()
    return BasicTextNormalizer(split_letters=language in UNSPACED)
