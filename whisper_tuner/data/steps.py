"""Samples -> shards -> the steps of an epoch, which are to cost alike. Imports no torch: the launcher plans with it.

Samples are divided among *shards*, one for each host.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from whisper_tuner.data.dataset import Sample

# Its products alone would make attention half of it: softmax takes time as well. Of tiny.en on one thread of a CPU the
# measured times of clips up to 30 s are then met within a tenth. Not measured on a GPU.
ATTENTION = 2.0
_SLACK = 0.02  # of its share, that a host may get too much
# A slow host takes long for a long clip, which cannot be divided, and the others wait for it. So it has only those
# that take it at most this many times as long as the longest takes the fastest host...
_TIMES = 2.0
_LONG = 0.5  # ... as far as these are no more than this part of what faster hosts get in all
FEWER = 0.6  # of the largest shard, from which on one has its clips in fewer steps


class ModelSizes(Protocol):
    """A WhisperConfig, or what is known of a model that is not loaded."""

    @property
    def d_model(self) -> int: ...
    @property
    def encoder_layers(self) -> int: ...
    @property
    def encoder_ffn_dim(self) -> int: ...
    @property
    def decoder_layers(self) -> int: ...
    @property
    def decoder_ffn_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True)
class Cost:
    """How long clips take to train beside one another, in mel frames of a short clip: the same for all devices.

    token: of a label. square: of a frame for each other one.
    """

    token: float = 0.0
    square: float = 0.0

    @classmethod
    def of_model(cls, config: ModelSizes, *, encoder_is_stored: bool = False) -> Cost:
        """Count a model's multiplications. encoder_is_stored: its outputs for all clips are, so it is not computed."""
        d, encoder, decoder = config.d_model, config.encoder_layers, config.decoder_layers
        keys = decoder * 2 * d * d  # and values, of an encoder's position
        token = decoder * (6 * d * d + 2 * d * config.decoder_ffn_dim) + config.vocab_size * d
        if encoder_is_stored:
            return cls(token=2 * token / keys)
        position = keys + encoder * (4 * d * d + 2 * d * config.encoder_ffn_dim)
        return cls(token=2 * token / position, square=ATTENTION * encoder * 2 * d / position / 2)

    def of(self, frames: int, tokens: float) -> float:
        return frames + self.square * frames * frames + self.token * tokens


MEL_FRAMES = Cost()


def assign_shards(
    samples: Sequence[Sample], hosts: Sequence[str], weights: Sequence[float] | None = None
) -> list[list[Sample]]:
    """One list of samples for each host, in the samples' order; the same on every machine.

    Weighted rendezvous hashing with bounded loads (1608.01350): a sample stays where it is when other hosts come or go,
    unless that would put its host more than about 2 % over its share of the seconds or of the clips. The longest are
    placed first, so shards agree in each range of durations and not only in the sum. A host with less than half of the
    largest weight has more clips instead of the longest ones.
    """
    weights = list(weights) if weights is not None else [1.0] * len(hosts)
    if not hosts or len(weights) != len(hosts) or min(weights) <= 0:
        raise ValueError("assign_shards needs hosts, and a positive weight for each")
    if len(set(hosts)) != len(hosts):
        raise ValueError("assign_shards needs distinct host names")
    order = sorted(samples, key=lambda s: (-s.duration_s, s.id))
    total = sum(sample.duration_s for sample in order)
    left = [weight / sum(weights) * total for weight in weights]  # seconds that a host is still to get
    least = [_SLACK * seconds for seconds in left]
    placed: dict[str, int] = {}
    for begin, end, present in _ranges(order, weights):
        part = order[begin:end]
        due = [max(left[host], least[host]) for host in present]
        shares = [seconds / sum(due) for seconds in due]
        for sample, place in zip(part, _place(part, [hosts[host] for host in present], shares), strict=True):
            placed[sample.id] = present[place]
            left[present[place]] -= sample.duration_s
    return [[sample for sample in samples if placed[sample.id] == host] for host in range(len(hosts))]


def _ranges(order: Sequence[Sample], weights: Sequence[float]) -> list[tuple[int, int, list[int]]]:
    """(begin, end, the hosts that have some) of ranges of `order`, which descends."""
    if not order:
        return []
    longest, total, most = order[0].duration_s, sum(sample.duration_s for sample in order), max(weights)
    ranges, begin, seconds = [], 0, 0.0
    for weight in sorted({*weights}, reverse=True):
        faster = [host for host, other in enumerate(weights) if other > weight]
        if not faster or _TIMES * weight >= most:
            continue
        room = _LONG * total * sum(weights[host] for host in faster) / sum(weights)
        end = begin
        while order[end].duration_s > _TIMES * longest * weight / most and seconds + order[end].duration_s <= room:
            seconds += order[end].duration_s
            end += 1
        ranges.append((begin, end, faster))
        begin = end
    return [*ranges, (begin, len(order), [*range(len(weights))])]


def _place(samples: Sequence[Sample], hosts: Sequence[str], shares: Sequence[float]) -> list[int]:
    """Choose the place of its host for each of the samples, which come in descending order of duration."""
    total_seconds = sum(sample.duration_s for sample in samples)
    spare = [(max(2.0, _SLACK * share * len(samples)), _SLACK * share * total_seconds) for share in shares]
    clips, seconds = [0] * len(hosts), [0.0] * len(hosts)
    placed, due_clips, due_seconds = [], 0, 0.0
    for sample in samples:
        # How far each host is ahead of its share so far, 1 being as far as it may.
        ahead = [
            max((clips[h] - share * due_clips) / spare[h][0], (seconds[h] - share * due_seconds) / spare[h][1])
            for h, share in enumerate(shares)
        ]
        limit = max(1.0, min(ahead))
        free = [h for h in range(len(hosts)) if ahead[h] <= limit]
        best = max(free, key=lambda h: _score(sample.id, hosts[h], shares[h]))
        placed.append(best)
        clips[best], seconds[best] = clips[best] + 1, seconds[best] + sample.duration_s
        due_clips, due_seconds = due_clips + 1, due_seconds + sample.duration_s
    return placed


def _score(sample_id: str, host: str, weight: float) -> float:
    """Weighted rendezvous score: the highest one wins, each host in proportion to its weight."""
    digest = hashlib.blake2b(f"{sample_id}\0{host}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "big") + 0.5) / 2**64
    return -weight / math.log(uniform)


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
    """Choose whose turn it is among `count`: each_epoch on average, and at least one in the first epoch."""
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

    Clips that do not divide evenly make some steps larger by one. All shards have these in the same steps, as far as
    they can, so that hosts have much or little to do together. Reversed bits (van der Corput) spread these steps over
    the epoch, the last one first. So a host with fewer clips than steps never waits long for its next one.
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
