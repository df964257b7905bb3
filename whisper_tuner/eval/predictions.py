"""What a model wrote for each clip of a test set, and what is wrong with it: `predictions.csv`, the worst rows.

Rates and counts of a row are those of the normalised texts, as in the corpus figures.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jiwer

from whisper_tuner.eval.evaluation import Row
from whisper_tuner.eval.wer import ErrorRates, error_rates
from whisper_tuner.files import write_atomically

PREDICTIONS = "predictions.csv"
EMPTY, REPETITION, LENGTH_RATIO = "empty", "repetition", "length-ratio"
REPEATED_WORDS = 6  # a loop is up to so many words
REPEATED_TIMES = 4  # said so often in a row, and more often than in the reference
LONGEST_RATIO = 2.0  # words heard to words said; or the other way round
RATIO_WORDS = 5  # the longer text has at least so many words

_COLUMNS = "id audio reference hypothesis reference_normalized hypothesis_normalized wer cer substitutions deletions"
COLUMNS = (*_COLUMNS.split(), "insertions", "duration_s", "flags")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    row: Row
    rates: ErrorRates
    flags: tuple[str, ...]

    @property
    def errors(self) -> int:
        return self.rates.substitutions + self.rates.deletions + self.rates.insertions


@dataclass(frozen=True)
class Aligned:
    """A word said and a word heard in its place; `mark` is S, D, I or empty."""

    reference: str
    hypothesis: str
    mark: str = ""


def predictions(rows: Iterable[Row]) -> list[Prediction]:
    return [
        Prediction(row=row, rates=error_rates([row.normalized[0]], [row.normalized[1]]), flags=flags(*row.normalized))
        for row in rows
    ]


def flags(reference: str, hypothesis: str) -> tuple[str, ...]:
    """What a person should look at: nothing heard, a loop, or far too much or little."""
    said, heard = reference.split(), hypothesis.split()
    found = []
    if said and not heard:
        found.append(EMPTY)
    if (times := _repeats(heard)) >= REPEATED_TIMES and times > _repeats(said):
        found.append(REPETITION)
    shorter, longer = sorted((len(said), len(heard)))
    if longer >= RATIO_WORDS and longer > LONGEST_RATIO * shorter:
        found.append(LENGTH_RATIO)
    return tuple(found)


def worst(found: Sequence[Prediction], count: int) -> list[Prediction]:
    """The rows with errors, the highest WER first."""
    wrong = [prediction for prediction in found if prediction.errors]
    return sorted(wrong, key=lambda p: (-p.rates.wer, -p.errors, p.row.id))[:count]


def write_predictions(path: Path, found: Iterable[Prediction]) -> Path:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for prediction in found:
        row, rates = prediction.row, prediction.rates
        texts = [row.id, row.audio, row.reference, row.hypothesis, *row.normalized]
        errors = [rates.substitutions, rates.deletions, rates.insertions]
        figures = [f"{rates.wer:.4f}", f"{rates.cer:.4f}", *errors, f"{row.duration_s:.3f}"]
        writer.writerow([*texts, *figures, " ".join(prediction.flags)])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue())
    return path


def align(reference: str, hypothesis: str) -> list[Aligned]:
    """The words of both texts side by side, in order."""
    said, heard = reference.split(), hypothesis.split()
    if not said:
        return [Aligned("", word, "I") for word in heard]
    pairs: list[Aligned] = []
    for chunk in jiwer.process_words(" ".join(said), " ".join(heard)).alignments[0]:
        left = said[chunk.ref_start_idx : chunk.ref_end_idx]
        right = heard[chunk.hyp_start_idx : chunk.hyp_end_idx]
        if chunk.type == "insert":
            pairs += [Aligned("", word, "I") for word in right]
        elif chunk.type == "delete":
            pairs += [Aligned(word, "", "D") for word in left]
        else:
            mark = "S" if chunk.type == "substitute" else ""
            pairs += [Aligned(*words, mark) for words in zip(left, right, strict=True)]
    return pairs


def _repeats(words: Sequence[str]) -> int:
    """How often the most repeated run of up to REPEATED_WORDS words stands in a row."""
    most = 1 if words else 0
    for length in range(1, REPEATED_WORDS + 1):
        matches = 0  # words equal to the one `length` before, in a row
        for earlier, later in zip(words, words[length:], strict=False):
            matches = matches + 1 if earlier == later else 0
            most = max(most, matches // length + 1)
    return most
