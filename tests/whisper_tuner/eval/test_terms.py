"""Terms in texts made by hand, with counts that anybody can check."""

import pytest

from whisper_tuner.errors import ConfigError
from whisper_tuner.eval.terms import TermCount, count_terms, read_counts, read_terms, shares, write_terms
from whisper_tuner.eval.wer import text_normalizer

FRENCH = text_normalizer("fr")
TEXTS = [
    ("ada va au pic du midi", "ada va au pique du midi"),
    ("le pic du midi et ada", "le pic du midi et"),
    ("rien", "ada rien"),
    ("ada ada", "ada"),
]


def test_terms_are_counted_as_whole_words_in_the_clip_in_which_they_were_said():
    terms, training = ["Ada", "Pic du Midi", "Pau", "?"], ["Le Pic du Midi !", "Adam", "Ada."]
    [ada, peak, never, mark], missed = count_terms(terms, FRENCH, TEXTS, training)
    assert ada == TermCount(term="Ada", in_training=1, said=4, written=3, found=2, instead="nothing (2)")
    assert peak == TermCount(term="Pic du Midi", in_training=1, said=2, written=1, found=1, instead="pique du midi")
    assert (never, mark) == (TermCount(term="Pau"), TermCount(term="?"))
    assert missed == [(1, 2), (1, 2), (0, 0), (1, 2)]
    assert shares([ada, peak, never]) == (50.0, 75.0) and shares([never]) == (None, None)


def test_terms_of_languages_without_spaces_are_found_in_their_texts():
    normalize = text_normalizer("ja")
    texts = [(normalize("東京に行く"), normalize("東京に行く")), (normalize("京都です"), normalize("東京です"))]
    [tokyo, kyoto], _ = count_terms(["東京", "京都"], normalize, texts)
    assert (tokyo.said, tokyo.written, tokyo.found, kyoto.said, kyoto.found) == (1, 2, 1, 1, 0)


def test_counts_are_read_back_as_they_were_written(tmp_path):
    counts, _ = count_terms(["=Ada", "Pic, du Midi"], FRENCH, TEXTS)
    write_terms(tmp_path / "terms.csv", counts)
    assert read_counts(tmp_path / "terms.csv") == counts and counts[0].said == 4
    assert read_counts(tmp_path / "none.csv") == []


def test_a_list_of_terms_has_one_in_a_line(tmp_path):
    path = tmp_path / "terms.txt"
    path.write_text("# people\nAda\n\n  Pic du Midi \nAda\n")
    assert read_terms(path) == ("Ada", "Pic du Midi")
    for content, why in ((b"# none\n", "has no term"), (b"\xff\xfe", "not UTF-8"), (b"a" * 1_000_001, "more than")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=why):
            read_terms(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_terms(tmp_path / "none.txt")
