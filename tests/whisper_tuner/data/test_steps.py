import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisper_tuner.data.steps import (
    FEWER,
    balanced,
    balanced_rounds,
    in_order,
    rounds_of,
    spread_sizes,
    steps_in_epoch,
)


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


@pytest.mark.parametrize("batch_size", [4, 8, 16, 64])
@pytest.mark.parametrize("count", [61, 400, 3000])
@pytest.mark.parametrize("mean_s", [1.0, 2.5, 8.0])
def test_the_slowest_step_takes_at_most_twice_the_median(batch_size, count, mean_s):
    """Most clips are short, a few as long as can be; a step of few clips cannot be shorter than the longest of them."""
    chance = random.Random(count)
    costs = [min(3000, 50 * (1 + int(chance.expovariate(2 / mean_s)))) for _ in range(count)]
    [sizes] = spread_sizes([count], batch_size)
    taken = totals(costs, plan(costs, sizes))
    assert max(taken) <= max(2 * statistics.median(taken), max(costs) + batch_size * min(costs))
    if batch_size >= 8 and count >= 400:
        assert max(taken) <= 2 * statistics.median(taken)


def test_clips_of_one_length_are_shuffled():
    first, again, other = (plan([250] * 40, [8] * 5, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert {frozenset(step) for step in first}.isdisjoint(frozenset(step) for step in other)


def test_in_order_fills_step_after_step():
    assert in_order(7, [3, 3, 3, 3]) == [[0, 1, 2], [3, 4, 5], [6], []]
