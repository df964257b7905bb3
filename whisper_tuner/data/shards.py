"""Samples -> one shard for each host. Imports no torch: the launcher plans with it before anything is loaded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from whisper_tuner.data.dataset import Sample

_SLACK = 0.02  # of its share, that a host may get too much
# A slow host takes long for a long clip, which cannot be divided, and the others wait for it. So it has only those
# that take it at most this many times as long as the longest takes the fastest host...
_TIMES = 2.0
_LONG = 0.5  # ... as far as these are no more than this part of what faster hosts get in all


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
