"""Times of the parts of a text: read, written, and only used where they can be those of the clip."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisper_tuner.timed_text import Said, said_in, timed_text_of, why_unusable, without_overlaps

TWO = "<|0.00|> Good morning.<|2.50|><|2.80|> How are you?<|6.10|>"
hundredths = st.integers(0, 3000).map(lambda number: number / 100)
words = st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=8).filter(lambda text: "|" not in text)


def parts_of(times, texts):
    times = sorted(times)
    return tuple(Said(*pair) for pair in zip(times[::2], times[1::2], texts, strict=False))


def test_a_text_with_times_is_read():
    assert said_in(TWO) == (Said(0.0, 2.5, "Good morning."), Said(2.8, 6.1, "How are you?"))
    assert why_unusable(TWO, "Good morning.  How are you?", 6.1) == ""
    assert said_in("<|0.00|><|1.00|><|1.00|>un<|2.00|>") == (Said(1.0, 2.0, "un"),)


@given(st.lists(hundredths, min_size=2, max_size=12), st.lists(words, min_size=6, max_size=6))
def test_what_is_written_is_read(times, texts):
    parts = parts_of(times, texts)
    assert said_in(timed_text_of(parts)) == parts


@pytest.mark.parametrize(
    ("timed", "text", "seconds", "why"),
    [
        (TWO, "Good morning.", 6.1, "does not say the same as their text"),
        (TWO, "Good morning. How are you?", 5.5, "ends after their clips"),
        ("Good morning.", "Good morning.", 5.0, "is not as <|0.00|> text<|2.50|>"),
        ("<|0.00|> Good morning.", "Good morning.", 5.0, "is not as <|0.00|> text<|2.50|>"),
        ("<|0.00|> Good<|1.00|> morning.<|1.50|><|2.00|>", "Good morning.", 5.0, "is not as <|0.00|> text<|2.50|>"),
        ("<|0|> Good morning.<|1|>", "Good morning.", 5.0, "is not as <|0.00|> text<|2.50|>"),
        ("<|0.00|> b<|2.00|><|1.00|> a<|3.00|>", "b a", 5.0, "goes back in time"),
        ("<|2.00|> a<|1.00|>", "a", 5.0, "goes back in time"),
    ],
)
def test_what_cannot_be_the_times_of_a_clip_is_told(timed, text, seconds, why):
    assert why_unusable(timed, text, seconds) == why


@given(st.lists(st.tuples(hundredths, st.integers(1, 500)), min_size=1, max_size=20))
def test_parts_neither_overlap_nor_get_lost(spans):
    parts = [Said(start, start + more / 100, f"w{n}") for n, (start, more) in enumerate(sorted(spans))]
    kept = [*without_overlaps(parts)]
    assert " ".join(part.text for part in kept) == " ".join(part.text for part in parts)
    assert all(one.end <= other.start and one.start < one.end for one, other in pairwise(kept))
    assert kept[0].start == parts[0].start and kept[-1].end <= max(part.end for part in parts)
    assert [*without_overlaps(kept)] == kept
