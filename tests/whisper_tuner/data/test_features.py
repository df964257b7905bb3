import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from whisper_tuner.data import features
from whisper_tuner.data.features import FeatureCache, log_mel, pad_log_mel
from whisper_tuner.errors import DataError

HOP = 160


def noise(samples: int) -> np.ndarray:
    return np.random.default_rng(samples).normal(0, 0.1, samples).astype(np.float32)


def padded_by_transformers(waveform, extractor):
    return extractor(waveform, sampling_rate=16_000, return_tensors="np").input_features[0]


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("seconds", [5, 30])
@pytest.mark.parametrize("short_of_full", [0, 1, 100, 199, 200, 201, 359, 400, 800, 70_001, -5_000])
def test_padded_features_equal_the_extractors_own(mels, seconds, short_of_full):
    extractor = WhisperFeatureExtractor(feature_size=mels, chunk_length=seconds)
    waveform = noise(seconds * 16_000 - short_of_full)
    padded = pad_log_mel(log_mel(waveform, extractor), extractor.nb_max_frames)
    assert padded.shape == (mels, seconds * 100) and padded.dtype == np.float32
    np.testing.assert_allclose(padded, padded_by_transformers(waveform, extractor), atol=1e-4)


@pytest.mark.parametrize("samples", [1, 159, 160, 199, 200, 201, 360, 361, 16_000, 16_079, 16_081])
def test_short_clips_keep_only_the_frames_that_touch_them(samples):
    extractor = WhisperFeatureExtractor()
    mel = log_mel(noise(samples), extractor)
    assert mel.shape[1] == -(-(samples + 200) // HOP)
    np.testing.assert_allclose(pad_log_mel(mel, 3000), padded_by_transformers(noise(samples), extractor), atol=1e-4)


def test_silence_pads_to_the_extractors_own():
    extractor = WhisperFeatureExtractor()
    silence = np.zeros(8_000, np.float32)
    np.testing.assert_allclose(
        pad_log_mel(log_mel(silence, extractor), 3000), padded_by_transformers(silence, extractor), atol=1e-4
    )


def test_padding_never_cuts():
    mel = np.zeros((80, 120), np.float32)
    assert pad_log_mel(mel, 100).shape == (80, 120)


def test_second_reading_comes_from_the_cache(tmp_path, audio_file, monkeypatch):
    path = audio_file(tmp_path / "a.wav", seconds=1)
    cache = FeatureCache(tmp_path / "cache", WhisperFeatureExtractor())
    first = cache.log_mel(path)
    elsewhere = shutil.copy(path, tmp_path / "renamed.wav")
    monkeypatch.setattr(features, "load_audio", lambda *_: pytest.fail("decoded again"))
    np.testing.assert_array_equal(cache.log_mel(elsewhere), first)
    assert len(entries(cache)) == 1


def test_changed_audio_or_settings_make_new_entries(tmp_path, audio_file):
    cache = FeatureCache(tmp_path / "cache", WhisperFeatureExtractor())
    path = audio_file(tmp_path / "a.wav", seconds=1)
    cache.log_mel(path)
    audio_file(path, seconds=1, seed=1)
    cache.log_mel(path)
    assert FeatureCache(cache.directory, WhisperFeatureExtractor(feature_size=128)).log_mel(path).shape[0] == 128
    assert len(entries(cache)) == 3


@pytest.mark.parametrize("damage", [lambda raw: b"", lambda raw: raw[:-100], lambda raw: raw[:-1] + b"\xff\xff"])
def test_damaged_entries_are_computed_again(tmp_path, audio_file, damage):
    path = audio_file(tmp_path / "a.wav", seconds=1)
    cache = FeatureCache(tmp_path / "cache", WhisperFeatureExtractor())
    first = cache.log_mel(path)
    (entry,) = entries(cache)
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    np.testing.assert_array_equal(cache.log_mel(path), first)
    assert entry.read_bytes() == whole
    assert entries(cache) == [entry]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_costs_the_entry_only(tmp_path):
    (entry := tmp_path / "00" / "entry.mel").parent.mkdir()
    entry.symlink_to("/dev/full")
    features._write(entry, np.zeros((80, 3), dtype=np.float32))
    assert not entry.is_symlink()


def test_missing_audio_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.wav"):
        FeatureCache(tmp_path, WhisperFeatureExtractor()).log_mel(tmp_path / "gone.wav")


def entries(cache):
    return [path for path in cache.directory.rglob("*") if path.is_file()]
