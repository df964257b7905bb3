import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_steps import samples_of
from transformers import WhisperFeatureExtractor

from whisper_tuner.data.batch_shapes import (
    bucket_edges,
    clips_within,
    equal_part,
    even_parts,
    micro_batches,
    padded_tokens,
)


@pytest.mark.parametrize(
    ("frames", "tokens", "clips"),
    [(3000, 448, 21), (3000, 8, 21), (200, 16, 327), (200, 448, 73), (50, 8, 1310), (10**6, 8, 1)],
)
def test_clips_whose_positions_an_apple_gpu_sums_rightly(frames, tokens, clips):
    assert clips_within(32_766, frames, tokens) == clips
    assert clips == 1 or (clips + 1) * max(frames // 2, tokens) > 32_766 >= clips * max(frames // 2, tokens)


def sizes(parts):
    return [len(part) for part in parts]


def test_parts_are_equal():
    parts = [micro_batches([300] * 32, lambda frames, most=most: most, 1) for most in (64, 32, 31, 21, 8, 1)]
    assert [equal_part(32, most) for most in (64, 32, 31, 21, 8, 1)] == [32, 32, 16, 16, 8, 1]
    assert [*map(sizes, parts)] == [[32], [32], [16, 16], [16, 16], [8] * 4, [1] * 32]


def test_clips_of_like_length_are_computed_together():
    lengths = [250, 2500, 250, 900, 250, 850]
    assert micro_batches(lengths, lambda frames: 8, 100) == [[1], [3, 5], [0, 2, 4]]
    assert sizes(micro_batches(lengths, lambda frames: 8, 0)) == [1, 1, 1, 3]
    assert sizes(micro_batches(lengths, lambda frames: 8, 10**9)) == [6]
    assert micro_batches([], lambda frames: 8, 100) == []


@given(st.lists(st.sampled_from([100, 250, 700, 1500, 3000]), max_size=9), st.integers(300, 6000), st.integers(0, 999))
def test_no_way_costs_less(lengths, most, fixed_cost):
    def cost(parts):
        return sum(fixed_cost + len(part) * max(lengths[place] for place in part) for part in parts)

    parts = micro_batches(lengths, lambda frames: clips_within(most // 2, frames, 1), fixed_cost)
    assert sorted(place for part in parts for place in part) == [*range(len(lengths))]
    assert all(len(part) == 1 or len(part) * max(lengths[place] for place in part) <= most for part in parts)
    ordered = sorted(lengths, reverse=True)
    for cuts in itertools.product([False, True], repeat=max(0, len(lengths) - 1)):
        ends = [0, *(n + 1 for n, cut in enumerate(cuts) if cut), len(lengths)]
        way = [ordered[start:end] for start, end in itertools.pairwise(ends) if end > start]
        if all(len(part) == 1 or len(part) * part[0] <= most for part in way):
            assert cost(parts) <= sum(fixed_cost + len(part) * part[0] for part in way)


def test_labels_have_few_lengths_and_never_more_tokens_than_the_decoder_takes():
    assert [padded_tokens(longest, 448) for longest in (1, 8, 9, 100, 448)] == [8, 8, 16, 104, 448]
    assert padded_tokens(12, 13) == 13


@given(st.lists(st.integers(1, 1500), max_size=40), st.integers(1, 6000), st.integers(1, 9))
def test_parts_of_clips_that_are_not_padded(sizes, most, count):
    parts = even_parts(sizes, most, count)
    assert sorted(place for part in parts for place in part) == [*range(len(sizes))]
    sums = [sum(sizes[place] for place in part) for part in parts]
    assert all(
        1 <= len(part) <= count and (len(part) == 1 or total <= most) for part, total in zip(parts, sums, strict=True)
    )
    if len(parts) == max(-(-sum(sizes) // most), -(-len(sizes) // count)) > 0:  # no fewer would do
        assert max(sums) - min(sums) <= max(sizes)


def test_a_step_that_fits_is_one_part():
    assert even_parts([750, 80, 40, 260], 1500, 8) == [[0, 1, 2, 3]]
    assert even_parts([750, 80, 40, 260], 1000, 8) == [[0], [1, 2, 3]]
    assert even_parts([3000, 80], 1500, 8) == [[0], [1]]
    assert even_parts([1] * 6, 10**9, 4) == [[0, 2, 4], [1, 3, 5]]
    assert even_parts([], 1500, 8) == []


# edges


def test_edges_are_few_and_hold_every_clip(tmp_path):
    samples = samples_of(300, tmp_path)
    edges = bucket_edges(samples, 3000)
    assert len(edges) <= 6 and list(edges) == sorted(edges) and all(edge % 2 == 0 for edge in edges)
    extractor = WhisperFeatureExtractor()
    longest = max(s.duration_s for s in samples)
    assert min(int(longest * 16_000) // extractor.hop_length + 2, 3000) <= edges[-1] <= 3000


def test_edges_add_the_least_padding(tmp_path):
    samples = samples_of(60, tmp_path)
    lengths = [min(-(-int(s.duration_s * 100 + 2.999999) // 50) * 50, 3000) for s in samples]

    def padded(edges):
        return sum(min((e for e in edges if e >= n), default=10**9) for n in lengths)

    best = min(padded(edges) for edges in itertools.combinations(sorted(set(lengths)), 3))
    assert padded(bucket_edges(samples, 3000, count=3)) == best
