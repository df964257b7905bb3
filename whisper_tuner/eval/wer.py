"""Word and character error rates over a whole set, raw and after Whisper's text normalisation, and how sure they are.

The rates are corpus-level: all errors divided by all reference words. A mean of the clips' rates would let a one-word
clip count as much as a minute of speech. Raw rates also compare case and punctuation, so they tell how a model writes.
Normalised rates compare only what is said; Whisper's published figures are of this kind. Intervals and paired
differences come from resampling clips (Bisani and Ney, ICASSP 2004).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jiwer
import numpy as np

from whisper_tuner.languages import UNSPACED

DRAWS = 10_000
LEVEL = (2.5, 97.5)  # per cent: an interval of 95 %
_AT_ONCE = 2_000_000  # clips that are drawn together

Clips = Sequence[tuple[int, int]]
"""Of each clip (errors, words in its reference)."""


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
    """Compute the rates of a whole set. An empty reference adds its hypothesis as insertions.

    With no reference words at all the rate is the number of insertions. Raises ValueError for lists of different
    length.
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
    """Return Whisper's normaliser for a language (a code): English has its own; others lose case, punctuation, symbols.

    Languages written without spaces are split into characters, so that their WER means something.
    """
    from whisper_normalizer.basic import BasicTextNormalizer
    from whisper_normalizer.english import EnglishTextNormalizer

    if language == "en":
        return EnglishTextNormalizer()
    return BasicTextNormalizer(split_letters=language in UNSPACED)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The ends of an interval, in per cent."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.1f} to {self.high:.1f}"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """points: of WER by which the first is higher. p: the chance of one at least as far from 0 if there were none."""

    points: float
    low: float
    high: float
    p: float

    @property
    def interval(self) -> Interval:
        return Interval(low=self.low, high=self.high)

    def __str__(self) -> str:
        """`-5.2 points (-7.4 to -3.1), p < 0.001`, and whether that is more than chance."""
        p = f"p = {self.p:.3f}" if self.p >= 0.001 else "p < 0.001"
        better = "better" if self.points <= 0 else "worse"
        verdict = f": no {better} than chance" if self.low <= 0 <= self.high else ""
        return f"{self.points:+.1f} points ({self.low:+.1f} to {self.high:+.1f}), {p}{verdict}"


def wer_interval(clips: Clips) -> Interval | None:
    """Return the interval of the corpus-level WER; None if there are no words."""
    errors, words = _columns(clips)
    if not words.sum():
        return None
    low, high = np.percentile([rate for (rate,) in _drawn([errors], words)], LEVEL)
    return Interval(low=float(low), high=float(high))


def wer_difference(first: Clips, second: Clips) -> Difference | None:
    """Compare two models on the same clips, in the same order; None without words. Raises ValueError for others."""
    (errors, words), (others, same_words) = _columns(first), _columns(second)
    if not np.array_equal(words, same_words):
        raise ValueError("two models can only be compared on the same clips")
    if not words.sum():
        return None
    points = 100 * (errors.sum() - others.sum()) / words.sum()
    differences = np.array([one - other for one, other in _drawn([errors, others], words)])
    low, high = np.percentile(differences, LEVEL)
    # Two-sided: twice the part of resamplings on the rarer side of 0. The draws limit how small it can be.
    rarer = min((differences <= 0).sum(), (differences >= 0).sum())
    p = min(1.0, 2 * (rarer + 1) / (len(differences) + 1))
    return Difference(points=float(points), low=float(low), high=float(high), p=p)


def _columns(clips: Clips) -> tuple[np.ndarray, np.ndarray]:
    counts = np.array(clips, dtype=float).reshape(-1, 2)
    return counts[:, 0], counts[:, 1]


def _drawn(errors: Sequence[np.ndarray], words: np.ndarray) -> Iterator[tuple[float, ...]]:
    """Yield the rates of each of `errors` in resamplings of the clips; the same clips for all of them."""
    chance, clips, left = np.random.default_rng(0), len(words), DRAWS
    while left:
        count = min(left, max(1, _AT_ONCE // clips))
        picked = chance.integers(clips, size=(count, clips))
        total = np.maximum(words[picked].sum(axis=1), 1)
        yield from zip(*(100 * each[picked].sum(axis=1) / total for each in errors), strict=True)
        left -= count
