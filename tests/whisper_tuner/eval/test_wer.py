import numpy as np
import pytest
from scipy.stats import bootstrap

from whisper_tuner.eval.wer import error_rates, text_normalizer, wer_difference, wer_interval


def test_counts_by_hand():
    rates = error_rates(["the cat sat", "on the mat"], ["the cat sat down", "in mat"])
    assert (rates.substitutions, rates.deletions, rates.insertions, rates.words) == (1, 1, 1, 6)
    assert rates.wer == pytest.approx(3 / 6)
    assert error_rates(["abcd"], ["abxd"]).cer == pytest.approx(1 / 4)


def test_rates_are_of_the_corpus_and_not_means_of_clips():
    rates = error_rates(["one", "a b c d e f g h i"], ["two", "a b c d e f g h i"])
    assert rates.wer == pytest.approx(1 / 10)


def test_empty_references_add_insertions():
    rates = error_rates(["", "a b"], ["x", "a b"])
    assert rates.wer == pytest.approx(1 / 2)
    assert error_rates([""], ["x"]).wer == 1
    assert error_rates([""], [""]).wer == 0
    assert error_rates([], []).wer == 0
    assert error_rates(["a b"], [""]).deletions == 2


def test_lists_of_different_length_are_refused():
    with pytest.raises(ValueError, match="2 reference and 1 hypothesis"):
        error_rates(["a", "b"], ["a"])


def test_a_language_without_spaces_is_compared_by_characters():
    normalize = text_normalizer("ja")
    rates = error_rates([normalize("日本語です")], [normalize("日本のです")])
    assert (rates.words, rates.substitutions, rates.wer) == (5, 1, pytest.approx(1 / 5))


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("en", "Mr. Smith's colour is twenty-one!", "mister smith is color is 21"),
        ("fr", "Déjà, vu !", "déjà vu"),
        (None, "Hello, WORLD.", "hello world"),
        ("ja", "日本", "日 本"),
    ],
)
def test_normalisers_are_whispers_own(language, text, expected):
    assert text_normalizer(language)(text).split() == expected.split()


def test_the_interval_of_equal_clips_is_that_of_a_binomial():
    """Clips of one word, 30 of 100 wrong: the normal approximation gives 30 +- 1.96 * 4.58."""
    interval = wer_interval([(1, 1)] * 30 + [(0, 1)] * 70)
    assert interval.low == pytest.approx(30 - 1.96 * 4.58, abs=1.0)
    assert interval.high == pytest.approx(30 + 1.96 * 4.58, abs=1.0)


def test_long_clips_count_for_more():
    clips = [(10, 100), (0, 1), (1, 1)]
    interval = wer_interval(clips)
    assert interval.low == pytest.approx(0.0) and interval.high == pytest.approx(100.0)
    assert wer_interval([(10, 100)] * 50).low == pytest.approx(10.0)


def test_intervals_and_differences_are_those_of_scipy():
    chance = np.random.default_rng(5)
    words = chance.integers(1, 20, 150)
    one, other = (np.minimum(words, chance.poisson(words * rate)) for rate in (0.25, 0.2))

    def rate(errors, words, axis=-1):
        return 100 * errors.sum(axis) / words.sum(axis)

    def points(first, second, words, axis=-1):
        return rate(first, words, axis) - rate(second, words, axis)

    settings = {"paired": True, "method": "percentile", "n_resamples": 10_000, "rng": np.random.default_rng(7)}
    theirs = bootstrap((one, words), rate, **settings).confidence_interval
    ours = wer_interval([*zip(one, words, strict=True)])
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.15)
    found = bootstrap((one, other, words), points, **settings)
    ours = wer_difference([*zip(one, words, strict=True)], [*zip(other, words, strict=True)])
    theirs = found.confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.15)
    assert ours.p == pytest.approx(2 * min(np.mean(found.bootstrap_distribution <= 0), 0.5), abs=0.01)


def test_a_paired_difference_is_more_certain_than_two_intervals():
    chance = np.random.default_rng(0)
    base = chance.integers(0, 10, 200)
    first = [(int(errors), 10) for errors in base]
    second = [(int(max(0, errors - (number % 4 == 0))), 10) for number, errors in enumerate(base)]
    found = wer_difference(first, second)
    assert found.points == pytest.approx(100 * (base.sum() - sum(e for e, _ in second)) / 2000)
    assert 0 < found.low < found.points < found.high and found.p < 0.001
    assert wer_interval(first).high - wer_interval(first).low > 3 * (found.high - found.low)


def test_what_is_no_difference_is_not_called_one():
    chance = np.random.default_rng(1)
    first, second = ([(int(errors), 10) for errors in chance.integers(0, 5, 100)] for _ in range(2))
    found = wer_difference(first, second)
    assert found.low < 0 < found.high and found.p > 0.05
    same = wer_difference(first, first)
    assert (same.points, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    assert str(same).endswith("p = 1.000: no better than chance")
    certain = str(wer_difference([(0, 4)] * 50, [(1, 4)] * 50))
    assert certain == "-25.0 points (-25.0 to -25.0), p < 0.001"


def test_nothing_said_has_no_rate_and_other_clips_cannot_be_compared():
    assert wer_interval([]) is None and wer_interval([(2, 0)]) is None
    assert wer_difference([(1, 0)], [(0, 0)]) is None
    with pytest.raises(ValueError, match="same clips"):
        wer_difference([(1, 3)], [(1, 4)])
