import hashlib
import itertools
import json
import math
import statistics
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_steps import FIVE, HOSTS, samples_of

from distributed.worker.whisper_wrapper import WhisperModelWrapper
from whisper_tuner.data.batch_shapes import LABEL_GRID, BatchLayout, padded_frames
from whisper_tuner.data.batches import ShardBatches
from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.feature_store import FeatureStore
from whisper_tuner.data.labels import IGNORED, label_encoder
from whisper_tuner.data.steps import MEL_FRAMES, Cost, assign_shards
from whisper_tuner.model.base_model import prepare


@pytest.fixture
def make_batches(multilingual, tmp_path, profile_of):
    model, processor = multilingual
    cache = FeatureStore(tmp_path / "cache", processor.feature_extractor)
    labels = label_encoder(model, processor.tokenizer, language="fr")

    def make(*shards, alone=False, shuffle=True, on_problem=lambda problem: None, missing_audio=None, **settings):
        """Of fixed shards, one for each member; alone: one rank trains them all."""

        def assign(samples, names, weights):
            assert len(names) == len(shards) == len(weights)
            return [[sample for sample in shard if sample in samples] for shard in shards]

        return ShardBatches(
            [sample for shard in shards for sample in shard],
            profile_of(**{"seed": 0, "shards": tuple(HOSTS[: len(shards)]) if alone else (), **settings}),
            features=cache,
            labels=labels,
            shuffle=shuffle,
            missing_audio=missing_audio,
            assign=assign,
            on_problem=on_problem,
        )

    return make


@pytest.fixture
def shared_out(multilingual, tmp_path, profile_of):
    """Batches of samples that are shared out by assign_shards."""
    model, processor = multilingual
    cache = FeatureStore(tmp_path / "cache", processor.feature_extractor)
    labels = label_encoder(model, processor.tokenizer, language="fr")

    def shared_out(samples, cost=MEL_FRAMES, steps_in_round=1, **settings):
        profile, rounds = profile_of(seed=0, **settings), {"steps_in_round": steps_in_round}
        return ShardBatches(samples, profile, features=cache, labels=labels, cost=cost, **rounds)

    return shared_out


def planned(batches, hosts=1, epoch=0, left=None, weights=None):
    """For each member the samples of each of its steps."""
    plan = batches.plan(epoch, left, FIVE[:hosts], weights or [1.0] * hosts)
    return [[[batches.samples[number] for number in step] for step in steps] for steps in plan]


def read(batches, epoch=0, first_step=0):
    """What a rank that has all of the work trains."""
    return batches.read(iter(batches.plan(epoch, None, HOSTS[:1], [1.0])[0][first_step:]))


def cost(batches, step):
    """The mel frames of a step's clips, each padded to its own length."""
    return sum(padded_frames(100 * sample.duration_s + 2, batches.edges[-1]) for sample in step)


def test_steps_are_made_alike_by_text_as_well_as_by_length(shared_out, tmp_path):
    samples = [
        Sample(id=f"s{n}", audio=tmp_path / "a", text="un mot " * (n % 4 * 10 + 1), duration_s=3.0) for n in range(40)
    ]
    batches = shared_out(samples, Cost(token=20.0), batch_size=4, full_share=0.0)
    steps = planned(batches)[0]
    assert {sum(len(sample.text) for sample in step) for step in steps} == {7 * (1 + 11 + 21 + 31)}
    costs = [batches.cost(0, [samples.index(sample) for sample in step]) for step in steps]
    assert max(costs) == min(costs) > 4 * 300 + 20 * 4 * 30


# the steps of an epoch


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("epoch", [0, 3])
def test_every_sample_once_an_epoch_and_equal_steps_on_all_ranks(tmp_path, make_batches, alone, epoch):
    samples = samples_of(83, tmp_path)
    batches = make_batches(samples[:40], samples[40:70], samples[70:], alone=alone, batch_size=4)
    plans = planned(batches, hosts=1 if alone else 3, epoch=epoch)
    assert {len(plan) for plan in plans} == {21}  # of four clips, on however many hosts
    assert Counter(s.id for plan in plans for step in plan for s in step) == Counter(s.id for s in samples)


def test_a_small_shard_is_spread_over_the_steps(tmp_path, make_batches):
    samples = samples_of(23, tmp_path)
    for end, batch_size, sizes in ((20, 5, [1, 1, 1, 1]), (18, 5, [0, 0, 1, 1]), (23, 6, [1, 2, 2, 2])):
        plans = planned(make_batches(samples[:16], samples[16:end], batch_size=batch_size), hosts=2)
        assert [sorted(map(len, plan)) for plan in plans] == [[4, 4, 4, 4], sizes]
    assert planned(make_batches([], []), hosts=2) == [[], []]


def test_serving_two_shards_is_the_union_of_serving_each(tmp_path, make_batches):
    shards = assign_shards(samples_of(50, tmp_path), HOSTS[:2])
    plans = planned(make_batches(*shards, seed=5, batch_size=4), hosts=2, epoch=1)
    [alone] = planned(make_batches(*shards, alone=True, seed=5, batch_size=4), epoch=1)
    assert alone == [a + b for a, b in zip(*plans, strict=True)]


def test_order_follows_seed_and_epoch_alone(tmp_path, make_batches):
    samples = samples_of(60, tmp_path)
    [plan] = planned(make_batches(samples, seed=1))
    assert planned(make_batches(samples, seed=1)) == [plan]
    assert planned(make_batches(samples, seed=1), epoch=1) != [plan]
    assert planned(make_batches(samples, seed=2)) != [plan]
    companions = [{s.id for s in step} for step in planned(make_batches(samples, seed=1), epoch=1)[0]]
    assert any({s.id for s in step} not in companions for step in plan)  # batches are mixed anew, not only reordered


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_steps_cost_alike_on_all_ranks(tmp_path, make_batches, hosts):
    samples = samples_of(400, tmp_path, longest=4.9)
    batches = make_batches(*assign_shards(samples, HOSTS[:hosts]), batch_size=8)
    costs = [[cost(batches, step) for step in plan] for plan in planned(batches, hosts=hosts)]
    every = [cost for plan in costs for cost in plan]
    assert max(every) <= 2 * statistics.median(every)
    waited = sum(max(at_once) for at_once in zip(*costs, strict=True))
    assert waited < 1.15 * max(map(sum, costs))


def test_long_clips_have_other_companions_in_each_epoch(tmp_path, make_batches):
    batches = make_batches(samples_of(60, tmp_path, longest=4.9), batch_size=4)
    longest = max(batches.samples, key=lambda sample: sample.duration_s)
    found = [
        (n, step) for epoch in range(4) for n, step in enumerate(planned(batches, epoch=epoch)[0]) if longest in step
    ]
    assert len({n for n, _ in found}) > 1 and len({tuple(sorted(s.id for s in step)) for _, step in found}) == 4


def test_what_is_left_goes_to_those_who_are_there(tmp_path, shared_out):
    """All the plans of an epoch together have each sample once, whoever is there meanwhile."""
    samples = samples_of(83, tmp_path)
    batches = shared_out(samples, batch_size=4)
    trained = [s for plan in planned(batches, hosts=3)[:2] for step in plan[:5] for s in step]  # the third is lost
    left = torch.tensor([sample not in trained for sample in samples])
    plans = planned(batches, hosts=2, left=left)
    assert Counter(s.id for s in trained) + Counter(s.id for plan in plans for step in plan for s in step) == Counter(
        s.id for s in samples
    )
    assert len(plans[0]) == len(plans[1]) < len(planned(batches, hosts=2)[0])
    assert planned(batches, hosts=2, left=torch.zeros(83, dtype=torch.bool)) == [[], []]


def test_batches_are_as_large_as_the_shares(tmp_path, make_batches):
    samples = samples_of(80, tmp_path)
    plans = planned(make_batches(samples[:60], samples[60:], batch_size=8), hosts=2, weights=[3.0, 1.0])
    assert [{len(step) for step in plan} for plan in plans] == [{6}, {2}]


def test_a_host_with_less_than_a_clip_a_step_rests_in_some(tmp_path, make_batches):
    samples = samples_of(16, tmp_path)
    plans = planned(make_batches(samples[:12], samples[12:], batch_size=2), hosts=2, weights=[3.0, 1.0])
    sizes = [[len(step) for step in plan] for plan in plans]
    assert sizes == [[1, 2, 1, 2, 1, 2, 1, 2], [0, 1, 0, 1, 0, 1, 0, 1]]  # who takes one more does so with the others


@st.composite
def uneven_sharess(draw):
    """(clips, batch size, what is left, weights of at least a twentieth of their mean, as measured speeds have)."""
    hosts, clips = draw(st.integers(1, 5)), draw(st.integers(1, 80))
    left = draw(st.none() | st.lists(st.booleans(), min_size=clips, max_size=clips))
    speeds = draw(st.lists(st.floats(0.01, 20), min_size=hosts, max_size=hosts))
    mean = sum(speeds) / hosts
    return clips, draw(st.integers(1, 8)), left, [max(speed, mean / 20) for speed in speeds]


@given(uneven_sharess())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_all_hosts_have_work_to_the_end_whatever_their_shares(tmp_path, shared_out, uneven_shares):
    clips, batch_size, left, weights = uneven_shares
    samples = samples_of(clips, tmp_path)
    batches = shared_out(samples, batch_size=batch_size)
    plans = planned(batches, hosts=len(weights), left=left, weights=weights)
    due = [sample.id for sample, is_left in zip(samples, left or [True] * clips, strict=True) if is_left]
    assert sorted(s.id for plan in plans for step in plan for s in step) == sorted(due)
    assert all(any(at_once) for at_once in zip(*plans, strict=True)), "a step in which nobody has work"
    assert len(planned(batches, len(weights), 1, left, weights)[0]) == len(plans[0])
    steps = math.ceil(len(due) / max(batch_size, len(weights)))
    for sizes in ([len(step) for step in plan] for plan in plans):
        own = sum(sizes)
        assert len(sizes) == steps
        if own:
            assert sizes[-1] and max(sizes) - min(sizes) <= 1
            assert max(sizes) <= math.ceil(max(batch_size, len(weights)) * own / len(due))
            rests = [len(list(group)) for works, group in itertools.groupby(sizes, bool) if not works]
            assert all((rest + 1) * own < 2 * steps for rest in rests)


def test_hosts_of_different_speed_have_work_in_proportion_in_each_step(tmp_path, shared_out):
    batches = shared_out(samples_of(400, tmp_path, longest=4.9), batch_size=12)
    plans = planned(batches, hosts=3, weights=[2.0, 1.0, 1.0])
    at_once = zip(*plans, strict=True)
    costs = [(cost(batches, fast) / 2, cost(batches, one), cost(batches, other)) for fast, one, other in at_once]
    assert max(max(step) / min(step) for step in costs) < 1.7
    assert sum(map(max, costs)) < 1.15 * sum(map(min, costs))
    steps = batches.plan(0, None, HOSTS[:3], [2.0, 1.0, 1.0])[0]
    assert [batches.cost(0, step) for step in steps] == [cost(batches, step) for step in plans[0]]


@pytest.mark.parametrize(
    ("hosts", "batch_size", "rest", "expected"),
    [
        (1, 8, 83, "daa8edb30c09cedc"),
        (2, 1, 83, "d18b91b3ec818e5f"),
        (3, 4, 83, "b26aa35fb16f18e0"),
        (4, 2, 31, "3900b822436a1a53"),
        (5, 3, 7, "5106b66345c8857e"),
    ],
)
def test_equal_shares_have_the_plans_that_they_had(tmp_path, shared_out, hosts, batch_size, rest, expected):
    """So that a run with fixed shares can be repeated with a later version."""
    left = None if rest == 83 else [number % 83 < rest for number in range(7, 90)]
    batches = shared_out(samples_of(83, tmp_path), batch_size=batch_size)
    plans = [batches.plan(epoch, left, FIVE[:hosts], [2.5] * hosts) for epoch in (0, 3)]
    assert hashlib.sha256(json.dumps(plans).encode()).hexdigest()[:16] == expected


def full_ones(batches, hosts=1, epoch=0, weights=None, left=None):
    """For each member, how many of each step's clips are padded to the full length; and the names of all of them."""
    plans = planned(batches, hosts, epoch, left, weights)
    full = {batches.samples[number].id for number in batches._full[epoch]}
    return [[sum(sample.id in full for sample in step) for step in steps] for steps in plans], full


@pytest.mark.parametrize("method", ["full", "decoder"])
@pytest.mark.parametrize(("count", "share"), [(1, 0.03), (7, 0.03), (83, 0.1), (100, 0.03), (101, 0.5), (9, 1.0)])
def test_all_clips_have_their_turn_at_full_length(tmp_path, shared_out, method, count, share):
    settings = {"audio_context": "mixed", "full_share": share, "method": method}
    batches, epochs = shared_out(samples_of(count, tmp_path), **settings), math.ceil(1 / share)
    full = [full_ones(batches, epoch=epoch)[1] for epoch in range(epochs)]
    if method == "decoder":  # what its encoder says is kept
        assert all(names == full[0] for names in full) and len(full[0]) == math.ceil(share * count)
    else:
        assert len(full[0]) >= 1 and {len(names) for names in full} <= {int(share * count), math.ceil(share * count)}
        assert set().union(*full) == {sample.id for sample in batches.samples}
    assert full_ones(shared_out(samples_of(count, tmp_path), **settings))[1] == full[0]


def test_a_clip_at_full_length_is_computed_alone_and_counts_for_memory(clips, make_batches):
    """Where a batch of the others takes more, that is what is measured."""
    mixed = {"audio_context": "mixed", "full_share": 0.2}
    batches = make_batches(clips, batch_size=20, **mixed)
    batches.layout = BatchLayout(label_grid=LABEL_GRID)
    full, longest = batches._full_frames, batches.edges[-1]
    assert batches.at_once(full, 8) == 1 and batches.at_once(longest, 8) == 20
    parts = [part for step in read(batches) for part in step]
    assert sorted(len(part["ids"]) for part in parts) == [1, 1, 1, 1, 16]
    sizes = [(len(part["ids"]), part["input_features"].shape[2]) for part in parts]
    assert max(count * frames for count, frames in sizes) <= max(full, 20 * longest)
    assert batches.longest()[0] == longest < full
    batches.layout = batches.layout.within(longest // 2)
    assert batches.longest()[0] == full
    few = make_batches(clips, batch_size=1, **mixed)
    assert few.longest()[0] == full


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [4.0, 2.0, 2.0], [4.0, 2.0, 1.0]])
def test_hosts_have_full_clips_in_proportion_and_at_the_same_time(tmp_path, shared_out, weights):
    """But for slow ones, which have none."""
    clips = samples_of(420, tmp_path, longest=4.9)
    batches = shared_out(clips, audio_context="mixed", full_share=0.1, batch_size=4)
    left = [number % 10 > 0 for number in range(420)]
    for epoch, there in ((0, None), (1, None), (2, left)):
        steps, _ = full_ones(batches, 3, epoch, weights, there)
        able = [weight * (weight > weights[0] / 3) for weight in weights]
        due = [0.1 * (378 if there else 420) * weight / sum(able) for weight in able]
        assert all(abs(sum(own) - expected) < 1 for own, expected in zip(steps, due, strict=True))
        assert max(map(max, steps)) == 1
        if weights[0] == weights[1]:
            assert steps[0] == steps[1] == steps[2]


@pytest.mark.parametrize("weights", [[4.0, 2.0, 1.0], [4.0, 1.0, 1.0, 1.0], [2.0, 1.0], [1.0, 1.0, 0.2]])
def test_unequal_hosts_work_in_proportion_in_each_round(tmp_path, shared_out, weights):
    """Also where only some have clips that are padded to the full length, which cost as much as ten."""
    clips, hosts = samples_of(900, tmp_path, longest=4.9), len(weights)
    batches = shared_out(clips, audio_context="mixed", full_share=0.02, batch_size=8, steps_in_round=5)
    for epoch, left in ((0, None), (1, [number % 3 > 0 for number in range(900)])):
        plan = batches.plan(epoch, left, FIVE[:hosts], weights)
        costs = [
            [batches.cost(epoch, step) / weight for step in steps] for steps, weight in zip(plan, weights, strict=True)
        ]
        of_hosts = [sum(own) for own in costs]
        assert max(of_hosts) < 1.08 * min(of_hosts)
        rounds = [max(sum(own[at : at + 5]) for own in costs) for at in range(0, len(costs[0]), 5)]
        assert sum(rounds) < 1.1 * statistics.mean(of_hosts)


def test_where_nothing_is_left_unequal_hosts_have_nothing(tmp_path, shared_out):
    batches = shared_out(samples_of(40, tmp_path), audio_context="mixed", full_share=0.02, batch_size=8)
    assert not any(any(steps) for steps in batches.plan(0, [False] * 40, FIVE[:3], [4.0, 2.0, 1.0]))


def test_fast_hosts_have_some_clips_even_if_all_padded_ones_are_theirs(tmp_path, shared_out):
    batches = shared_out(samples_of(400, tmp_path, longest=1.0), audio_context="mixed", full_share=0.1, batch_size=8)
    plan = planned(batches, 4, weights=[4.0, 1.0, 1.0, 1.0])
    assert sorted(sample.id for own in plan for step in own for sample in step) == sorted(s.id for s in batches.samples)
    assert sum(map(len, plan[0])) >= 20


def test_plan_settings_tell_other_plans_apart(tmp_path, make_batches):
    samples = samples_of(9, tmp_path)
    others = [make_batches(samples[:8]), make_batches(samples, seed=1), make_batches(samples, batch_size=3)]
    others += [make_batches(samples_of(9, tmp_path, seed=1)), make_batches(samples, shuffle=False)]
    others += [make_batches(samples, audio_context="mixed", full_share=share) for share in (0.1, 0.2)]
    told = {json.dumps(batches.plan_settings()) for batches in [make_batches(samples), *others]}
    assert len(told) == 8 and json.dumps(make_batches(samples).plan_settings()) in told


# the batches themselves


def test_batches_hold_padded_features_labels_and_ids(clips, make_batches, multilingual):
    _, processor = multilingual
    batches = make_batches(clips, batch_size=6)
    seen = []
    for (batch,) in read(batches):
        size, mels, frames = batch["input_features"].shape
        assert (size, mels) == (len(batch["ids"]), 80) and frames in batches.edges
        assert batch["input_features"].dtype == torch.float32 and batch["labels"].dtype == torch.int64
        for row, clip_id in zip(batch["labels"], batch["ids"], strict=True):
            text = processor.tokenizer.decode(row[row != -100], skip_special_tokens=True)
            assert text.strip() == next(clip.text for clip in clips if clip.id == clip_id)
        seen += batch["ids"]
    assert sorted(seen) == sorted(clip.id for clip in clips)
    assert len({b["input_features"].shape[2] for (b,) in read(batches)}) > 1


def test_full_context_equals_the_feature_extractor(clips, make_batches, multilingual):
    from whisper_tuner.data.audio import load_audio

    extractor = multilingual[1].feature_extractor
    (batch,) = next(read(make_batches(clips, batch_size=3, audio_context="full", shuffle=False)))
    waveforms = [load_audio(next(c.audio for c in clips if c.id == name)) for name in batch["ids"]]
    expected = [extractor(w, sampling_rate=16_000, return_tensors="np").input_features[0] for w in waveforms]
    np.testing.assert_allclose(batch["input_features"].numpy(), np.stack(expected), atol=1e-3)


def test_where_some_are_padded_in_full_every_clip_is_trained_once(clips, make_batches):
    batches = make_batches(clips, batch_size=8, audio_context="mixed", full_share=0.3)
    batches.layout = BatchLayout(few_lengths=False, fixed_cost=0)
    (_, tokens), frames, full = batches.longest(), batches._full_frames, {}
    for epoch in range(3):
        batches.begin_epoch(epoch)
        parts = [part for step in read(batches, epoch) for part in step]
        assert sorted(name for part in parts for name in part["ids"]) == sorted(clip.id for clip in clips)
        shapes = [(len(part["ids"]), *part["labels"].shape, part["input_features"].shape[2]) for part in parts]
        assert all(length <= frames and width <= tokens for _, _, width, length in shapes)
        full[epoch] = {name for part in parts if part["input_features"].shape[2] == frames for name in part["ids"]}
        again = [part["ids"] for step in read(batches, epoch) for part in step]
        assert again == [part["ids"] for part in parts]
    assert 0 < len(full[0]) < 15 and full[0] != full[1]


def test_validation_is_cropped_whatever_is_trained(clips, make_batches):
    settings = {"batch_size": 8, "shuffle": False}
    cropped = read(make_batches(clips, **settings))
    for step, other in zip(cropped, read(make_batches(clips, audio_context="mixed", **settings)), strict=True):
        for batch, same in zip(step, other, strict=True):
            assert batch["ids"] == same["ids"] and torch.equal(batch["input_features"], same["input_features"])


def test_micro_batches_split_a_step(clips, make_batches):
    whole = [b["ids"] for (b,) in read(make_batches(clips, batch_size=8))]
    for step, ids in zip(read(make_batches(clips, batch_size=8, accumulation=3)), whole, strict=True):
        assert all(len(batch["ids"]) <= 3 for batch in step)
        assert [name for batch in step for name in batch["ids"]] == ids


def test_micro_batches_hold_clips_of_like_length(clips, make_batches):
    batches = make_batches(clips, batch_size=len(clips))
    batches.layout = BatchLayout(few_lengths=False, fixed_cost=0)
    [step] = read(batches)
    assert sorted(name for part in step for name in part["ids"]) == sorted(clip.id for clip in clips)
    lengths = [part["input_features"].shape[2] for part in step]
    assert lengths == sorted(set(lengths), reverse=True) and len(lengths) > 1


def test_an_unreadable_clip_is_reported_and_its_step_goes_on(clips, make_batches, tmp_path):
    gone = Sample(id="gone", audio=tmp_path / "gone.wav", text="x", duration_s=1.0, line=9)
    problems = []
    batches = make_batches([*clips[:3], gone], batch_size=2, on_problem=problems.append)
    assert sorted(name for step in read(batches) for b in step for name in b["ids"]) == ["clip0", "clip1", "clip2"]
    assert [problem.line for problem in problems] == [9]
    assert list(read(make_batches([gone]))) == [[]]


def test_a_text_that_is_too_long_is_reported_and_its_step_goes_on(clips, make_batches):
    long = replace(clips[3], text="un " * 500, line=9)
    problems = []
    batches = make_batches([*clips[:3], long], batch_size=2, on_problem=problems.append)
    assert batches.longest()[1] < 100
    assert sorted(name for step in read(batches) for b in step for name in b["ids"]) == ["clip0", "clip1", "clip2"]
    assert [(problem.line, "tokens" in problem.what) for problem in problems] == [(9, True)]


def test_an_epoch_can_start_late_and_be_left_early(clips, make_batches):
    batches = make_batches(clips, batch_size=4)
    ids = [b["ids"] for (b,) in read(batches, epoch=2)]
    assert [b["ids"] for (b,) in read(batches, epoch=2, first_step=3)] == ids[3:]
    left = read(batches)
    next(left)
    left.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_audio_that_is_not_there_is_ordered_in_time_and_waited_for(clips, make_batches, tmp_path):
    """One clip comes when it is waited for, one never."""
    away = Sample(id="away", audio=tmp_path / "away.wav", text="x", duration_s=0.9, line=7)
    never = Sample(id="never", audio=tmp_path / "never.wav", text="x", duration_s=0.8, line=8)
    ordered, waited, problems = [], [], []

    class Courier:
        def order(self, samples):
            ordered.extend(sample.id for sample in samples)

        def wait(self, sample, given_up):
            waited.append(sample.id)
            if sample is away:
                away.audio.symlink_to(clips[0].audio)

    batches = make_batches(
        [*clips[:2], away, never], batch_size=1, shuffle=False, missing_audio=Courier(), on_problem=problems.append
    )
    assert [[b["ids"] for b in step] for step in read(batches)] == [[["away"]], [], [["clip1"]], [["clip0"]]]
    assert ordered == waited == ["away", "never", "clip1", "clip0"]
    assert [problem.line for problem in problems] == [8]


def test_an_epoch_is_left_at_once_while_its_reader_waits_for_audio(clips, make_batches, tmp_path):
    away = Sample(id="away", audio=tmp_path / "away.wav", text="x", duration_s=0.1)
    waiting, over, problems = threading.Event(), threading.Event(), []

    class Courier:
        def order(self, samples):
            pass

        def wait(self, sample, given_up):
            if sample is away:
                waiting.set()
                while not given_up() and not over.wait(0.01):
                    pass

    left = read(
        make_batches(
            [*clips[:2], away], batch_size=1, shuffle=False, missing_audio=Courier(), on_problem=problems.append
        )
    )
    assert next(left) and next(left)
    assert waiting.wait(20)
    leaving = threading.Thread(target=left.close, daemon=True)
    leaving.start()
    leaving.join(10)
    over.set()
    assert not leaving.is_alive() and not problems
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_a_limit_cuts_steps_into_equal_parts_and_changes_no_plan(make_batches, clips):
    batches, plan = make_batches(clips, batch_size=8), make_batches(clips, batch_size=8).plan(0, None, HOSTS[:1], [1.0])
    planned_by = batches.plan_settings()
    assert batches.at_once(400, 16) == 8
    longest = max(part["input_features"].shape[2] for step in read(batches) for part in step)
    batches.layout = batches.layout.within(5 * longest // 2)
    assert batches.at_once(longest, 1) == 5
    sizes = [[len(part["ids"]) for part in step] for step in read(batches)]
    assert [4, 3] in sizes and [5, 2] not in sizes  # few shapes
    assert batches.plan(0, None, HOSTS[:1], [1.0]) == plan and batches.plan_settings() == planned_by
    batches.layout = batches.layout.within(10**6)
    assert batches.at_once(longest, 1) == 5


def test_a_limit_below_the_profiles_own_parts(make_batches, clips):
    batches = make_batches(clips[:10], clips[10:], alone=True, batch_size=16, accumulation=3)
    assert batches.at_once(100, 1) == 6
    batches.layout = batches.layout.within(3 * batches.longest()[0] // 2)
    assert all(len(part["ids"]) <= 6 for step in read(batches) for part in step)
    assert all(len(part["ids"]) <= 3 for step in read(batches) for part in step[:1])
    whole = make_batches(clips[:10], clips[10:], alone=True, batch_size=16)
    assert whole.at_once(100, 1) == 16


@pytest.mark.parametrize("context", ["cropped", "full"])
def test_no_batch_is_larger_than_a_blank_one(make_batches, clips, context):
    batches = make_batches(clips, audio_context=context)
    frames, tokens = batches.longest()
    blank = batches.blank(3, (frames, tokens))
    read_ones = [part for step in read(batches) for part in step]
    assert max(part["input_features"].shape[2] for part in read_ones) == frames == blank["input_features"].shape[2]
    assert max(part["labels"].shape[1] for part in read_ones) == tokens == blank["labels"].shape[1]
    assert blank["input_features"].shape[:2] == (3, read_ones[0]["input_features"].shape[1])
    assert blank["labels"].dtype == read_ones[0]["labels"].dtype


def test_labels_are_padded_to_few_lengths_where_shapes_have_a_price(make_batches, clips):
    texts = [replace(clip, text="a" * (1 + 2 * number)) for number, clip in enumerate(clips)]
    batches = make_batches(texts, batch_size=2)
    parts = [part["labels"] for step in read(batches) for part in step]
    assert all((labels[:, -1] != IGNORED).any() for labels in parts)
    planned_by = batches.plan_settings()
    batches.layout = BatchLayout(label_grid=LABEL_GRID, fixed_cost=0)
    assert batches.plan_settings() == planned_by
    lengths = {part["labels"].shape[1] for epoch in range(3) for step in read(batches, epoch) for part in step}
    own = {len(batches._labels.encode(text.text)) for text in texts}
    assert len(lengths) <= 1 + max(own) // 8 < len(own) == 20
    assert max(lengths) == batches.longest()[1] == min(-(-max(own) // 8) * 8, batches._labels.max_tokens)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_more_padding_changes_neither_loss_nor_gradient(make_batches, clips, multilingual, profile_of, method):
    model, processor = multilingual
    wrapper = WhisperModelWrapper(prepare(model, profile_of(method=method)).eval(), processor, "cpu")
    batches, results = make_batches(clips, batch_size=4), []
    for layout in (BatchLayout(), BatchLayout(label_grid=LABEL_GRID)):
        batches.layout = layout
        [batch, *_] = next(iter(read(batches)))
        loss, tokens = wrapper(batch)
        loss.backward()
        gradients = [weight.grad for weight in wrapper.parameters() if weight.grad is not None]
        wrapper.zero_grad()
        results.append((batch["labels"].shape[1], tokens, loss, gradients))
    (bare, *expected), (padded, *told) = results
    assert bare < padded
    torch.testing.assert_close(told, expected, rtol=1e-4, atol=1e-6)


def test_a_limit_of_positions_leaves_more_short_clips_together_than_long_ones(make_batches, clips):
    batches = make_batches(clips, batch_size=20)
    plan, planned_by = batches.plan(0, None, HOSTS[:1], [1.0]), batches.plan_settings()
    batches.layout = batches.layout.within(1000)
    assert batches.at_once(400, 16) == 5 and batches.at_once(100, 16) == 20
    parts = [part for step in read(batches) for part in step]
    assert all(len(part["ids"]) * part["input_features"].shape[2] // 2 <= 1000 for part in parts)
    assert sorted(name for part in parts for name in part["ids"]) == sorted(clip.id for clip in clips)
    assert batches.plan(0, None, HOSTS[:1], [1.0]) == plan and batches.plan_settings() == planned_by
