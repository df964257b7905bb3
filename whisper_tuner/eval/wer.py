"""Word and character error rates over a whole set, raw and after Whisper's own text normalisation.

Corpus-level: all errors over all reference words. The mean of each clip's rate would let a one-word clip count as much
as a minute of speech. Raw compares case and punctuation too, and so tells how a model writes; normalised compares what
is said, and is what Whisper's published figures are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jiwer

from whisper_tuner.languages import UNSPACED


@dataclass(frozen=True, kw_only=True)
class ErrorRates:
    """Counts of words (and of characters for `cer`); rates are fractions, and pass 1 when much is inserted."""

    wer: float
    cer: float
    words: int  # in the references
    substitutions: int
    deletions: int
    insertions: int


def error_rates(references: Sequence[str], hypotheses: Sequence[str]) -> ErrorRates:
    """Rates of a whole set. An empty reference adds its hypothesis as insertions; with no reference words at all the
    rate is the number of insertions."""
    if len(references) != len(hypotheses):
        raise ValueError(f"{len(references)} references for {len(hypotheses)} hypotheses")
    if not references:
        return ErrorRates(wer=0.0, cer=0.0, words=0, substitutions=0, deletions=0, insertions=0)
    words = jiwer.process_words(list(references), list(hypotheses))
    return ErrorRates(
        wer=_rate(words),
        cer=_rate(jiwer.process_characters(list(references), list(hypotheses))),
        words=_length(words),
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


def _rate(output: jiwer.WordOutput | jiwer.CharacterOutput) -> float:
    return (output.substitutions + output.deletions + output.insertions) / max(_length(output), 1)


def _length(output: jiwer.WordOutput | jiwer.CharacterOutput) -> int:
    return output.hits + output.substitutions + output.deletions
