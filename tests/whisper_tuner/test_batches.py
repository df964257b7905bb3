import itertools
import json
import random
import subprocess
import sys
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from whisper_tuner.batches import BatchShape, ShardBatches, bucket_edges
from whisper_tuner.dataset import Sample
from whisper_tuner.features import FeatureCache
from whisper_tuner.labels import label_encoder
from whisper_tuner.shards import assign_shards

HOSTS = ["ada.local", "bob.local", "cy.local", "dee.local"]


def samples_of(count, tmp_path, seed=0, longest=30.0):
    """Metadata alone: most clips short, a few near the longest, as in real sets."""
    chance = random.Random(seed)
    durations = [min(0.3 + chance.expovariate(9 / longest), longest) for _ in range(count)]
    return [
        Sample(id=f"s{n}", audio=tmp_path / f"{n}.wav", text=f"text {n}", duration_s=seconds)
        for n, seconds in enumerate(durations)
    ]


@pytest.fixture
def make_batches(multilingual, tmp_path):
    model, processor = multilingual
    cache = FeatureCache(tmp_path / "cache", processor.feature_extractor)
    labels = label_encoder(model, processor.tokenizer, language="fr")

    def make(shards, serves, *, seed=0, shuffle=True, on_problem=lambda problem: None, **shape):
        return ShardBatches(
            shards,
            serves=serves,
            features=cache,
            labels=labels,
            shape=BatchShape(**shape),
            seed=seed,
            shuffle=shuffle,
            on_problem=on_problem,
        )

    return make


# shards


@pytest.mark.parametrize("hosts", [1, 2, 3, 4])
def test_every_sample_goes_to_exactly_one_balanced_shard(tmp_path, hosts):
    samples = samples_of(400, tmp_path)
    shards = assign_shards(samples, HOSTS[:hosts])
    assert Counter(s.id for shard in shards for s in shard) == Counter(s.id for s in samples)
    seconds = [sum(s.duration_s for s in shard) for shard in shards]
    assert max(seconds) / (sum(seconds) / hosts) < 1.05
    assert max(map(len, shards)) - min(map(len, shards)) <= 8


def test_weights_set_the_shares(tmp_path):
    shards = assign_shards(samples_of(700, tmp_path), HOSTS[:3], weights=[1, 2, 0.5])
    seconds = [sum(s.duration_s for s in shard) for shard in shards]
    for got, weight in zip(seconds, [1, 2, 0.5], strict=True):
        assert got / sum(seconds) == pytest.approx(weight / 3.5, rel=0.06)
    assert len(shards[1]) == pytest.approx(400, abs=15)


def test_shards_stay_put_when_a_host_leaves_or_comes(tmp_path):
    samples = samples_of(400, tmp_path)
    four, three = assign_shards(samples, HOSTS), assign_shards(samples, HOSTS[:3])
    kept = [len(set(before) & set(after)) / len(before) for before, after in zip(four[:3], three, strict=True)]
    assert min(kept) > 0.8


def test_order_of_hosts_and_of_samples_changes_nothing(tmp_path):
    samples = samples_of(100, tmp_path)
    shards = dict(zip(HOSTS, assign_shards(samples, HOSTS), strict=True))
    swapped = dict(zip(HOSTS[::-1], assign_shards(samples[::-1], HOSTS[::-1]), strict=True))
    assert {host: set(shard) for host, shard in shards.items()} == {host: set(s) for host, s in swapped.items()}


def test_shards_are_the_same_in_another_interpreter(tmp_path):
    script = """
import json, sys
from pathlib import Path
from whisper_tuner.shards import assign_shards
from whisper_tuner.dataset import Sample
samples = [Sample(id=i, audio=Path(i), text=i, duration_s=d) for i, d in json.loads(sys.argv[1])]
print(json.dumps([[s.id for s in shard] for shard in assign_shards(samples, json.loads(sys.argv[2]))]))
"""
    samples = samples_of(50, tmp_path)
    arguments = [json.dumps([(s.id, s.duration_s) for s in samples]), json.dumps(HOSTS)]
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, capture_output=True, check=True, env={"PYTHONHASHSEED": "7"}, text=True)
    assert json.loads(result.stdout) == [[s.id for s in shard] for shard in assign_shards(samples, HOSTS)]


def test_fewer_samples_than_hosts(tmp_path):
    shards = assign_shards(samples_of(2, tmp_path), HOSTS)
    assert sorted(map(len, shards)) == [0, 0, 1, 1]
    assert assign_shards([], HOSTS) == [[], [], [], []]


def test_hosts_must_be_distinct_and_weights_positive(tmp_path):
    for hosts, weights in (([], None), (["a", "a"], None), (["a"], [0]), (["a"], [1, 1])):
        with pytest.raises(ValueError, match="assign_shards needs"):
            assign_shards(samples_of(2, tmp_path), hosts, weights)


# edges


def test_edges_are_few_and_hold_every_clip(tmp_path):
    samples = samples_of(300, tmp_path)
    edges = bucket_edges(samples, 3000)
    assert len(edges) <= 6 and list(edges) == sorted(edges) and all(edge % 2 == 0 for edge in edges)
    extractor = WhisperFeatureExtractor()
    longest = max(s.duration_s for s in samples)
    assert min(int(longest * 16_000) // extractor.hop_length + 2, 3000) <= edges[-1] <= 3000


def test_edges_add_the_least_padding(tmp_path):
    samples = samples_of(60, tmp_path)
    lengths = [min(-(-int(s.duration_s * 100 + 2.999999) // 50) * 50, 3000) for s in samples]

    def padded(edges):
        return sum(min((e for e in edges if e >= n), default=10**9) for n in lengths)

    best = min(padded(edges) for edges in itertools.combinations(sorted(set(lengths)), 3))
    assert padded(bucket_edges(samples, 3000, count=3)) == best


# the steps of an epoch


@pytest.mark.parametrize("serves", [[[0], [1], [2]], [[0, 2], [1]], [[2, 1, 0]]])
@pytest.mark.parametrize("epoch", [0, 3])
def test_every_sample_once_an_epoch_and_equal_steps_on_all_ranks(tmp_path, make_batches, serves, epoch):
    samples = samples_of(83, tmp_path)
    shards = [samples[:40], samples[40:70], samples[70:]]
    plans = [make_batches(shards, rank, batch_size=4).plan(epoch) for rank in serves]
    assert {len(plan) for plan in plans} == {10}
    assert Counter(s.id for plan in plans for step in plan for s in step) == Counter(s.id for s in samples)


def test_a_shard_that_runs_out_gives_empty_steps(tmp_path, make_batches):
    samples = samples_of(20, tmp_path)
    plan = make_batches([samples[:16], samples[16:]], [1], batch_size=4).plan(0)
    assert sorted(map(len, plan)) == [0, 0, 0, 4]
    assert make_batches([[], []], [0]).steps_per_epoch == 0


def test_serving_two_shards_is_the_union_of_serving_each(tmp_path, make_batches):
    shards = assign_shards(samples_of(50, tmp_path), HOSTS[:2])
    alone = [make_batches(shards, [n], seed=5, batch_size=4).plan(1) for n in (0, 1)]
    assert make_batches(shards, [0, 1], seed=5, batch_size=4).plan(1) == [a + b for a, b in zip(*alone, strict=True)]


def test_order_follows_seed_and_epoch_alone(tmp_path, make_batches):
    shards = [samples_of(60, tmp_path)]
    plan = make_batches(shards, [0], seed=1).plan(0)
    assert make_batches(shards, [0], seed=1).plan(0) == plan
    assert make_batches(shards, [0], seed=1).plan(1) != plan
    assert make_batches(shards, [0], seed=2).plan(0) != plan
    companions = [{s.id for s in step} for step in make_batches(shards, [0], seed=1).plan(1)]
    assert any({s.id for s in step} not in companions for step in plan)  # batches are mixed anew, not only reordered


def test_ranks_train_on_equally_long_audio_at_each_step(tmp_path, make_batches):
    shards = assign_shards(samples_of(400, tmp_path, longest=4.9), HOSTS[:3])
    batches = [make_batches(shards, [n], batch_size=8) for n in range(3)]

    def frames(step):
        return next(e for e in batches[0].edges if e >= max(s.duration_s for s in step) * 100)

    steps = list(zip(*(b.plan(0) for b in batches), strict=True))
    waited = sum(max(frames(s) for s in step if s) for step in steps)
    worked = max(sum(frames(step) for step in b.plan(0) if step) for b in batches)
    assert waited < 1.15 * worked


# the batches themselves


def test_batches_hold_padded_features_labels_and_ids(clips, make_batches, multilingual):
    _, processor = multilingual
    source = make_batches([clips], [0], batch_size=6)
    seen = []
    for (batch,) in source.epoch(0):
        size, mels, frames = batch["input_features"].shape
        assert (size, mels) == (len(batch["ids"]), 80) and frames in source.edges
        assert batch["input_features"].dtype == torch.float32 and batch["labels"].dtype == torch.int64
        for row, clip_id in zip(batch["labels"], batch["ids"], strict=True):
            text = processor.tokenizer.decode(row[row != -100], skip_special_tokens=True)
            assert text.strip() == next(clip.text for clip in clips if clip.id == clip_id)
        seen += batch["ids"]
    assert sorted(seen) == sorted(clip.id for clip in clips)
    assert len({b["input_features"].shape[2] for (b,) in source.epoch(0)}) > 1


def test_full_context_equals_the_feature_extractor(clips, make_batches, multilingual):
    from whisper_tuner.audio import load_audio

    extractor = multilingual[1].feature_extractor
    (batch,) = next(make_batches([clips], [0], batch_size=3, audio_context="full", shuffle=False).epoch(0))
    waveforms = [load_audio(next(c.audio for c in clips if c.id == name)) for name in batch["ids"]]
    expected = [extractor(w, sampling_rate=16_000, return_tensors="np").input_features[0] for w in waveforms]
    np.testing.assert_allclose(batch["input_features"].numpy(), np.stack(expected), atol=1e-4)


def test_micro_batches_split_a_step(clips, make_batches):
    whole = [b["ids"] for (b,) in make_batches([clips], [0], batch_size=8).epoch(0)]
    for step, ids in zip(make_batches([clips], [0], batch_size=8, micro_batch=3).epoch(0), whole, strict=True):
        assert all(len(batch["ids"]) <= 3 for batch in step)
        assert [name for batch in step for name in batch["ids"]] == ids


def test_an_unreadable_clip_is_reported_and_its_step_goes_on(clips, make_batches, tmp_path):
    gone = Sample(id="gone", audio=tmp_path / "gone.wav", text="x", duration_s=1.0, line=9)
    problems = []
    source = make_batches([[*clips[:3], gone]], [0], batch_size=2, on_problem=problems.append)
    assert sorted(name for step in source.epoch(0) for b in step for name in b["ids"]) == ["clip0", "clip1", "clip2"]
    assert [problem.line for problem in problems] == [9]
    assert list(make_batches([[gone]], [0]).epoch(0)) == [[]]


def test_an_epoch_can_start_late_and_be_left_early(clips, make_batches):
    source = make_batches([clips], [0], batch_size=4)
    ids = [b["ids"] for (b,) in source.epoch(2)]
    assert [b["ids"] for (b,) in source.epoch(2, first_step=3)] == ids[3:]
    left = source.epoch(0)
    next(left)
    left.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
