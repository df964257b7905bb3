import pytest

from whisper_tuner.eval.wer import error_rates, text_normalizer


def test_counts_by_hand():
    rates = error_rates(["the cat sat", "on the mat"], ["the cat sat down", "in mat"])
    assert (rates.substitutions, rates.deletions, rates.insertions, rates.words) == (1, 1, 1, 6)
    assert rates.wer == pytest.approx(3 / 6)


def test_rates_are_of_the_corpus_and_not_means_of_clips():
    rates = error_rates(["one", "a b c d e f g h i"], ["two", "a b c d e f g h i"])
    assert rates.wer == pytest.approx(1 / 10)


def test_characters_by_hand():
    assert error_rates(["abcd"], ["abxd"]).cer == pytest.approx(1 / 4)


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
