"""Clips with timestamps that are joined: what the model hears and learns to write, and what is never joined."""

import dataclasses
from random import Random

import numpy as np
import pytest

from whisper_tuner.data.audio import load_audio
from whisper_tuner.data.batches import ShardBatches
from whisper_tuner.data.encoder_store import EncoderStore
from whisper_tuner.data.feature_store import FeatureStore
from whisper_tuner.data.features import log_mel
from whisper_tuner.data.labels import IGNORED, label_encoder
from whisper_tuner.data.windows import Clip, Window
from whisper_tuner.timed_text import Said


@pytest.fixture
def encoder(timestamps):
    model, processor = timestamps
    return label_encoder(model, processor.tokenizer, language="fr")


@pytest.fixture
def clip_of(encoder, timestamps):
    extractor = timestamps[1].feature_extractor

    def make(sample, *, timed=True, language="", task="", previous=""):
        said = (Said(0.0, sample.duration_s, sample.text),) if timed else ()
        return Clip(
            ids=(sample.id,),
            log_mel=log_mel(load_audio(sample.audio), extractor),
            label=encoder.encode(sample.text, language=language, task=task, timed=said, previous=previous),
            timed=said,
            way=(language, task),
            previous=previous,
        )

    return make


@pytest.fixture
def window(encoder):
    return Window(frames=500, frames_per_s=100.0, labels=encoder, longest_pause_s=0.0)


def times(clip, encoder):
    """Return the timestamps of a label, in seconds, and its other tokens."""
    found = [token - encoder.first_timestamp for token in clip.label.written if token >= encoder.first_timestamp]
    return [0.02 * time for time in found], [token for token in clip.label.written if token < encoder.first_timestamp]


def test_what_is_joined_has_the_times_of_its_parts_one_after_the_other(clips, clip_of, window, encoder):
    parts = [clip_of(sample) for sample in clips[2:5]]
    [joined] = window.of(parts, Random(1))
    order = [part for name in joined.ids for part in parts if part.ids == (name,)]
    assert {*joined.ids} == {sample.id for sample in clips[2:5]} and joined.frames == sum(p.frames for p in parts)
    starts = np.cumsum([0, *(part.frames for part in order[:-1])]) / 100
    ends = [start + part.timed[0].end for start, part in zip(starts, order, strict=True)]
    found, words = times(joined, encoder)
    assert found == pytest.approx([time for both in zip(starts, ends, strict=True) for time in both], abs=0.011)
    assert words == [token for part in order for token in times(part, encoder)[1][:-1]] + [encoder.end]


def test_between_clips_are_pauses_as_quiet_as_the_clip_before(clips, clip_of, window, encoder):
    parts, longer = [clip_of(sample) for sample in clips[2:5]], dataclasses.replace(window, longest_pause_s=0.6)
    [joined] = longer.of(parts, Random(1))
    order = [part for name in joined.ids for part in parts if part.ids == (name,)]
    found, _ = times(joined, encoder)
    pauses = [start - end for end, start in zip(found[1:-1:2], found[2::2], strict=True)]
    assert len(pauses) == 2 and all(-0.02 <= pause <= 0.62 for pause in pauses) and sum(pauses) > 0.1
    frames = sum(part.frames for part in parts) + 100 * sum(pauses)
    assert joined.frames == pytest.approx(frames, abs=4)
    pause = joined.log_mel[:, order[0].frames : order[0].frames + round(100 * pauses[0]) - 2]
    assert pause.mean() <= np.quantile(order[0].log_mel.mean(axis=0), 0.11) + 0.01 and pause.std(axis=1).any()


def test_what_is_joined_sounds_as_its_joined_audio(clips, clip_of, window, timestamps):
    quiet = clip_of(clips[6])
    parts = [clip_of(clips[5]), quiet]
    [joined] = window.of(parts, Random(1))
    audio = {sample.id: load_audio(sample.audio) for sample in clips}
    whole = log_mel(np.concatenate([audio[name] for name in joined.ids]), timestamps[1].feature_extractor)
    seam = next(part for part in parts if part.ids[0] == joined.ids[0]).frames
    assert np.abs(joined.log_mel[:, : seam - 3] - whole[:, : seam - 3]).max() < 1e-4
    assert abs(joined.frames - whole.shape[1]) <= 2


def test_each_step_joins_in_another_order(clips, clip_of, window):
    parts = [clip_of(sample) for sample in clips[:5]]
    orders = {tuple(name for clip in window.of(parts, Random(seed)) for name in clip.ids) for seed in range(10)}
    assert len(orders) > 5 and window.of(parts, Random(3))[0].ids == window.of(parts, Random(3))[0].ids


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("without timestamps", lambda clip_of, sample: clip_of(sample, timed=False)),
        ("another task", lambda clip_of, sample: clip_of(sample, task="translate")),
        ("another language", lambda clip_of, sample: clip_of(sample, language="ja")),
        (
            "longer than the window",
            lambda clip_of, sample: dataclasses.replace(clip_of(sample), log_mel=np.ones((80, 480))),
        ),
        (
            "more tokens than are decoded of a window",
            lambda clip_of, sample: clip_of(dataclasses.replace(sample, text="much too long " * 2)),
        ),
    ],
)
def test_what_is_never_joined(clips, clip_of, window, why, change):
    parts = [clip_of(clips[3]), change(clip_of, clips[4])]
    assert sorted(clip.ids for clip in window.of(parts, Random(0))) == sorted(part.ids for part in parts), why


def test_silence_in_a_window_has_no_times_and_a_previous_text_is_the_first_ones(clips, clip_of, window, encoder):
    silent = clip_of(dataclasses.replace(clips[3], text=""))
    [joined] = window.of([silent, clip_of(clips[4], previous="before")], Random(0))
    assert len(times(joined, encoder)[0]) == 2
    both = [clip_of(clips[n], previous="before") for n in (3, 4)]
    [joined] = window.of(both, Random(0))
    assert joined.label.prompt == both[0].label.prompt


def test_of_a_clip_that_the_window_cuts_only_its_beginning_is_learnt(clips, clip_of, window, encoder):
    parts, last = [clip_of(sample) for sample in clips[2:4]], clip_of(clips[8]).cut(0.5)
    whole, [joined] = window.of(parts, Random(1))[0], window.of(parts, Random(1), last)
    assert joined.ids == whole.ids and joined.frames == whole.frames + round(clip_of(clips[8]).frames / 2)
    begins = encoder.first_timestamp + round(whole.frames / 100 / 0.02)
    assert joined.label.written == (*whole.label.written[:-1], begins, encoder.end)
    full = dataclasses.replace(window, frames=whole.frames)
    assert full.of(parts, Random(1), last)[0].label == whole.label


def test_of_a_text_in_parts_the_first_is_cut(clips, clip_of):
    said = (Said(0.2, 0.8, "a"), Said(1.0, clips[6].duration_s, "b"))
    cut = dataclasses.replace(clip_of(clips[6]), timed=said).cut(0.5)
    assert cut.timed == (Said(0.2, 0.2, ""),) and 0.2 < cut.frames / 100 < 0.8


@pytest.fixture
def batches_of(timestamps, tmp_path, profile_of):
    model, processor = timestamps

    def make(samples, *, store=None, **settings):
        return ShardBatches(
            samples,
            profile_of(**{"seed": 3, "timestamps_share": 0.7, **settings}),
            features=FeatureStore(tmp_path / "cache", processor.feature_extractor),
            labels=label_encoder(model, processor.tokenizer, language="fr"),
            encoder_store=store,
        )

    return make


@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize("is_padded", [True, False])
def test_every_clip_is_trained_once_an_epoch_and_none_needs_more_than_was_measured(clips, batches_of, hosts, is_padded):
    batches, names = batches_of(clips, batch_size=8), [f"h{n}" for n in range(hosts)]
    batches.layout = dataclasses.replace(batches.layout, is_padded=is_padded)
    longest, heard, trained = batches.full_clip(), 0, []
    batches.begin_epoch(1)
    for steps in batches.plan(1, None, names, [1.0] * hosts):
        for batch in (batch for step in batches.read(steps) for batch in step):
            trained += batch["ids"]
            lengths = batch.get("lengths")
            heard += len(lengths.frames) if lengths else len(batch["labels"])
            frames = max(lengths.frames) if lengths else batch["input_features"].shape[2]
            tokens = max(lengths.tokens) if lengths else batch["labels"].shape[1]
            assert frames <= longest[0] and tokens <= longest[1]
    assert sorted(trained) == sorted(sample.id for sample in clips)
    assert heard < len(clips) or hosts > 1  # of several, each has few to join


def test_a_window_cuts_the_same_clip_after_a_resume_which_is_ordered_in_time(clips, batches_of):
    ordered = []

    class Audio:
        def order(self, samples):
            ordered.extend(samples)

        def wait(self, sample, given_up):
            assert sample in ordered

    batches = batches_of(clips, batch_size=4, timestamps_share=1.0)
    batches._missing_audio = Audio()
    steps = batches.plan(0, None, ["a"], [1.0])[0]
    whole = [batch["input_features"] for step in batches.read(steps) for batch in step]
    assert len(ordered) > len(clips)
    later = [batch["input_features"] for step in batches.read(steps[2:]) for batch in step]
    assert all((one == other).all() for one, other in zip(whole[-len(later) :], later, strict=True))


def test_where_memory_is_too_small_or_the_encoder_is_kept_nothing_is_joined(clips, batches_of, tmp_path, timestamps):
    small = batches_of(clips)
    small.layout = dataclasses.replace(small.layout, pads_in_full=False)
    kept = batches_of(clips, store=EncoderStore(tmp_path, timestamps[0].get_encoder(), precision="float32"))
    for batches in (small, kept):
        assert batches.full_clip() is None
        steps = batches.plan(0, None, ["a"], [1.0])[0]
        assert sum(len(batch["labels"]) for step in batches.read(steps) for batch in step) == len(clips)


def test_in_some_windows_nobody_speaks_and_only_their_end_is_learnt(clips, batches_of):
    batches = batches_of(clips, batch_size=4, timestamps_share=1.0)
    batches.layout = dataclasses.replace(batches.layout, is_padded=True)
    silent, steps = [], 0
    for epoch in range(8):
        batches.begin_epoch(epoch)
        for step in batches.read(batches.plan(epoch, None, ["a"], [1.0])[0]):
            steps += 1
            rows = [row for batch in step for row in batch["labels"].tolist()]
            silent += [row for row in rows if sum(token != IGNORED for token in row) == 2]
    times, end = batches._labels.first_timestamp, batches._labels.end
    assert 0.1 * steps < len(silent) < 0.4 * steps
    assert all([token for token in row if token != IGNORED] == [times, end] for row in silent)
