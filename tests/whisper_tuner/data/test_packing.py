import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whisper_tuner.data.clip import Clip
from whisper_tuner.data.features import log_mel, pad_log_mel
from whisper_tuner.data.labels import label_encoder
from whisper_tuner.data.packing import packed
from whisper_tuner.data.timed_text import Said
from whisper_tuner.model.base_model import load_base


@pytest.fixture
def encoder(timestamps_folder):
    model, processor = load_base(timestamps_folder)
    return label_encoder(model, processor.tokenizer, language="fr")


def clip(encoder, name, frames=100, text="un", **label):
    return Clip((name,), np.random.default_rng(0).random((80, frames), np.float32), encoder.encode(text, **label))


def decoded(encoder, window):
    return encoder.tokenizer.decode(window.label.written, skip_special_tokens=True)


def test_labels_of_a_window_are_the_texts_of_its_clips_in_their_order(encoder):
    clips = [clip(encoder, text, text=text) for text in ("un", "deux", "trois")]
    [window] = packed(clips, 500, encoder, random.Random(0))
    assert decoded(encoder, window).split() == list(window.ids) and sorted(window.ids) == ["deux", "trois", "un"]
    assert window.label.prompt == clips[0].label.prompt
    assert window.label.written.count(encoder.end) == 1 and window.label.written[-1] == encoder.end
    assert window.frames == 300
    assert {packed(clips, 500, encoder, random.Random(seed))[0].ids for seed in range(20)} > {window.ids}


def test_timestamps_say_when_each_clip_begins_and_ends(encoder):
    clips = [
        clip(encoder, "a", 152, "un", timed=[Said(0.0, 1.5, "un")]),
        clip(encoder, "b", 102, "deux", timed=[Said(0.0, 1.0, "deux")]),
    ]
    [window] = packed(clips, 500, encoder, random.Random(0))
    times = [
        0.02 * (token - encoder.first_timestamp) for token in window.label.written if token >= encoder.first_timestamp
    ]
    expected = {("a", "b"): [0, 1.5, 1.52, 2.52], ("b", "a"): [0, 1.0, 1.02, 2.52]}[window.ids]
    assert times == pytest.approx(expected)


def test_other_languages_and_previous_texts_are_not_joined(encoder):
    clips = [
        clip(encoder, "fr"),
        clip(encoder, "de", language="de"),
        clip(encoder, "fr2"),
        clip(encoder, "p", previous="x"),
    ]
    windows = packed(clips, 500, encoder, random.Random(0))
    assert sorted(sorted(window.ids) for window in windows) == [["de"], ["fr", "fr2"], ["p"]]


def test_a_clip_without_speech_adds_silence_and_no_text(encoder):
    [window] = packed([clip(encoder, "a"), clip(encoder, "b", text="")], 500, encoder, random.Random(0))
    assert decoded(encoder, window).split() == ["un"] and window.frames == 200


@given(
    st.lists(st.tuples(st.integers(10, 500), st.integers(0, 8)), max_size=20),
    st.integers(0, 10**6),
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_clip_is_in_one_window_and_nothing_is_cut(encoder, shapes, seed):
    clips = [clip(encoder, str(n), frames, f"m{n} " * words) for n, (frames, words) in enumerate(shapes)]
    windows = packed(clips, 500, encoder, random.Random(seed))
    assert sorted(name for window in windows for name in window.ids) == sorted(c.ids[0] for c in clips)
    by_name = {c.ids[0]: c for c in clips}
    for window in windows:
        inside = [by_name[name] for name in window.ids]
        assert window.frames == sum(c.frames for c in inside) <= 500 and len(window.label) <= encoder.max_tokens
        assert window.label.written == (*(t for c in inside for t in c.label.written[:-1]), encoder.end)


def test_a_window_is_what_the_extractor_makes_of_the_joined_audio(multilingual, encoder):
    """But for the frames where one clip ends and the next begins."""
    extractor = multilingual[1].feature_extractor
    chance = np.random.default_rng(0)
    loud, soft = (chance.normal(0, scale, 16_000).astype(np.float32) for scale in (0.3, 0.00001))
    clips = [Clip((n,), log_mel(wave, extractor), encoder.encode("un")) for n, wave in (("loud", loud), ("soft", soft))]
    [window] = packed(clips, 500, encoder, random.Random(1))
    waves = {"loud": loud, "soft": soft}
    # A clip's log-mel has a frame or two more than its audio: silence.
    joined = np.concatenate(
        [np.pad(waves[n], (0, 160 * c.frames - 16_000)) for n in window.ids for c in clips if c.ids == (n,)]
    )
    expected = pad_log_mel(log_mel(joined, extractor), window.frames)[:, : window.frames]
    same = np.isclose(window.log_mel, expected, atol=0.05).all(axis=0)
    assert same.mean() > 0.95
