"""Word and character error rates over a whole set, raw and after Whisper's text normalisation, and how sure they are.

The rates are corpus-level: all errors divided by all reference words. A mean of the clips' rates would let a one-word
clip count as much as a minute of speech. Raw rates also compare case and punctuation, so they tell how a model writes.
Normalised rates compare only what is said; Whisper's published figures are of this kind. The normaliser decides much
of such a figure, so its name and version go with it. Intervals and paired differences come from resampling clips
(Bisani and Ney, ICASSP 2004).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import jiwer
import numpy as np

from whisper_tuner.languages import UNSPACED
from whisper_tuner.text import wer_change, wer_verdict

DRAWS = 10_000
LEVEL = (2.5, 97.5)  # per cent: an interval of 95 %
_AT_ONCE = 2_000_000  # clips that are drawn together

OURS = "multimac-unicode 1"  # its name and version: another figure for any text needs another number
# Languages whose words have marks without a character of their own: vowel signs, tones, stress; and Turkish,
# Azerbaijani and Tatar, whose İ becomes an i with such a mark. Whisper's normaliser splits words at each.
MARKED = {"ar", "as", "az", "be", "bg", "bn", "bo", "fa", "gu", "he", "hi", "km", "kn", "ln", "lo", "mk", "ml", "mr"}
MARKED |= {"my", "ne", "pa", "ps", "ru", "sa", "sd", "si", "sr", "ta", "te", "th", "tr", "tt", "uk", "ur", "yi", "yo"}
DOTTED = {"az", "tr", "tt"}  # I is the capital of ı there
_CHILLUS = tuple(zip("ണനരലളക", "ൺൻർൽൾൿ", strict=True))  # Malayalam's final consonants, once three characters
# Tatweel, variation selectors, and more that changes the look of a word alone.
_UNSEEN = dict.fromkeys((0x34F, 0x640, 0x17B4, 0x17B5, *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)))
# Persian words are spelled with a non-joiner, which is only seen between two letters of which the first would join.
_IDLE_JOINER = re.compile(
    "(?<![\u0626\u0628\u062a-\u062e\u0633-\u0647\u0649\u064a\u066e\u066f\u0678-\u0687\u069a-\u06c2\u06cc\u06d0])\u200c"
    "|\u200c(?![\u0620-\u06d3])"
)

Normalizer = tuple[str, Callable[[str], str]]
"""Its name and version, and what makes texts comparable."""
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


def error_rates(references: Sequence[str], hypotheses: Sequence[str], *, spaced: bool = True) -> ErrorRates:
    """Compute the rates of a whole set. An empty reference adds its hypothesis as insertions.

    With no reference words at all the rate is the number of insertions. spaced: False where spaces were put between
    characters, and so are none themselves. Raises ValueError for lists of different length.
    """
    words = jiwer.process_words(list(references), list(hypotheses))
    said, heard = ([text if spaced else "".join(text.split()) for text in each] for each in (references, hypotheses))
    characters = jiwer.process_characters(said, heard)
    return ErrorRates(
        wer=float(words.wer),
        cer=float(characters.cer),
        words=sum(map(len, words.references)),
        substitutions=words.substitutions,
        deletions=words.deletions,
        insertions=words.insertions,
    )


def text_normalizer(language: str | None) -> Callable[[str], str]:
    """Return the normaliser that a language (a code) is measured with."""
    return text_normalizers(language)[0][1]


def text_normalizers(language: str | None) -> tuple[Normalizer, Normalizer]:
    """Return the normaliser that a language (a code) is measured with, and one whose WER is told beside it.

    Ours is for those of MARKED, and where the language is not known. It differs from Whisper's basic one in what it
    does to marks. Languages without spaces are split into characters, so that their WER means something.
    """
    from whisper_normalizer.basic import BasicTextNormalizer
    from whisper_normalizer.english import EnglishTextNormalizer

    release, is_split = version("whisper-normalizer"), language in UNSPACED
    keeping = BasicTextNormalizer(split_letters=is_split)
    keeping.clean = partial(_with_marks, has_points=language == "yi")
    ours = OURS, lambda text: keeping(_lower_i(text) if language in DOTTED else text)
    if language == "en":
        english = EnglishTextNormalizer()
        # It leaves a dot of "..." over, which would count as a word.
        return (f"whisper-english {release}", lambda text: english(re.sub(r"…|\.\.\.", " ", text))), ours
    basic = f"whisper-basic {release}", BasicTextNormalizer(split_letters=is_split)
    return (ours, basic) if language is None or language in MARKED else (basic, ours)


def _lower_i(text: str) -> str:
    return unicodedata.normalize("NFC", text).replace("İ", "i").replace("I", "ı")


def _with_marks(text: str, *, has_points: bool) -> str:
    """Replace punctuation and symbols by spaces, and keep marks, but for those that writers may leave out.

    These are stress marks of Cyrillic, and vowel points of Arabic and Hebrew. has_points: the language is spelled so.
    """
    text = unicodedata.normalize("NFKC", text).translate(_UNSEEN).replace("i\u0307", "i")
    for letter, chillu in _CHILLUS:
        text = text.replace(f"{letter}\u0d4d\u200d", chillu)
    kept = ""
    for char in text:
        kind, before = unicodedata.category(char), kept[-1:]
        if kind[0] in "SP" or char == "\u200b":  # a space without a width
            kept += " "
        elif kind in ("Mn", "Mc"):
            is_point = "\u0590" < char < "\u0700" and not has_points
            is_stress = char in "\u0300\u0301" and "\u0400" <= before < "\u0530"
            kept += char if before.strip() and not is_point and not is_stress else ""
        elif kind not in ("Me", "Cf") or char == "\u200c":
            kept += char
    return _IDLE_JOINER.sub("", kept)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The ends of an interval, in per cent, with two digits: records have these, so all tables round the same."""

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
    clips: int

    @property
    def interval(self) -> Interval:
        return Interval(low=self.low, high=self.high)

    @property
    def verdict(self) -> str:
        return wer_verdict((self.low, self.high), self.clips)

    def __str__(self) -> str:
        return wer_change(self.points, (self.low, self.high), self.clips)


def wer_interval(clips: Clips) -> Interval | None:
    """Return the interval of the corpus-level WER; None if there are no words."""
    errors, words = _columns(clips)
    if not words.sum():
        return None
    low, high = np.percentile([rate for (rate,) in _drawn([errors], words)], LEVEL)
    return Interval(low=round(float(low), 2), high=round(float(high), 2))


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
    return Difference(points=float(points), low=float(low), high=float(high), p=p, clips=len(words))


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
