import json
import random
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisper_tuner.data.dataset import Sample
from whisper_tuner.data.steps import (
    FEWER,
    MEL_FRAMES,
    Cost,
    assign_shards,
    balanced,
    balanced_rounds,
    in_order,
    rounds_of,
    spread_sizes,
    steps_in_epoch,
)
from whisper_tuner.model.memory import PUBLISHED

HOSTS = ["ada.local", "bob.local", "cy.local", "dee.local"]
FIVE = [*HOSTS, "eve.local"]
TINY_EN = PUBLISHED["openai/whisper-tiny.en"]


def samples_of(count, tmp_path, seed=0, longest=30.0):
    """Metadata alone: most clips short, a few near the longest, as in real sets."""
    chance = random.Random(seed)
    durations = [min(0.3 + chance.expovariate(9 / longest), longest) for _ in range(count)]
    return [
        Sample(id=f"s{n}", audio=tmp_path / f"{n}.wav", text=f"text {n}", duration_s=seconds)
        for n, seconds in enumerate(durations)
    ]


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


@pytest.mark.parametrize("weights", [[1, 0.5, 0.25], [1, 0.24, 0.06], [1.0, *[0.2] * 4]])
@pytest.mark.parametrize("shortest", [0.0, 20.0])
def test_slow_hosts_have_more_clips_instead_of_the_longest(tmp_path, weights, shortest):
    samples = samples_of(900, tmp_path)
    samples = [replace(s, duration_s=max(shortest, s.duration_s)) for s in samples]
    shards = assign_shards(samples, FIVE[: len(weights)], weights)
    assert Counter(s.id for shard in shards for s in shard) == Counter(s.id for s in samples)
    total, longest = (of(s.duration_s for s in samples) for of in (sum, max))
    for shard, weight in zip(shards, weights, strict=True):
        assert sum(s.duration_s for s in shard) / total == pytest.approx(weight / sum(weights), rel=0.1)
        if not shortest and weight > 0.1:
            assert max(s.duration_s for s in shard) <= longest * min(1, 2 * weight)
            assert weight >= 0.5 or len(shard) / 900 > weight / sum(weights)


@given(st.lists(st.floats(0.1, 30), max_size=30), st.lists(st.floats(0.01, 5), min_size=1, max_size=5))
def test_clips_and_weights_of_any_kind_are_shared_out(durations, weights):
    samples = [Sample(id=f"s{n}", audio=Path("a"), text="", duration_s=seconds) for n, seconds in enumerate(durations)]
    shards = assign_shards(samples, FIVE[: len(weights)], weights)
    assert Counter(s.id for shard in shards for s in shard) == Counter(s.id for s in samples)


def test_shards_stay_put_when_a_host_leaves_or_comes(tmp_path):
    samples = samples_of(400, tmp_path)
    four, three = assign_shards(samples, HOSTS), assign_shards(samples, HOSTS[:3])
    kept = [len(set(before) & set(after)) / len(before) for before, after in zip(four[:3], three, strict=True)]
    assert min(kept) > 0.8


@pytest.mark.parametrize("weights", [[1.2, 1.05, 0.75], [1.5, 1.0, 0.5]])
def test_few_more_clips_move_than_other_shares_need(tmp_path, weights):
    samples = samples_of(1000, tmp_path)
    before, after = assign_shards(samples, HOSTS[:3]), assign_shards(samples, HOSTS[:3], weights)
    moved = sum(len(set(old) - set(new)) for old, new in zip(before, after, strict=True))
    assert moved < 1.6 * 1000 * sum(abs(weight - 1) / 3 for weight in weights) / 2


def test_order_of_hosts_and_of_samples_changes_nothing(tmp_path):
    samples = samples_of(100, tmp_path)
    shards = dict(zip(HOSTS, assign_shards(samples, HOSTS), strict=True))
    swapped = dict(zip(HOSTS[::-1], assign_shards(samples[::-1], HOSTS[::-1]), strict=True))
    assert {host: set(shard) for host, shard in shards.items()} == {host: set(s) for host, s in swapped.items()}


def test_shards_are_the_same_in_another_interpreter(tmp_path):
    script = """
import json, sys
from pathlib import Path
from whisper_tuner.data.steps import assign_shards
from whisper_tuner.data.dataset import Sample
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


# steps


def plan(costs, sizes, seed=0):
    turns = list(range(len(sizes)))
    random.Random(seed).shuffle(turns)
    return balanced(costs, sizes, turns, random.Random(seed))


def totals(costs, steps):
    return [sum(costs[place] for place in step) for step in steps]


@given(
    st.lists(st.sampled_from([100, 250, 700, 1500, 3000]), max_size=60),
    st.integers(1, 9),
    st.integers(0, 3),
)
def test_each_clip_is_in_one_step_and_no_step_is_too_large(costs, batch_size, more):
    counts = [len(costs), *[len(costs) // 2] * more]
    all_sizes = spread_sizes(counts, batch_size)
    assert {len(sizes) for sizes in all_sizes} == {steps_in_epoch(sum(counts), len(counts), batch_size)}
    most = max(batch_size, len(counts))
    assert all(sum(at_once) <= most + len(counts) for at_once in zip(*all_sizes, strict=True))
    sizes = all_sizes[0]
    for steps in (plan(costs, sizes), in_order(len(costs), sizes)):
        assert sorted(place for step in steps for place in step) == [*range(len(costs))]
        assert all(len(step) <= size for step, size in zip(steps, sizes, strict=True))


@given(st.lists(st.integers(0, 400), min_size=1, max_size=5), st.integers(1, 16), st.integers(1, 12))
def test_a_small_shard_has_its_clips_in_fewer_steps_of_each_round(counts, batch_size, in_round):
    all_sizes = spread_sizes(counts, batch_size, in_round)
    assert [sum(sizes) for sizes in all_sizes] == counts
    for count, sizes in zip(counts, all_sizes, strict=True):
        worked = [size for size in sizes if size]
        assert not worked or max(worked) - min(worked) <= 1
        assert not worked or len(worked) < len(sizes) or count > FEWER * max(counts) or in_round == 1 or len(sizes) == 1
        rounds = [sum(map(bool, sizes[at : at + in_round])) for at in range(0, len(sizes) - in_round + 1, in_round)]
        if count >= len(sizes):
            assert len({*rounds}) <= 1 and all(rounds)
        if count > FEWER * max(counts) and len(counts) <= batch_size:
            assert sizes == spread_sizes(counts, batch_size)[all_sizes.index(sizes)]


@given(
    st.lists(st.sampled_from([100, 250, 700, 3000]), min_size=1, max_size=150),
    st.integers(1, 9),
    st.integers(1, 7),
    st.integers(1, 5),
)
def test_rounds_cost_alike_and_each_step_with_work_keeps_a_clip(costs, batch_size, in_round, times):
    sizes = spread_sizes([len(costs), times * len(costs)], batch_size, in_round)[0]
    turns = random.Random(1).sample(range(len(sizes)), len(sizes))
    rounds = rounds_of(len(sizes), in_round)
    steps = balanced_rounds(costs, sizes, turns, rounds, random.Random(2))
    assert sorted(place for step in steps for place in step) == [*range(len(costs))]
    assert [*map(bool, steps)] == [*map(bool, sizes)]
    taken, levels = totals(costs, steps), []
    for own in rounds:
        if work := sum(sizes[step] for step in own):
            levels.append((sum(taken[step] for step in own) / work, max(costs) / work))
    assert max(levels)[0] <= min(level + one for level, one in levels) + max(one for _, one in levels)


@given(st.integers(0, 40), st.integers(1, 7), st.integers(0, 20))
def test_rounds_are_whole_but_for_the_first_and_the_last(steps, in_round, before):
    rounds = rounds_of(steps, in_round, before)
    assert [step for own in rounds for step in own] == [*range(steps)]
    assert all(len(own) == in_round for own in rounds[1:-1]) and all(1 <= len(own) <= in_round for own in rounds)
    assert all((own.stop + before) % in_round == 0 for own in rounds[:-1])


def test_twice_as_many_hosts_as_clips_in_a_batch_work_in_every_second_step():
    assert steps_in_epoch(80, 8, 4, in_round=5) == 20 and steps_in_epoch(80, 8, 4) == 10
    for sizes in spread_sizes([10] * 8, 4, in_round=5):
        assert sizes == [0, 1] * 10
    assert steps_in_epoch(80, 8, 1, in_round=5) == 20  # a step counts as two, and not as more
    assert steps_in_epoch(80, 4, 8, in_round=5) == steps_in_epoch(80, 1, 8) == 10


def test_hosts_of_which_one_has_twice_and_four_times_the_clips_of_the_others():
    fast, half, slow = spread_sizes([160, 80, 40], 7, in_round=4)
    assert fast[:4] == [4] * 4 and half[:4] == [4, 0, 4, 0] and slow[:4] == [4, 0, 0, 0]
    assert all(sizes == sizes[:4] * 10 for sizes in (fast, half, slow))


def test_the_slowest_step_takes_at_most_twice_the_median():
    """Most clips are short, a few as long as can be; a step of few clips cannot be shorter than the longest of them."""
    for batch_size, count, mean_s in product((4, 8, 16, 64), (61, 400, 3000), (1.0, 2.5, 8.0)):
        chance = random.Random(count)
        costs = [min(3000, 50 * (1 + int(chance.expovariate(2 / mean_s)))) for _ in range(count)]
        [sizes] = spread_sizes([count], batch_size)
        taken = totals(costs, plan(costs, sizes))
        case = batch_size, count, mean_s
        assert max(taken) <= max(2 * statistics.median(taken), max(costs) + batch_size * min(costs)), case
        if batch_size >= 8 and count >= 400:
            assert max(taken) <= 2 * statistics.median(taken), case


def test_clips_of_one_length_are_shuffled():
    first, again, other = (plan([250] * 40, [8] * 5, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert {frozenset(step) for step in first}.isdisjoint(frozenset(step) for step in other)


def test_in_order_fills_step_after_step():
    assert in_order(7, [3, 3, 3, 3]) == [[0, 1, 2], [3, 4, 5], [6], []]


# costs


def test_the_cost_is_what_was_measured():
    """LoRA, one thread of a CPU: 0.43 ms a position, 1.55 ms a token and 0.27 us a squared position, within 2 %."""
    cost = Cost.of_model(TINY_EN)
    for seconds, tokens in ((1, 5), (3, 15), (6, 30), (10, 40), (15, 50), (20, 60), (30, 60), (30, 110)):
        positions = 50 * seconds
        measured_ms = 0.43 * positions + 1.55 * tokens + 0.27e-3 * positions**2
        assert 0.215 * cost.of(100 * seconds, tokens) == pytest.approx(measured_ms, rel=0.1)


def test_an_encoder_that_is_stored_costs_nothing():
    stored = Cost.of_model(TINY_EN, encoder_is_stored=True)
    assert stored.square == 0 and stored.token > 5 * Cost.of_model(TINY_EN).token
    assert MEL_FRAMES.of(300, 20) == 300
