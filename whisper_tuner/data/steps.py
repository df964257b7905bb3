"""Which clips of a shard are trained in which step of an epoch. Imports no torch: the launcher plans with it."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from itertools import accumulate, pairwise

FEWER = 0.6  # of the largest shard, from which on one has its clips in fewer steps


def balanced(
    costs: Sequence[int], sizes: Sequence[int], turns: Sequence[int], chance: random.Random
) -> list[list[int]]:
    """Give each step the places of its clips in `costs`, at most sizes[step] of them, so that the steps cost alike.

    Each clip, from the dearest on, goes to the step that has the least so far and has room (LPT, Graham 1969). Clips of
    equal cost are shuffled. turns: which of the steps is first while all are empty.
    """
    steps: list[list[int]] = [[] for _ in sizes]
    room = [(0, turn, step) for step, turn in enumerate(turns) if sizes[step]]
    heapq.heapify(room)
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], chance.random())):
        cost, turn, step = heapq.heappop(room)
        steps[step].append(place)
        if len(steps[step]) < sizes[step]:
            heapq.heappush(room, (cost + costs[place], turn, step))
    return steps


def rounds_of(steps: int, in_round: int, before: int = 0) -> list[range]:
    """The steps of each round, of so many; `before`: steps that were made before them, since a round's end."""
    ends = [*range(in_round - before % in_round, steps, in_round), steps]
    return [range(begin, end) for begin, end in pairwise([0, *ends]) if begin < end]


def balanced_rounds(
    costs: Sequence[int],
    sizes: Sequence[int],
    turns: Sequence[int],
    rounds: Sequence[Sequence[int]],
    chance: random.Random,
) -> list[list[int]]:
    """Do as `balanced` does, but rounds cost alike as well: one with a dear clip has fewer others.

    rounds: the steps of each round.

    `sizes` say in which steps there are clips, at least one if there are so many, and how much there is in a round.
    """
    steps: list[list[int]] = [[] for _ in sizes]
    places: list[list[int]] = [[] for _ in rounds]
    # How many clips each still needs, so that none of its steps is empty.
    lacks = [sum(sizes[step] > 0 for step in own) for own in rounds]
    levels = [(0.0, turns[own[0]], number) for number, own in enumerate(rounds) if lacks[number]]
    heapq.heapify(levels)
    order = sorted(range(len(costs)), key=lambda place: (-costs[place], chance.random()))
    for left, place in zip(range(len(order), 0, -1), order, strict=True):
        full = []
        while left <= sum(lacks) and not lacks[levels[0][2]]:
            full.append(heapq.heappop(levels))
        level, turn, number = heapq.heappop(levels)
        places[number].append(place)
        lacks[number] = max(0, lacks[number] - 1)
        work = sum(sizes[step] for step in rounds[number])
        for entry in (*full, (level + costs[place] / work, turn, number)):
            heapq.heappush(levels, entry)
    for own, here in zip(rounds, places, strict=True):
        room = [len(here) if sizes[step] else 0 for step in own]
        parts = balanced([costs[place] for place in here], room, [turns[step] for step in own], chance)
        for step, part in zip(own, parts, strict=True):
            steps[step] = [here[place] for place in part]
    return steps


def whose_turn(count: int, each_epoch: float, epoch: int) -> set[int]:
    """Choose among `count` those whose turn it is: each_epoch of them on average, and one in the first epoch."""
    begin, end = (math.ceil(number * each_epoch) for number in (epoch, epoch + 1))
    return {turn % count for turn in range(begin, end)} if count else set()


def in_order(count: int, sizes: Sequence[int]) -> list[list[int]]:
    """Give each step the places of its clips, one after the other: the last steps may have none."""
    ends = [min(end, count) for end in accumulate(sizes, initial=0)]
    return [list(range(start, end)) for start, end in pairwise(ends)]


def steps_in_epoch(clips: int, hosts: int, batch_size: int, in_round: int = 1) -> int:
    """batch_size: of all hosts together. Where there are more hosts than that, see worked_part."""
    return math.ceil(clips / max(batch_size, hosts * worked_part(hosts, batch_size, in_round)))


def worked_part(hosts: int, batch_size: int, in_round: int) -> float:
    """The part of the steps in which a host has clips, where all have as many: with more hosts than clips in a batch
    half of them at least, where hosts make several between two exchanges (see Strategy.stretches), and else all.
    """
    return min(1.0, max(0.5, batch_size / hosts)) if in_round > 1 else 1.0


def spread_sizes(counts: Sequence[int], batch_size: int, in_round: int = 1) -> list[list[int]]:
    """Size each shard's part of the batch in each step: all end together, and a shard's own sizes differ by one.

    A shard of at most 0.6 of the largest one's clips has them in fewer of the `in_round` steps that hosts make between
    two exchanges, so that these are about as large as the largest shard's: a step of one clip or two takes far more
    time for each. An epoch's first step is one of them: there is something to do while weights travel.

    All shards take what is over in the same steps, as far as they have it, so that a host rests where the others have
    less to do. Reversed bits (van der Corput) put these steps far from each other: a host that has its clips in all
    steps of a round has work in any 2 * steps / clips steps on end, and in the last one.
    """
    steps = steps_in_epoch(sum(counts), len(counts), batch_size, in_round)
    turns = sorted(range(steps), key=lambda step: f"{steps - 1 - step:b}"[::-1])
    sizes = []
    for count in counts:
        part = count / max(counts, default=1) if count else 1.0
        fewer = max(1, round(in_round * part)) if part <= FEWER else in_round
        own = [step for step in turns if step * fewer % in_round < fewer]
        each, over = divmod(count, max(len(own), 1))
        of_step = dict.fromkeys(own, each) | dict.fromkeys(own[:over], each + 1)
        sizes.append([of_step.get(step, 0) for step in range(steps)])
    return sizes
