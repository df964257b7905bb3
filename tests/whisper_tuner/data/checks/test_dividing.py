"""Pieces of a long recording, which end in its pauses, and the part of its transcript for each.

No piece is too long, and nothing that sounds is lost; all words are there once and in order, and nothing is guessed.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_recordings import joined

from whisper_tuner.data.audio import SAMPLE_RATE, load_audio
from whisper_tuner.data.checks.dividing import EDGE_S, NoPause, Unsure, divided, pieces, spoken, words_of
from whisper_tuner.eval.wer import text_normalizer

PIECES = [
    "Remove the butter from my list. Stop the nursery fan in eight hours.",
    "How do I cook a cake with rice and apples? What time is it in Vienna?",
    "Switch the radio off before dinner. Did grandmother pay the rent on Friday?",
]
WORDS = sorted({word for piece in PIECES for word in piece.split()})


normalizer = cache(text_normalizer)


def cut(text: str, heard: list[str], language: str | None = "en") -> list[str]:
    return divided(text, heard, language=language, normalize=normalizer(language))


def test_what_is_heard_word_for_word():
    assert cut(" ".join(PIECES), PIECES) == PIECES


def test_case_punctuation_and_numbers_may_differ():
    heard = [
        "remove the butter from my list, stop the nursery fan in 8 hours",
        "how do I cook a cake, with rice and apples. What time is it? In Vienna!",
        "SWITCH THE RADIO OFF BEFORE DINNER DID GRANDMOTHER PAY THE RENT ON FRIDAY",
    ]
    assert cut(" ".join(PIECES), heard) == PIECES


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (
            ["Call me at twenty one", "on Thursday or on Friday, please."],
            ["Call me at 21.", "On Thursday or Friday, please."],
        ),
        (["It costs five dollars", "and that is too much."], ["It costs $5", "and that's too much."]),
        (
            ["We will not go there.", "You won't either, will you?"],
            ["We won't go there.", "You will not either, will you?"],
        ),
    ],
)
def test_numbers_and_short_forms_beside_a_cut(said, heard):
    assert cut(" ".join(said), heard) == said


def test_words_that_the_model_has_not_heard_or_has_heard_besides():
    heard = [PIECES[0].replace("the butter from", "butter"), PIECES[1].replace("a cake", "the big cake"), PIECES[2]]
    assert cut(" ".join(PIECES), heard) == PIECES


def test_words_that_the_transcript_lacks_or_has_besides():
    said = [PIECES[0].replace("nursery", "old nursery ceiling"), PIECES[1].replace("with rice and", "with"), PIECES[2]]
    assert cut(" ".join(said), PIECES) == said


def test_words_heard_beside_a_cut_that_the_transcript_lacks():
    said = [PIECES[0].removesuffix(" in eight hours."), PIECES[1], PIECES[2]]
    assert cut(" ".join(said), PIECES) == said


@pytest.mark.parametrize(("before", "after"), [("hours.", ""), ("hours.", "hours. Well,")])
def test_a_word_that_is_not_heard_beside_a_cut_could_be_on_either_side(before, after):
    heard = [PIECES[0].replace("hours.", "").strip(), *PIECES[1:]]
    text = " ".join(PIECES).replace(before, after or before)
    with pytest.raises(Unsure, match="may belong before or after the cut") as error:
        cut(text, heard)
    assert error.value.piece == 0


@pytest.mark.parametrize(
    ("text", "heard", "piece", "why"),
    [
        (" ".join(PIECES), ["And so my fellow Americans", "ask not what your country", "can do for you"], None, ""),
        (" ".join(PIECES), [PIECES[0], "Thank you. " * 12, PIECES[2]], None, ""),
        (f"{PIECES[0]} {PIECES[2]}", PIECES, None, ""),
        (PIECES[0], [PIECES[0], "Thanks for watching!"], None, ""),
        (" ".join(PIECES), [PIECES[0], "", PIECES[2]], 1, "hears nothing"),
        ("", PIECES, 0, "no text"),
        ("...", PIECES, None, ""),
        ("word " * 300, ["word " * 100, "word " * 190], 0, ""),
    ],
)
def test_a_text_that_does_not_fit(text, heard, piece, why):
    with pytest.raises(Unsure, match=why) as error:
        cut(text, heard)
    assert piece in (None, error.value.piece)


@pytest.mark.parametrize(
    ("language", "said", "heard"),
    [
        (
            "zh",
            ["今天天气很好。", "我们去公园散步吧！", "「明天呢？」她问。"],
            ["今天天气好", "我们去公园散布吧", "明天呢她问"],
        ),
        ("ja", ["これはiPhone 12です。", "とても速いと思います。"], ["これはiPhone12です", "とても早いと思います"]),
        ("th", ["วันนี้อากาศดีมาก", "เราไปเดินเล่นกันเถอะ"], ["วันนี้อากาศดีมาก", "เราไปเดินเล่นกันเถอะ"]),
        ("fr", ["« Bonjour », dit-il.", "— Et vous ? Ça va bien ?"], ["Bonjour dit-il.", "Et vous, ça va bien ?"]),
        (
            "es",
            ["Vamos a la playa hoy.", "¿ Quieres venir con nosotros ?"],
            ["Vamos a la playa hoy", "Quieres venir con nosotros"],
        ),
    ],
)
def test_other_languages(language, said, heard):
    joint = "" if language in ("zh", "ja", "th") else " "
    assert ["".join(one.split()) for one in cut(joint.join(said), heard, language)] == [
        "".join(one.split()) for one in said
    ]


def test_latin_words_and_numbers_in_japanese_are_not_cut():
    assert words_of("これはiPhone 12です。", "ja") == ["こ", "れ", "は", "iPhone ", "12", "で", "す。"]


def test_a_mark_that_nobody_says_stays_with_its_word():
    assert words_of('- He said : " no " ( twice ) !', "en") == ["- He ", 'said : " ', 'no " ', "( twice ) !"]
    assert words_of("« Oui », dit-il ? ¿ Sí ?", None) == ["« Oui », ", "dit-il ? ", "¿ Sí ?"]
    assert words_of("...", "en") == ["..."] and words_of("  ", "en") == []


texts = st.lists(st.sampled_from([*WORDS, "no", "no,", "—", "um", "5", "twenty", "« x »"]), min_size=1, max_size=60)


@settings(max_examples=30, deadline=None)
@given(texts, st.lists(texts, min_size=1, max_size=5), st.sampled_from(["en", "fr", None, "zh"]))
def test_whatever_is_heard_all_words_are_there_once_and_in_order(words, heard, language):
    text = " ".join(words)
    try:
        found = cut(text, [" ".join(one) for one in heard], language)
    except Unsure as error:
        assert 0 <= error.piece < len(heard) and str(error)
    else:
        joint = "" if language == "zh" else " "
        assert len(found) == len(heard) and all(found)
        assert joint.join(found).split() == text.split() or "".join("".join(found).split()) == "".join(text.split())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.sampled_from([0, 0.05, 0.1]))
def test_with_mishearings_the_cut_is_right_or_there_is_none(seed: int, pieces: int, wrong: float):
    right_or_none(random.Random(seed), pieces, wrong)


@pytest.mark.parametrize("seed", range(12))
def test_with_many_mishearings_too(seed: int):
    """In these: of 1,400 seeds six put a cut two words off, as a chance word was like one of the neighbour's."""
    right_or_none(random.Random(seed), pieces=2 + seed % 4, wrong=0.3)


def right_or_none(chance: random.Random, pieces: int, wrong: float) -> None:
    said = [[chance.choice(WORDS) for _ in range(chance.randint(8, 40))] for _ in range(pieces)]
    heard = [[word for each in one for word in misheard(each, chance, wrong)] for one in said]
    try:
        found = cut(" ".join(" ".join(one) for one in said), [" ".join(one) for one in heard])
    except Unsure:
        assert wrong > 0
    else:
        near = [abs(len(one.split()) - len(other)) for one, other in zip(found, said, strict=True)]
        assert max(near) <= 1  # a chance word that was heard in place of a lost one is like the neighbour's


def misheard(word: str, chance: random.Random, wrong: float) -> list[str]:
    if chance.random() > wrong:
        return [word]
    return chance.choice([[], [chance.choice(WORDS)], [word, chance.choice(WORDS)]])


def test_a_quarter_of_an_hour_takes_no_longer_than_a_second():
    chance = random.Random(0)
    said = [" ".join(chance.choice(WORDS) for _ in range(70)) for _ in range(30)]
    assert cut(" ".join(said), said) == said


# pauses


@pytest.mark.parametrize(("seconds", "longest"), [(40, 30), (95, 12)])
def test_no_clip_is_cut_into(tmp_path, seconds, longest):
    long = joined(tmp_path / "long.wav", seconds)
    waveform = load_audio(long.path)
    found = pieces(spoken(waveform, SAMPLE_RATE), longest)
    assert len(found) >= seconds / longest and all(end - begin <= longest for begin, end in found)
    assert " ".join(long.said(begin, end) for begin, end in found) == long.text


def test_silence_at_the_ends_goes(tmp_path):
    long = joined(tmp_path / "long.wav", 25, silence=(8, 9))
    [(begin, end)] = pieces(spoken(load_audio(long.path), SAMPLE_RATE), 30)
    assert 7 < begin < 9 and long.middles[-1] < end < long.middles[-1] + 3


def test_there_is_no_pause():
    tone = np.sin(np.arange(40 * SAMPLE_RATE) / 20).astype(np.float32)
    with pytest.raises(NoPause) as error:
        pieces(spoken(tone, SAMPLE_RATE), 30)
    assert error.value.at == 0
    quiet = np.zeros(5 * SAMPLE_RATE, np.float32)
    with pytest.raises(NoPause) as error:
        pieces(spoken(np.concatenate([tone[: 10 * SAMPLE_RATE], quiet, tone]), SAMPLE_RATE), 30)
    assert 14.9 < error.value.at < 15.1
    with pytest.raises(NoPause) as error:
        pieces(spoken(np.concatenate([quiet] * 8), SAMPLE_RATE), 30)
    assert error.value.at is None


@given(st.lists(st.tuples(st.floats(0.2, 20), st.floats(0.02, 29)), min_size=1, max_size=40))
def test_whatever_is_said_when(gaps):
    said, at = [], 0.0
    for pause, length in gaps:
        said.append((at + pause, at + pause + length))
        at += pause + length
    found = pieces(said, 30)
    assert all(end - begin < 30 + 1e-6 for begin, end in found)
    assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(found))
    for begin, end in said:
        assert sum(first <= begin and end <= last for first, last in found) == 1
    assert found[-1][1] == said[-1][1] + EDGE_S
