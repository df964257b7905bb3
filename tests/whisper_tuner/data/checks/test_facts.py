"""Facts of clips: kept between checks, measured anew after a change, and prints that hardly change."""

from __future__ import annotations

import os

import numpy as np
import pytest
import soundfile
from planted import BUNDLED

from whisper_tuner.data.audio import load_audio
from whisper_tuner.data.checks import gather
from whisper_tuner.data.checks.facts import PRINT_BITS, Facts, facts_of, measure
from whisper_tuner.data.checks.leaks import ALIKE
from whisper_tuner.fact_store import FactStore

CLIPS = sorted((BUNDLED / "data" / "test").glob("*.ogg"))[:12]


def test_facts_are_kept_by_path_size_and_time(tmp_path, monkeypatch):
    path = tmp_path / "a.wav"
    soundfile.write(path, load_audio(CLIPS[0]), 16_000)
    store = FactStore(tmp_path / "cache")
    first = gather.facts_by_file([path, tmp_path / "none.wav"], store)
    assert list(first) == [path] and first[path].seconds > 1
    monkeypatch.setattr(gather, "measure", lambda path: pytest.fail("measured again"))
    assert gather.facts_by_file([path], store) == first
    monkeypatch.undo()
    soundfile.write(path, 0.5 * load_audio(CLIPS[0]), 16_000)
    os.utime(path, ns=(1, 1))
    assert gather.facts_by_file([path], store)[path].peak == pytest.approx(first[path].peak / 2, rel=0.01)


def test_what_cannot_be_decoded_is_a_fact_and_is_tried_again(tmp_path, monkeypatch):
    path, store = tmp_path / "a.wav", FactStore(tmp_path)
    path.write_bytes(b"no audio" * 500)
    assert gather.facts_by_file([path], store)[path].problem
    monkeypatch.setattr(gather, "measure", lambda path: Facts(seconds=1))
    assert gather.facts_by_file([path], store)[path].seconds == 1


def distance(one, other):
    return (int(one, 16) ^ int(other, 16)).bit_count() / PRINT_BITS


@pytest.mark.parametrize("name", ["ogg", "mp3", "flac"])
def test_a_print_outlives_codec_gain_and_silence(name, tmp_path):
    same = 0
    for clip in CLIPS:
        samples = load_audio(clip)
        path = tmp_path / f"a.{name}"
        soundfile.write(path, np.pad(0.4 * samples, (5000, 2000)), 16_000)
        same += distance(measure(path).print, measure(clip).print) <= ALIKE
    assert same >= len(CLIPS) - 2  # a codec may move where the loud part begins


def test_prints_of_other_clips_are_far_apart():
    prints = [measure(clip).print for clip in CLIPS]
    apart = [distance(one, other) for at, one in enumerate(prints) for other in prints[at + 1 :]]
    assert min(apart) > 1.4 * ALIKE


@pytest.mark.parametrize(
    "samples", [np.zeros((1, 1)), np.zeros((400, 2)), np.full((16_000, 1), 0.5), np.ones((3, 1)) * 1e-4]
)
def test_odd_signals_have_facts(samples):
    found = facts_of(samples.astype(np.float32), 16_000)
    assert isinstance(found, Facts) and np.isfinite([found.level, found.peak, found.silent, found.first]).all()
