"""Pieces of a long recording end in its pauses, none is too long, and nothing that sounds is lost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from long_recordings import joined

from whisper_tuner.data.audio import SAMPLE_RATE, load_audio
from whisper_tuner.data.checks.dividing import EDGE_S, NoPause, pieces, spoken


@pytest.mark.parametrize("seconds", [40, 95])
@pytest.mark.parametrize("longest", [30, 12])
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
