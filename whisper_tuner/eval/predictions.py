"""What a model wrote for each clip of a test set, and its errors: `predictions.csv`, the worst rows, the words aligned.

A row's rates and counts are those of its normalised texts, as in the corpus figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

import jiwer

from whisper_tuner.data.dataset import Sample
from whisper_tuner.eval.wer import Difference, ErrorRates, error_rates, wer_difference
from whisper_tuner.files import write_table

PREDICTIONS = "predictions.csv"
EMPTY, REPETITION, TOO_LONG, TOO_SHORT = "empty", "repetition", "hallucination", "too-short"
REPEATED_WORDS = 6  # the longest phrase that counts as a loop
REPEATED_TIMES = 4  # a loop comes at least this often in a row, and more often than in the reference
LONGEST_RATIO = 2.0  # of the longer text to the shorter one, in words
RATIO_WORDS = 5  # with fewer words in both texts the ratio tells nothing, unless nothing was said
MARKS = {"equal": "", "substitute": "S", "delete": "D", "insert": "I"}  # jiwer's words for them

TEXTS = ("id", "audio", "reference", "hypothesis", "reference_normalized", "hypothesis_normalized")
ERRORS = ("wer", "cer", "substitutions", "deletions", "insertions")
COLUMNS = (*TEXTS, *ERRORS, "duration_s", "flags", "temperature", "greedy", "normalizer")


@dataclass(frozen=True)
class Prediction:
    """A model's text for a clip; `normalized` is (reference, hypothesis) after the text normaliser.

    temperature: at which it was decoded. greedy: what it wrote at 0. logprob: the mean of its tokens, if it is known.
    normalizer: its name. spaced: see error_rates.
    """

    sample: Sample
    hypothesis: str
    normalized: tuple[str, str]
    temperature: float
    greedy: str
    logprob: float | None = field(default=None, compare=False)
    normalizer: str = ""
    spaced: bool = True

    @cached_property
    def rates(self) -> ErrorRates:
        reference, hypothesis = self.normalized
        return error_rates([reference], [hypothesis], spaced=self.spaced)

    @property
    def was_in_doubt(self) -> bool:
        return self.temperature > 0 or self.hypothesis != self.greedy

    @property
    def flags(self) -> tuple[str, ...]:
        return flags(*self.normalized)


@dataclass(frozen=True)
class Aligned:
    """A word said and the word heard in its place; one of them is empty for a deletion or an insertion.

    `mark` is S, D, I, or empty where both are equal.
    """

    reference: str
    hypothesis: str
    mark: str = ""


def flags(reference: str, hypothesis: str) -> tuple[str, ...]:
    """Name what a person should look at: nothing heard, a phrase that loops, or far more or less heard than said."""
    said, heard = reference.split(), hypothesis.split()
    found = []
    if said and not heard:
        found.append(EMPTY)
    if (times := _repeats(heard)) >= REPEATED_TIMES and times > _repeats(said):
        found.append(REPETITION)
    shorter, longer = sorted((len(said), len(heard)))
    if (longer >= RATIO_WORDS and longer > LONGEST_RATIO * shorter) or (heard and not said):
        found.append(TOO_LONG if len(heard) > len(said) else TOO_SHORT)
    return tuple(found)


def worst(found: Sequence[Prediction], count: int) -> list[Prediction]:
    """Return the rows with errors, the highest WER first."""
    wrong = [prediction for prediction in found if prediction.rates.errors]
    return sorted(wrong, key=lambda p: (-p.rates.wer, -p.rates.errors, p.sample.id))[:count]


def counts(found: Iterable[Prediction]) -> list[tuple[int, int]]:
    """Return (errors, words) of each clip, after the normaliser."""
    return [(prediction.rates.errors, prediction.rates.words) for prediction in found]


def difference(found: Sequence[Prediction], reference: Sequence[Prediction]) -> Difference | None:
    """Compare the WER of two models; None without words, or if a clip was readable for one of them only."""
    if [one.sample.id for one in found] != [one.sample.id for one in reference]:
        return None
    return wer_difference(counts(found), counts(reference))


def write_predictions(path: Path, found: Iterable[Prediction]) -> Path:
    rows = []
    for one in found:
        sample, rates = one.sample, one.rates
        texts = [sample.id, sample.audio, sample.text, one.hypothesis, *one.normalized]
        errors = [rates.substitutions, rates.deletions, rates.insertions]
        figures = [f"{rates.wer:.4f}", f"{rates.cer:.4f}", *errors, f"{sample.duration_s:.3f}"]
        rows.append([*texts, *figures, " ".join(one.flags), one.temperature, one.greedy, one.normalizer])
    write_table(path, COLUMNS, rows)
    return path


def align(reference: str, hypothesis: str) -> list[Aligned]:
    """Set the words of both texts side by side, in order, as the error rates count them."""
    output = jiwer.process_words(reference, hypothesis)
    pairs: list[Aligned] = []
    for chunk in output.alignments[0]:
        said = output.references[0][chunk.ref_start_idx : chunk.ref_end_idx]
        heard = output.hypotheses[0][chunk.hyp_start_idx : chunk.hyp_end_idx]
        pairs += [Aligned(*words, MARKS[chunk.type]) for words in zip_longest(said, heard, fillvalue="")]
    return pairs


def _repeats(words: Sequence[str]) -> int:
    """Count how many times in a row the most repeated phrase of up to REPEATED_WORDS words comes."""
    most = 1 if words else 0
    for length in range(1, REPEATED_WORDS + 1):
        matches = 0  # words equal to the one `length` before, in a row
        for earlier, later in zip(words, words[length:], strict=False):
            matches = matches + 1 if earlier == later else 0
            most = max(most, matches // length + 1)
    return most
