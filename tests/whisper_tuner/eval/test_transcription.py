from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from whisper_tuner.data.features import log_mel
from whisper_tuner.errors import DataError, ModelError
from whisper_tuner.eval.evaluation import FALLBACK, transcribe
from whisper_tuner.eval.transcription import (
    Recording,
    Segment,
    _words,
    cuts,
    tidy,
    transcribe_recording,
    writes_timestamps,
)
from whisper_tuner.model.base_model import load_base, set_language

RATE = 16_000
seconds = st.floats(-1, 70, allow_nan=False)


@pytest.fixture(scope="module")
def timed_folder(tmp_path_factory, multilingual_folder):
    """The 5 s model with a timestamp token for each encoder position, as published checkpoints have them."""
    model, processor = load_base(multilingual_folder)
    torch.manual_seed(0)
    model.resize_token_embeddings(model.config.vocab_size + model.config.max_source_positions + 1)
    folder = tmp_path_factory.mktemp("models") / "timed"
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@given(st.lists(st.builds(Segment, seconds, seconds, st.sampled_from(["", " a  b ", "c"])), max_size=12), seconds)
def test_times_are_in_order_and_inside_the_recording(segments, duration_s):
    kept = tidy(segments, max(duration_s, 0.0))
    times = [time for segment in kept for time in (segment.start, segment.end)]
    assert times == sorted(times) and all(0 <= time <= max(duration_s, 0.0) for time in times)
    assert all(segment.text.strip() == segment.text != "" for segment in kept)


def test_no_word_is_lost_where_times_are_sound():
    segments = [Segment(0.0, 2.0, "one"), Segment(2.0, 2.0, "two"), Segment(1.5, 3.0, "three"), Segment(9.99, 12, "no")]
    assert tidy(segments, 10.0) == [Segment(0.0, 2.0, "one two"), Segment(2.0, 3.0, "three")]


def test_what_is_written_without_spaces_is_joined_without():
    assert tidy([Segment(0.0, 2.0, "日"), Segment(2.0, 2.0, "本")], 10.0, "ja") == [Segment(0.0, 2.0, "日本")]
    segments = (Segment(0.0, 1.0, "日本"), Segment(1.0, 2.0, "語"))
    assert Recording(duration_s=2.0, segments=segments, language="ja").text == "日本語"
    assert Recording(duration_s=2.0, segments=segments).text == "日本 語"


@pytest.mark.parametrize(("task", "joint"), [("transcribe", ""), ("translate", " ")])
def test_a_translated_recording_is_english_text(multilingual, tmp_path, audio_file, task, joint):
    model, processor = multilingual
    path = audio_file(tmp_path / "x.wav", seconds=12)
    recording = transcribe_recording(model, processor, path, language="Japanese", task=task)
    assert len(recording.segments) > 1 and recording.text == joint.join(s.text for s in recording.segments)
    set_language(model, "ja", task)
    assert transcribe_recording(model, processor, path) == recording


def test_cuts_fall_into_pauses_and_leave_nothing_out():
    noise = np.random.default_rng(0).normal(0, 0.1, 100 * RATE).astype(np.float32)
    pauses = (27, 51, 75)
    for pause in pauses:
        noise[round((pause - 0.3) * RATE) : round((pause + 0.3) * RATE)] = 0
    for blocks in ([noise], np.split(noise, [7, RATE, 90 * RATE])):
        pieces = list(cuts(blocks, 30 * RATE, RATE))
        assert np.array_equal(np.concatenate([piece for _, piece in pieces]), noise)
        assert all(len(piece) <= 30 * RATE and piece[0] == noise[start] for start, piece in pieces)
        assert [start / RATE for start, _ in pieces[1:]] == pytest.approx(pauses, abs=0.3)
    assert [(start, len(piece)) for start, piece in cuts([noise[:100]], 30 * RATE, RATE)] == [(0, 100)]


def test_without_timestamps_each_window_is_a_segment(multilingual, tmp_path, audio_file):
    model, processor = multilingual
    path = audio_file(tmp_path / "x.wav", seconds=12)
    assert not writes_timestamps(model, processor)
    done = []
    recording = transcribe_recording(model, processor, path, language="fr", progress=done.append)
    waveform = soundfile.read(path, dtype="float32")[0]
    pieces = list(cuts([waveform], 5 * RATE, RATE))
    mels = [log_mel(piece, processor.feature_extractor) for _, piece in pieces]
    texts = [" ".join(t.text.split()) for t in transcribe(model, processor, mels, language="fr", temperatures=FALLBACK)]
    spans = [(start / RATE, (start + len(piece)) / RATE) for start, piece in pieces]
    expected = [(*span, text) for span, text in zip(spans, texts, strict=True) if text]
    found = [(round(s.start, 6), round(s.end, 6), s.text) for s in recording.segments]
    assert found == expected and expected
    assert recording.duration_s == 12 and done[-1] == 12


def test_with_timestamps_times_are_sound_and_the_same_each_time(timed_folder, tmp_path, audio_file):
    """A random model writes nonsense at nonsensical times; what comes out must be usable all the same."""
    model, processor = load_base(timed_folder)
    assert writes_timestamps(model, processor)
    path = audio_file(tmp_path / "x.wav", seconds=8)
    model.train()
    recording = transcribe_recording(model, processor, path, language="fr")
    assert recording == transcribe_recording(model, processor, path, language="fr") and model.training
    times = [time for segment in recording.segments for time in (segment.start, segment.end)]
    assert times == sorted(times) and all(0 <= time <= 8 for time in times)


def test_each_word_has_its_time(timed_folder, tmp_path, audio_file):
    model, processor = load_base(timed_folder)
    path = audio_file(tmp_path / "x.wav", seconds=8)
    with pytest.raises(ModelError, match="when a word is said"):
        transcribe_recording(model, processor, path, language="fr", words=True)
    model.generation_config.alignment_heads = [[0, 0], [1, 1]]
    recording = transcribe_recording(model, processor, path, language="fr", words=True)
    assert recording.segments
    for segment in recording.segments:
        assert letters("".join(word.text for word in segment.words)) == letters(segment.text)
    times = [time for segment in recording.segments for word in segment.words for time in (word.start, word.end)]
    assert times == sorted(times) and all(0 <= time <= 8 for time in times)
    plain = transcribe_recording(model, processor, path, language="fr")
    assert [replace(segment, words=()) for segment in recording.segments] == list(plain.segments)


def letters(text: str) -> str:
    """Without parts of letters, of which a random model writes many."""
    return "".join(text.replace("\ufffd", "").split())


def test_what_is_no_letter_does_not_swallow_the_words_after_it(multilingual):
    processor = multilingual[1]
    half = processor.tokenizer(" 日", add_special_tokens=False).input_ids[:2]
    whole = processor.tokenizer(" one two three four five", add_special_tokens=False).input_ids
    words = list(_words(processor, [(token, 0.1 * n) for n, token in enumerate([*half, *whole])], 0.0))
    assert [word.text for word in words][-3:] == [" three", " four", " five"]


def test_words_of_tokens(multilingual):
    """Each token ends at a time. Letters of several tokens, signs, and a script without spaces."""
    processor = multilingual[1]
    tokens = processor.tokenizer(" Ça va, 日本 x", add_special_tokens=False).input_ids
    words = list(_words(processor, [(token, 0.5 * number) for number, token in enumerate(tokens, 1)], 0.25))
    assert [word.text for word in words] == [" Ça", " va,", " ", "日", "本", " x"]
    assert words[0].start == 0.25 and words[-1].end == 0.5 * len(tokens)
    assert all(one.end == other.start for one, other in pairwise(words))


def test_unreadable_recordings_are_named(multilingual, tmp_path):
    (tmp_path / "x.wav").write_text("words")
    with pytest.raises(DataError, match=r"x\.wav"):
        transcribe_recording(*multilingual, tmp_path / "x.wav", language="fr")
