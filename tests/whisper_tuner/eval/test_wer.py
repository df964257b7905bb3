import numpy as np
import pytest
from scipy.stats import bootstrap

from whisper_tuner.eval.wer import error_rates, text_normalizer, text_normalizers, wer_difference, wer_interval
from whisper_tuner.languages import UNSPACED
from whisper_tuner.text import wer_told


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


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("en", "Mr. Smith's colour is twenty-one!", "mister smith is color is 21"),
        ("en", "Wait... to… exit the menu ...", "wait to exit the menu"),
        ("fr", "Déjà, vu !", "déjà vu"),
        (None, "Hello, WORLD.", "hello world"),
        ("ja", "日本", "日 本"),
    ],
)
def test_normalisers_are_whispers_own_but_for_the_dot_that_it_leaves_of_three(language, text, expected):
    assert text_normalizer(language)(text).split() == expected.split()


OURS, BASIC, ENGLISH = "multimac-unicode", "whisper-basic", "whisper-english"


@pytest.mark.parametrize(
    ("language", "said", "heard", "errors", "name"),
    [
        pytest.param("hi", "घर की चाबी", "घर के चीबा", "2/3", OURS, id="Hindi-two-wrong-vowels"),
        pytest.param("hi", "\u0958लम है।", "क\u093cलम है", "0/2", OURS, id="Hindi-nukta-in-both-forms-and-danda"),
        pytest.param("bn", "কোন বড়", "ক\u09c7\u09beন বড\u09bc", "0/2", OURS, id="Bengali-vowel-and-nukta-in-parts"),
        pytest.param("ta", "கொடு தமிழ்", "க\u0bc6\u0bbeடு தமிழ", "1/2", OURS, id="Tamil-vowel-in-parts-lost-virama"),
        pytest.param("ml", "അവന\u0d4d\u200d വന്നു", "അവൻ വന്നു", "0/2", OURS, id="Malayalam-chillu-in-both-forms"),
        pytest.param("ml", "അവൻ വന്നു", "അവന\u0d4d വന്നു", "1/2", OURS, id="Malayalam-chillu-is-not-a-virama"),
        pytest.param("si", "ශ\u0dca\u200dරී ලංකා", "ශ\u0dcaරී ලංකා", "0/2", OURS, id="Sinhala-joiner-is-a-look"),
        pytest.param("th", "กินข้าว", "กันข้าว", "1/5", OURS, id="Thai-by-characters-with-their-vowels"),
        pytest.param("lo", "ກິນ", "ກັນ", "1/2", OURS, id="Lao"),
        pytest.param("km", "ភាសា\u200bខ្មែរ", "ភាសាខ្មែរ", "0/4", OURS, id="Khmer-space-without-a-width"),
        pytest.param("my", "မြန်", "မြန", "1/2", OURS, id="Burmese-lost-asat"),
        pytest.param("bo", "བོད་སྐད།", "བོད་སྐེད", "1/4", OURS, id="Tibetan-added-vowel"),
        pytest.param("ar", "كَتَبَ الوَلَدُ", "كتب الولد", "0/2", OURS, id="Arabic-vowels-may-be-left-out"),
        pytest.param("ar", "كـــتاب \ufedb\ufe98\ufe90", "كتاب كتب", "0/2", OURS, id="Arabic-tatweel-and-shapes"),
        pytest.param("ar", "كتب الولد", "كتب البلد", "1/2", OURS, id="Arabic-another-letter"),
        pytest.param("he", "שָׁלוֹם עולם", "שלום עולם", "0/2", OURS, id="Hebrew-niqqud-may-be-left-out"),
        pytest.param("yi", "אַרבעט", "אָרבעט", "1/1", OURS, id="Yiddish-spells-vowels"),
        pytest.param("fa", "می\u200cخواهم بروم", "می خواهم بروم", "2/2", OURS, id="Persian-joiner-makes-one-word"),
        pytest.param("fa", "کشور\u200cها را", "کشورها را", "0/2", OURS, id="Persian-joiner-that-nobody-sees"),
        pytest.param("tr", "İYİ IŞIK", "iyi ışık", "0/2", OURS, id="Turkish-both-capitals"),
        pytest.param("tr", "I\u0307zmir kızı", "izmir kizi", "1/2", OURS, id="Turkish-NFD-and-a-wrong-i"),
        pytest.param("ru", "за\u0301мок мой", "замок мои", "1/2", OURS, id="Russian-stress-but-not-й"),
        pytest.param("yo", "ọ̀rọ̀ mi", "ọ̀rọ́ mi", "1/2", OURS, id="Yoruba-tone"),
        pytest.param(None, "❤\ufe0f 1\ufe0f\u20e3 İzmir, नमस्ते!", "1 izmir नमस्ते", "0/3", OURS, id="unknown-with-emoji"),
        pytest.param("ko", "한국어 말", "\u1112\u1161\u11ab국어 발", "1/2", BASIC, id="Korean-in-jamo"),
        pytest.param("vi", "Tiê\u0301ng Việt", "tiếng viết", "1/2", BASIC, id="Vietnamese-NFD"),
        pytest.param("de", "Straße, GRÖẞE!", "strasse größe", "1/2", BASIC, id="German-ß-is-not-ss"),
        pytest.param("pl", "Łódź; żółw", "łódź zółw", "1/2", BASIC, id="Polish"),
        pytest.param("fr", "L’homme l´a vu.", "l'homme l'a vu", "0/5", BASIC, id="French-apostrophes"),
        pytest.param("zh", "今天天气很好。", "今天天汽很好", "1/6", BASIC, id="Chinese"),
        pytest.param("ja", "か\u3099くせい", "学生", "4/4", BASIC, id="Japanese-composed-another-spelling"),
        pytest.param("en", "It's Mr. Smith's colour", "it is mister smith's color", "0/6", ENGLISH, id="English"),
    ],
)
def test_errors_by_hand_in_many_languages(language, said, heard, errors, name):
    (measured, normalize), (other, _) = text_normalizers(language)
    rates = error_rates([normalize(said)], [normalize(heard)])
    assert f"{rates.errors}/{rates.words}" == errors
    assert measured.split()[0] == name and other.split()[0] == (BASIC if name == OURS else OURS)


@pytest.mark.parametrize("language", ["de", "fr", "it", "pl", "vi", "ko", "ja", "ru", None])
def test_both_normalisers_make_the_same_text_without_marks(language):
    text = "Größe: l'été, (leise) Łódź... [Musik] Việt 한국어 「東京」 Ёлка, й! 5,5 % – 3½ km² Ǆ ﬁ ´x ẞ Œuvre <b> ª"
    (_, one), (_, other) = text_normalizers(language)
    assert one(text) == other(text)


def test_spaces_between_characters_are_no_characters():
    normalize = text_normalizer("ja")
    texts = [normalize("日本語")], [normalize("日本五")]
    assert "ja" in UNSPACED and error_rates(*texts, spaced=False).cer == pytest.approx(1 / 3)


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
    assert str(same) == "+0.0 points (100 clips): as many errors in each clip"
    certain = str(wer_difference([(0, 4)] * 50, [(1, 4)] * 50))
    assert certain == "-25.0 points (95 %: -25.0 to -25.0, 50 clips): better"


@pytest.mark.parametrize(
    ("before", "after", "between", "clips", "told"),
    [
        (26.2, 14.3, (-25.1, 3.0), 9, "26.2 -> 14.3: -11.9 points (95 %: -25.1 to +3.0, 9 clips): may be chance"),
        (26.2, 14.3, (-25.1, -3.0), 9, "26.2 -> 14.3: -11.9 points (95 %: -25.1 to -3.0, 9 clips): better"),
        (14.3, 26.2, (3.0, 25.1), 1200, "14.3 -> 26.2: +11.9 points (95 %: +3.0 to +25.1, 1,200 clips): worse"),
        (26.2, 14.3, (-25.1, 0.0), 9, "26.2 -> 14.3: -11.9 points (95 %: -25.1 to +0.0, 9 clips): may be chance"),
        (26.2, 14.3, (-11.9, -11.9), 1, "26.2 -> 14.3: -11.9 points (1 clip): too few clips"),
        (26.2, 14.3, (-20.0, -5.0), 5, "26.2 -> 14.3: -11.9 points (5 clips): too few clips"),
        (26.2, 14.3, (), 9, "26.2 -> 14.3: -11.9 points (9 clips)"),  # measured by an older version, or other clips
        (26.2, 14.3, (), 0, "26.2 -> 14.3: -11.9 points"),
        (26.2, None, (), 0, "26.2 -> ?"),
        (None, 14.3, (), 9, "? -> 14.3"),
        (None, None, (), 0, ""),
    ],
)
def test_what_training_did_is_told_as_far_as_it_is_known(before, after, between, clips, told):
    assert wer_told(before, after, between, clips) == told


def test_few_clips_prove_nothing_even_if_all_are_better():
    """The clips of a set are drawn again to tell how sure a difference is: of one clip that is always the same."""
    for clips in (1, 2, 5):
        found = wer_difference([(0, 4)] * clips, [(2, 4)] * clips)
        assert found.high < 0 and found.verdict == "too few clips"
    assert wer_difference([(0, 4)] * 6, [(2, 4)] * 6).verdict == "better"


def test_nothing_said_has_no_rate_and_other_clips_cannot_be_compared():
    assert wer_interval([]) is None and wer_interval([(2, 0)]) is None
    assert wer_difference([(1, 0)], [(0, 0)]) is None
    with pytest.raises(ValueError, match="same clips"):
        wer_difference([(1, 3)], [(1, 4)])
