import csv
from collections import Counter
from pathlib import Path

import pytest

from whisper_tuner.data.dataset import Sample
from whisper_tuner.eval.evaluation import evaluate
from whisper_tuner.eval.predictions import (
    COLUMNS,
    EMPTY,
    REPETITION,
    TOO_LONG,
    TOO_SHORT,
    Aligned,
    Prediction,
    align,
    flags,
    worst,
    write_predictions,
)
from whisper_tuner.eval.wer import error_rates


def row(name: str, reference: str, hypothesis: str) -> Prediction:
    sample = Sample(id=name, audio=Path(f"{name}.wav"), text=reference, duration_s=1.5)
    return Prediction(sample, hypothesis, (reference.lower(), hypothesis.lower()), 0.0, hypothesis)


@pytest.mark.parametrize(
    ("said", "heard", "expected"),
    [
        ("one two", "one two", ()),
        ("one two", "", (EMPTY,)),
        ("", "", ()),
        ("", "you", (TOO_LONG,)),
        ("no no no no no", "no no no no no", ()),  # so it was said
        ("turn it off", "no no no no", (REPETITION,)),
        ("turn it off", "the same as the same as the same as the same as", (REPETITION, TOO_LONG)),
        ("a b c d e f g", "a b c", (TOO_SHORT,)),
        ("a", "a b c", ()),  # too short to tell
        ("a b c d e f", "", (EMPTY, TOO_SHORT)),
    ],
)
def test_flags(said, heard, expected):
    assert flags(said, heard) == expected


def test_a_row_counts_its_own_errors_and_the_file_reads_back(tmp_path):
    rows = [row("b", "Two words here", "Two birds"), row("a", "fine", "Fine"), row("c", 'say "yes", now', "")]
    path = write_predictions(tmp_path / "new" / "predictions.csv", rows)
    with path.open(encoding="utf-8", newline="") as file:
        stored = list(csv.DictReader(file))
    assert tuple(stored[0]) == COLUMNS
    figures = ("wer", "substitutions", "deletions", "insertions", "duration_s", "flags")
    assert [stored[0][key] for key in figures] == ["0.6667", "1", "1", "0", "1.500", ""]
    assert (stored[0]["reference_normalized"], stored[0]["hypothesis"]) == ("two words here", "Two birds")
    assert (stored[1]["wer"], stored[2]["reference"], stored[2]["flags"]) == ("0.0000", 'say "yes", now', "empty")


def test_the_worst_come_first_and_rows_without_errors_never():
    rows = [row("fine", "a b", "a b"), row("half", "a b", "a c"), row("all", "a b", "c d"), row("more", "a", "b c d")]
    assert [p.sample.id for p in worst(rows, 5)] == ["more", "all", "half"]
    assert [p.sample.id for p in worst(rows, 1)] == ["more"]


def test_alignment_keeps_every_word_and_marks_what_differs():
    pairs = align("we need eight bags of rice", "we ate bags of white rice")
    assert [pair.reference for pair in pairs if pair.reference] == ["we", "need", "eight", "bags", "of", "rice"]
    assert [pair.hypothesis for pair in pairs if pair.hypothesis] == ["we", "ate", "bags", "of", "white", "rice"]
    assert "".join(pair.mark for pair in pairs) in ("DSI", "SDI")
    assert [pair.mark for pair in align("", "you know")] == ["I", "I"]
    assert align("", "") == []
    assert align("no one", "") == [Aligned("no", "", "D"), Aligned("one", "", "D")]
    assert align("日 本", "日 木") == [Aligned("日", "日"), Aligned("本", "木", "S")]


@pytest.mark.parametrize(("said", "heard"), [("", "a b"), ("a b", ""), ("a b c d", "b x d e f"), ("日 本 語", "日 本")])
def test_marks_of_an_alignment_are_the_counted_errors(said, heard):
    rates = error_rates([said], [heard])
    counted = {"S": rates.substitutions, "D": rates.deletions, "I": rates.insertions}
    assert Counter(pair.mark for pair in align(said, heard) if pair.mark) == Counter(counted)


def test_rows_of_an_evaluation_add_up_to_its_rates(multilingual, clips):
    result = evaluate(*multilingual, clips[:4], language="fr")
    assert sum(row.rates.errors for row in result.rows) == result.normalized.errors
    assert [row.sample.audio for row in result.rows] == [clip.audio for clip in clips[:4]]
    assert result.speed == pytest.approx(sum(clip.duration_s for clip in clips[:4]) / result.seconds)
