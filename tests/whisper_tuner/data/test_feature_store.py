import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from transformers import WhisperFeatureExtractor

from whisper_tuner.data import feature_store
from whisper_tuner.data.audio import load_audio
from whisper_tuner.data.feature_store import FeatureStore
from whisper_tuner.data.features import log_mel, pad_log_mel
from whisper_tuner.errors import DataError

PROJECT = Path(__file__).parents[3]
LONG_AGO = 1_763_726_400_000_000_000
READER = """
import hashlib, sys
from transformers import WhisperFeatureExtractor
from whisper_tuner.data.feature_store import FeatureStore
store = FeatureStore(sys.argv[1], WhisperFeatureExtractor())
paths = sys.argv[2:]
store.prepare(paths, threads=2)
print(hashlib.sha256(b"".join(store.log_mel(path).tobytes() for path in paths)).hexdigest())
"""


@pytest.fixture
def store(tmp_path) -> FeatureStore:
    return FeatureStore(tmp_path / "store", WhisperFeatureExtractor())


@pytest.fixture
def clip(tmp_path, audio_file) -> Path:
    return settled(audio_file(tmp_path / "a.wav", seconds=1))


@pytest.fixture
def clips(tmp_path, audio_file) -> list[Path]:
    return [settled(audio_file(tmp_path / f"{n}.wav", seconds=0.2 + n / 10, seed=n)) for n in range(12)]


@pytest.fixture
def hashed(monkeypatch) -> list[Path]:
    """The files whose contents are hashed."""
    found, hash_content = [], feature_store._Audio.hash_content
    monkeypatch.setattr(
        feature_store._Audio, "hash_content", lambda self: found.append(self.path) or hash_content(self)
    )
    return found


@pytest.fixture
def decoded(monkeypatch) -> list[Path]:
    """The files that are decoded."""
    found = []
    monkeypatch.setattr(feature_store, "load_audio", lambda path, *rest: found.append(path) or load_audio(path, *rest))
    return found


def full_disk(*_) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def settled(path: Path, when: int = LONG_AGO) -> Path:
    os.utime(path, ns=(when, when))
    return path


def again(store: FeatureStore, **settings) -> FeatureStore:
    """As another process has it."""
    return FeatureStore(store.directory, WhisperFeatureExtractor(**settings))


def test_the_first_reading_equals_all_others_to_the_bit(store, clip):
    exact = log_mel(load_audio(clip), store.extractor)
    first = store.log_mel(clip)
    assert first.dtype == np.float32 and first.shape == exact.shape
    np.testing.assert_array_equal(first, exact.astype(np.float16))
    for later in (store, again(store)):
        np.testing.assert_array_equal(later.log_mel(clip), first)


def test_nothing_is_hashed_or_decoded_twice(store, clip, hashed, decoded):
    first = store.log_mel(clip)
    for _ in range(2):
        again(store).log_mel(clip)
    assert hashed == [clip] and decoded == [clip]
    elsewhere = Path(shutil.copy(clip, clip.with_name("renamed.wav")))
    np.testing.assert_array_equal(store.log_mel(elsewhere), first)
    assert hashed[1:] in ([elsewhere], [elsewhere] * 2) and decoded == [clip]


def test_relative_and_absolute_paths_are_the_same_file(store, clip, hashed, monkeypatch):
    monkeypatch.chdir(clip.parent)
    store.log_mel(clip.name)
    store.log_mel(str(clip))
    assert hashed == [Path(clip.name)]


def test_changed_audio_is_computed_again(store, clip, audio_file):
    first = store.log_mel(clip)
    settled(audio_file(clip, seconds=1, seed=1), LONG_AGO + 1)
    second = store.log_mel(clip)
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(again(store).log_mel(clip), second)
    settled(audio_file(clip, seconds=1), LONG_AGO + 2)
    np.testing.assert_array_equal(store.log_mel(clip), first)


def test_audio_changed_within_a_tick_of_its_time_stamp_is_seen(store, clip, audio_file):
    """Size and time are the same; a file that has just been written is hashed each time."""
    now = time.time_ns()
    settled(clip, now)
    first = store.log_mel(clip)
    settled(audio_file(clip, seconds=1, seed=1), now)
    assert not np.array_equal(store.log_mel(clip), first)


def test_what_changes_while_it_is_computed_is_not_kept_under_its_old_content(store, clip, audio_file, monkeypatch):
    other = audio_file(clip.with_name("b.wav"), seconds=1, seed=1)
    before = clip.read_bytes()

    def load_late(path, rate, longest_s):
        shutil.copyfile(other, clip)
        return load_audio(path, rate, longest_s)

    with monkeypatch.context() as patch:
        patch.setattr(feature_store, "load_audio", load_late)
        changed = store.log_mel(clip)
    np.testing.assert_array_equal(changed, store.log_mel(other))
    clip.write_bytes(before)
    exact = log_mel(load_audio(settled(clip)), store.extractor)
    np.testing.assert_array_equal(store.log_mel(clip), exact.astype(np.float16))


def test_settings_and_speeds_have_entries_of_their_own(store, clip):
    assert again(store, feature_size=128).log_mel(clip).shape[0] == 128
    assert store.log_mel(clip).shape[0] == 80
    assert store.log_mel(clip, speed=0.9).shape[1] == pytest.approx(100 / 0.9, abs=2)
    assert store.log_mel(clip).shape[1] == pytest.approx(100, abs=2)


@pytest.mark.parametrize("speed", [0.5, 1.1])
def test_a_tone_played_faster_is_higher_and_shorter(store, tmp_path, speed):
    def tone(hertz: float, seconds: float, name: str) -> Path:
        wave = 0.3 * np.sin(2 * np.pi * hertz * np.arange(round(16_000 * seconds)) / 16_000)
        soundfile.write(tmp_path / name, wave, 16_000)
        return tmp_path / name

    played = store.log_mel(tone(440, 2, "a.wav"), speed=speed)
    expected = store.log_mel(tone(440 * speed, 2 / speed, "b.wav"))
    assert played.shape[1] == pytest.approx(expected.shape[1], abs=1)
    middle = slice(played.shape[1] // 4, played.shape[1] // 2)
    assert np.abs(played[:, middle] - expected[:, middle]).mean() < 0.05
    np.testing.assert_array_equal(again(store).log_mel(tmp_path / "a.wav", speed=speed), played)


@pytest.mark.parametrize("speed", [0.0, -1.0, 1e9, float("nan"), float("inf")])
def test_speeds_that_cannot_be_are_refused(store, clip, speed):
    with pytest.raises(ValueError, match="speed"):
        store.log_mel(clip, speed=speed)


@pytest.mark.parametrize("samples", [1, 2, 100])
def test_the_shortest_clips_can_be_played_faster(store, tmp_path, samples):
    soundfile.write(tmp_path / "a.wav", np.full(samples, 0.1), 16_000)
    assert store.log_mel(tmp_path / "a.wav", speed=2.0).shape[1] >= 1


def test_prepare_computes_all_that_is_missing(store, clips, decoded):
    store.log_mel(clips[3])
    calls = []
    store.prepare(clips, lambda *at: calls.append(at), threads=3, speeds=(1.0, 1.1))
    assert sorted(decoded) == sorted([*clips, *clips])
    assert calls[-1] == (24, 24)
    decoded.clear()
    other = again(store)
    other.prepare(clips)
    for path in clips:
        other.log_mel(path, speed=1.1)
    assert not decoded
    store.prepare([])


def test_prepare_leaves_torchs_threads_as_they_were(store, clips):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        store.prepare(clips, threads=3)
        with ThreadPoolExecutor() as pool:
            assert torch.get_num_threads() == pool.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(before)


def test_prepare_leaves_files_that_cannot_be_read(store, clips, tmp_path):
    (bad := tmp_path / "bad.wav").write_bytes(b"RIFF")
    store.prepare([bad, tmp_path / "gone.wav", tmp_path, *clips])
    for path in (bad, tmp_path / "gone.wav", tmp_path):
        with pytest.raises(DataError):
            store.log_mel(path)


def test_prepare_ends_soon_when_it_is_stopped(store, clips, monkeypatch, decoded):
    computed = feature_store.log_mel
    monkeypatch.setattr(feature_store, "log_mel", lambda *about: time.sleep(0.2) or computed(*about))
    monkeypatch.setattr(feature_store, "REPORT_S", 0.1)
    stop = threading.Event()
    store.prepare(clips * 50, lambda *at: stop.set(), threads=2, stopped=stop.is_set)
    assert len(decoded) <= 4


def test_prepare_says_what_it_is_at(store, clips, monkeypatch):
    computed, calls = feature_store.log_mel, []
    monkeypatch.setattr(feature_store, "log_mel", lambda *about: time.sleep(0.1) or computed(*about))
    monkeypatch.setattr(feature_store, "REPORT_S", 0.1)
    store.prepare(clips, lambda *at: calls.append(at), threads=1)
    assert len(calls) > 3 and calls == sorted(calls) and calls[-1] == (12, 12)


def test_defects_in_prepare_are_not_hidden(store, clips, monkeypatch):
    monkeypatch.setattr(feature_store, "log_mel", lambda *about: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.prepare(clips, threads=2)


@pytest.mark.slow
def test_several_processes_share_a_store(store, clips):
    """Whatever they do at the same time, all come to the same values."""
    command = [sys.executable, "-c", READER, store.directory, *clips]
    processes = [subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE) for _ in range(2)]
    digests = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 2 and len(digests) == 1
    for path in clips:
        exact = log_mel(load_audio(path), store.extractor)
        np.testing.assert_array_equal(store.log_mel(path), exact.astype(np.float16))


def test_damaged_values_are_computed_again(store, clips, decoded):
    first = [store.log_mel(path) for path in clips]
    decoded.clear()
    for kept in store.directory.glob("*/*"):
        raw = bytearray(kept.read_bytes())
        raw[len(raw) // 2] ^= 1
        kept.write_bytes(raw)
    for _ in range(2):
        for path, mel in zip(clips, first, strict=True):
            np.testing.assert_array_equal(again(store).log_mel(path), mel)
    assert decoded == clips


def test_on_a_full_disk_log_mels_are_computed_each_time(store, clips, decoded, monkeypatch):
    monkeypatch.setattr(Path, "write_bytes", full_disk)
    told = []
    full = FeatureStore(store.directory, store.extractor, warn=told.append)
    full.prepare(clips)
    for _ in range(2):
        exact = log_mel(load_audio(clips[1]), store.extractor)
        np.testing.assert_array_equal(full.log_mel(clips[1]), exact.astype(np.float16))
    assert len(told) == 1 and "No space left" in told[0]
    assert decoded.count(clips[1]) >= 2


def test_a_folder_that_cannot_be_made_is_told_once(tmp_path, clips):
    (tmp_path / "file").touch()
    told = []
    store = FeatureStore(tmp_path / "file" / "store", WhisperFeatureExtractor(), warn=told.append)
    store.prepare(clips)
    assert store.log_mel(clips[0]).shape[0] == 80 and len(told) == 1


def test_a_deleted_folder_costs_time_only(store, clip, decoded):
    first = store.log_mel(clip)
    shutil.rmtree(store.directory)
    for reader in (store, again(store), store):
        np.testing.assert_array_equal(reader.log_mel(clip), first)
    assert len(decoded) == 2


def test_missing_audio_is_named(store, tmp_path):
    with pytest.raises(DataError, match=r"gone\.wav"):
        store.log_mel(tmp_path / "gone.wav")


# log-mels and their padding


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
    assert mel.shape[1] == -(-(samples + 200) // 160)
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
