import pytest

from whisper_tuner.data.batch_shapes import clips_within, equal_part, padded_tokens


@pytest.mark.parametrize(
    ("frames", "tokens", "clips"),
    [(3000, 448, 21), (3000, 8, 21), (200, 16, 327), (200, 448, 73), (50, 8, 1310), (10**6, 8, 1)],
)
def test_clips_whose_positions_an_apple_gpu_sums_rightly(frames, tokens, clips):
    assert clips_within(32_766, frames, tokens) == clips
    assert clips == 1 or (clips + 1) * max(frames // 2, tokens) > 32_766 >= clips * max(frames // 2, tokens)


def test_parts_are_equal():
    assert [equal_part(32, most) for most in (64, 32, 31, 21, 8, 1)] == [32, 32, 16, 16, 8, 1]


def test_labels_have_few_lengths_and_never_more_tokens_than_the_decoder_takes():
    assert [padded_tokens(longest, 448) for longest in (1, 8, 9, 100, 448)] == [8, 8, 16, 104, 448]
    assert padded_tokens(12, 13) == 13
