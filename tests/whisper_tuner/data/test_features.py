import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from whisper_tuner.data.features import log_mel, pad_log_mel

HOP = 160


def noise(samples: int) -> np.ndarray:
    return np.random.default_rng(samples).normal(0, 0.1, samples).astype(np.float32)


def padded_by_transformers(waveform, extractor):
    return extractor(waveform, sampling_rate=16_000, return_tensors="np").input_features[0]


@pytest.mark.parametrize(("mels", "seconds"), [(80, 30), (128, 5)])
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
