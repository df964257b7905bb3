"""What of a clip changes from epoch to epoch, and that nothing else decides about it."""

import dataclasses
import random
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch

from whisper_tuner.data.augment import PROFILE_KEYS, UNCHANGED, Augmentation, augmentation_of
from whisper_tuner.data.batches import ShardBatches
from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.feature_store import FeatureStore
from whisper_tuner.data.labels import IGNORED, label_encoder

ALL_ON = {
    "speed_perturbation": 0.1,
    "timestamps_share": 0.5,
    "previous_text_share": 0.5,
    "mask_time_prob": 0.1,
    "mask_feature_prob": 0.1,
}


@pytest.fixture
def batches_of(timestamps, tmp_path, profile_of):
    model, processor = timestamps

    def make(samples, *, shuffle=True, problems=None, **settings):
        return ShardBatches(
            samples,
            profile_of(**{"seed": 3, **settings}),
            features=FeatureStore(tmp_path / "cache", processor.feature_extractor),
            labels=label_encoder(model, processor.tokenizer, language="fr"),
            shuffle=shuffle,
            on_problem=[].append if problems is None else problems.append,
        )

    return make


def named(count, seconds=2.0):
    return [Sample(id=f"s{n}", audio=f"{n}.wav", text=f"text {n}", duration_s=seconds) for n in range(count)]


def trained(batches, epoch, members=("a",), member=0):
    """By id, the clip that each of a member's samples becomes on its own: features without padding, and label."""
    batches.begin_epoch(epoch)
    found = {}
    for step in batches.plan(epoch, None, members, [1.0] * len(members))[member]:
        for number in step:
            clip = batches._clip(batches.samples[number], batches.samples[number], lambda: False)
            found[clip.ids[0]] = (clip.log_mel.tobytes(), clip.label)
    return found


def test_a_clip_is_the_same_on_whatever_rank_in_an_epoch_and_another_in_the_next(clips, batches_of):
    alone = trained(batches_of(clips, **ALL_ON), epoch=1)
    pair = [trained(batches_of(clips, **ALL_ON), epoch=1, members=("a", "b"), member=rank) for rank in (0, 1)]
    assert pair[0] | pair[1] == alone and len(alone) == len(clips)
    later = trained(batches_of(clips, **ALL_ON), epoch=2)
    assert sum(later[clip] != alone[clip] for clip in alone) > len(clips) / 2
    other_seed = trained(batches_of(clips, **ALL_ON, seed=4), epoch=1)
    assert sum(other_seed[clip] != alone[clip] for clip in alone) > len(clips) / 2


def test_no_other_random_generator_decides_or_is_used(clips, batches_of):
    def states():
        return np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), random.getstate()

    first = trained(batches_of(clips[:5], batch_size=4, **ALL_ON), epoch=0)
    for seed in (np.random.seed, torch.manual_seed, random.seed):
        seed(7)
    before = states()
    assert trained(batches_of(clips[:5], batch_size=1, **ALL_ON), epoch=0) == first
    assert states() == before


def test_what_is_validated_is_never_changed(clips, batches_of):
    changed, plain = batches_of(clips, shuffle=False, **ALL_ON), batches_of(clips, shuffle=False)
    assert trained(changed, epoch=1) == trained(plain, epoch=0)
    assert changed.plan_settings() == plain.plan_settings()


def test_what_is_off_changes_nothing_and_is_not_recorded(clips, batches_of, profile_of):
    batches = batches_of(clips)
    assert trained(batches, epoch=0) == trained(batches, epoch=5)
    assert UNCHANGED.off == augmentation_of(profile_of(), clips).off == {*PROFILE_KEYS}
    recorded = set(batches_of(clips, **ALL_ON).plan_settings()) - set(batches.plan_settings())
    assert recorded == {*ALL_ON, "mask_time_length", "mask_feature_length"}


# speed


def test_each_speed_is_as_frequent_as_the_others():
    augmentation = Augmentation(speed_perturbation=0.1, longest_s=30.0)
    speeds = Counter(augmentation.speed(sample, epoch) for sample in named(300) for epoch in range(2))
    assert set(speeds) == {0.9, 1.0, 1.1} and min(speeds.values()) > 160


def test_no_clip_is_slowed_down_beyond_the_longest():
    samples = [*named(50, seconds=28.0), Sample(id="longest", audio="a.wav", text="a", duration_s=30.0)]
    augmentation = Augmentation(speed_perturbation=0.1, longest_s=30.0)
    speeds = {augmentation.speed(sample, epoch) for sample in samples for epoch in range(5)}
    assert speeds == {1.0, 1.1}
    assert 0.9 in {augmentation.speed(dataclasses.replace(samples[0], duration_s=27.0), epoch) for epoch in range(20)}


# masks


@pytest.mark.parametrize(("frames", "bins"), [*((frames, 80) for frames in (1, 3, 4, 12, 100)), (3000, 128)])
def test_masks_cover_their_share_and_never_a_whole_clip(frames, bins):
    settings = {"mask_time_prob": 0.5, "mask_time_length": 10**6, "mask_feature_prob": 0.5, "mask_feature_length": 40}
    mel = np.random.default_rng(0).normal(size=(bins, frames)).astype(np.float32)
    for sample in named(20):
        masked = Augmentation(**settings).masked(mel, sample, 0)
        assert masked.shape == mel.shape and masked.dtype == mel.dtype
        assert (masked == mel).any() and masked.max() == mel.max()
        assert set(masked[masked != mel].tolist()) <= {np.float32(mel.mean(dtype=np.float64)).item()}


def test_masks_grow_with_the_clip():
    def hidden(frames, **settings):
        """Frames that are masked whole, of a hundred clips."""
        mel = np.random.default_rng(0).normal(size=(80, frames)).astype(np.float32)
        masked = [Augmentation(**settings).masked(mel, sample, 0) for sample in named(100)]
        return np.mean([(clip == clip[:1]).all(axis=0).mean() for clip in masked])

    for frames in (30, 300, 3000):
        assert hidden(frames, mask_time_prob=0.1) == pytest.approx(0.1, abs=0.025)
    assert hidden(300, mask_time_prob=0.0, mask_feature_prob=0.2) == 0


def test_masking_leaves_the_cached_features_alone():
    mel = np.random.default_rng(0).normal(size=(80, 100)).astype(np.float32)
    before = mel.copy()
    Augmentation(mask_time_prob=0.5, mask_feature_prob=0.5).masked(mel, named(1)[0], 0)
    assert (mel == before).all()


# labels


def label(augmentation, sample, epoch, encoder):
    """Return the label of a step of one clip."""
    timed, previous = augmentation.timed(sample, epoch, sample), augmentation.previous_text(sample, epoch)
    return encoder.encode(sample.text, timed=timed, previous=previous)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_shares_of_clips_are_trained_with_timestamps_and_a_previous_text(timestamps, share):
    model, processor = timestamps
    encoder = label_encoder(model, processor.tokenizer, language="fr")
    samples = [dataclasses.replace(sample, text="a") for sample in named(301)]
    settings = {"timestamps_share": share, "previous_text_share": share}
    previous = {sample.id: "b" for sample in samples}
    labels = [label(Augmentation(**settings, previous=previous), sample, 1, encoder) for sample in samples]
    timed, prompted, both = (
        {n for n, one in enumerate(labels) if one.written[0] == encoder.first_timestamp},
        {n for n, one in enumerate(labels) if one.prompt[0] != encoder.start},
        share * share * 301,
    )
    assert len(timed) == pytest.approx(share * 301, abs=30) == pytest.approx(len(prompted), abs=30)
    assert len(timed & prompted) == pytest.approx(both, abs=20)  # one does not decide about the other


def test_timestamps_end_where_the_clip_ends_at_its_speed(timestamps):
    model, processor = timestamps
    encoder = label_encoder(model, processor.tokenizer, language="fr")
    augmentation = Augmentation(timestamps_share=1.0, speed_perturbation=0.1, longest_s=30.0)
    ends = {label(augmentation, sample, 0, encoder).written[-2] - encoder.first_timestamp for sample in named(30)}
    assert ends == {round(2.0 / speed / 0.02) for speed in (0.9, 1.0, 1.1)}


def test_times_of_the_parts_of_a_text_are_those_at_its_speed(timestamps, profile_of):
    model, processor = timestamps
    encoder = label_encoder(model, processor.tokenizer, language="fr")
    timed_text = "<|0.00|> a<|0.80|><|1.00|> b<|2.00|>"
    samples = [dataclasses.replace(sample, text="a b", timed_text=timed_text) for sample in named(30)]
    augmentation = augmentation_of(profile_of(timestamps_share=1.0, speed_perturbation=0.1), samples)
    augmentation = dataclasses.replace(augmentation, longest_s=30.0)
    labels = {label(augmentation, sample, 0, encoder) for sample in samples}
    times = {tuple(t - encoder.first_timestamp for t in one.written if t >= encoder.first_timestamp) for one in labels}
    assert times == {tuple(round(at / speed / 0.02) for at in (0, 0.8, 1.0, 2.0)) for speed in (0.9, 1.0, 1.1)}
    plain = len(encoder.encode("a b"))
    assert {len(one) for one in labels} == {plain + 3} and augmentation.longest_label(plain, encoder) >= plain + 3


def test_what_was_said_before_is_the_row_before_in_the_same_language(profile_of):
    first, second, third, fourth = named(4)
    rows = [first, second, dataclasses.replace(third, language="ja"), fourth]
    assert augmentation_of(profile_of(), rows).previous == {"s1": "text 0"}


def test_a_batch_with_a_previous_text_says_what_the_decoder_reads(clips, batches_of):
    batches = batches_of(clips, previous_text_share=0.5, batch_size=20, accumulation=1)
    [[batch]] = batches.read(batches.plan(0, None, ["a"], [1.0])[0])
    assert batch["decoder_input_ids"].shape == batch["labels"].shape == (20, batch["labels"].shape[1])
    learnt = batch["labels"] != IGNORED
    assert (batch["decoder_input_ids"][:, 1:][learnt[:, :-1]] == batch["labels"][:, :-1][learnt[:, :-1]]).sum() > 100


def test_memory_is_measured_with_the_longest_that_a_label_can_become(clips, batches_of):
    frames, plain = batches_of(clips).longest()
    for settings in (ALL_ON, {"timestamps_share": 1.0}, {"previous_text_share": 1.0}):
        batches = batches_of(clips, batch_size=1, **settings)
        longest = batches.longest()
        joined = 500 if "timestamps_share" in settings else frames  # a whole window
        assert longest[0] == joined and plain < longest[1] <= 64
        for epoch in range(3):
            batches.begin_epoch(epoch)
            for batch in chain(*batches.read(batches.plan(epoch, None, ["a"], [1.0])[0])):
                assert batch["labels"].shape[1] <= longest[1]
                assert batch["input_features"].shape[2] <= joined


@pytest.mark.parametrize("seconds", [0.1, 0.3, 5.0])
def test_the_shortest_and_the_longest_clip_are_trained(audio_file, tmp_path, batches_of, seconds):
    path, problems = audio_file(tmp_path / "clip.wav", seconds=seconds), []
    sample = Sample(id="one", audio=path, text="a", duration_s=seconds)
    most = {"timestamps_share": 1.0, "previous_text_share": 1.0, "mask_time_prob": 0.5, "mask_feature_prob": 0.5}
    batches = batches_of([sample], problems=problems, **ALL_ON | most)
    for epoch in range(6):
        batches.begin_epoch(epoch)
        [made] = batches.read([[0]])
        assert all(torch.isfinite(batch["input_features"]).all() for batch in made)
        assert any(batch["ids"] == ["one"] and batch["input_features"].std() > 0 for batch in made)
    assert not problems
