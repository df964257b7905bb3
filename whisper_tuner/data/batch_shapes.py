"""How long clips and labels are padded, and which clips of a step are computed at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whisper_tuner.data.dataset import Sample

# Label tokens between two lengths, where shapes have a price. Measured on read speech of 1 to 30 s: 33 shapes of
# batches in 3 epochs instead of 165; on clips of 1 to 8 s 14 instead of 57. Elsewhere it would only cost time.
LABEL_GRID = 8
# Positions that are computed at once, if memory allows. On a CPU as many as 30 s have, as it is no faster with more;
# eight times as many elsewhere.
CPU_POSITIONS, POSITIONS = 1_500, 12_000
_FRAME_GRID = 50  # mel frames between possible edges; even, because the encoder halves the length
_FINE_GRID = 20  # the same where shapes have no price
WHOLE = 10**9  # mel frames: no micro-batch is worth a second one
NO_LIMIT = 10**12
_SPARE = 2  # frames: the STFT windows that reach past the end, and a duration rounded down


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """How a rank pads a step's clips and computes them in parts. What is planned does not depend on it.

    is_padded: clips of like length are padded and stacked; else one stands after the other, as on a device on which
    many small products of attention are no slower than few large ones.
    few_lengths: clips are padded to one of few lengths, where each shape of a batch has its price.
    label_grid: labels are padded to a multiple of so many tokens. fixed_cost: of each part, in mel frames.
    most_positions: in each layer, of what is computed at once.
    pads_in_full: clips are padded to the full length in their turn, or joined, as the profile says; not where memory is
    too small.
    """

    is_padded: bool = True
    few_lengths: bool = True
    label_grid: int = 1
    fixed_cost: int = WHOLE
    most_positions: int = NO_LIMIT
    pads_in_full: bool = True

    def within(self, positions: int) -> BatchLayout:
        """Compute at most so many positions at once; the clips of a step stay the same."""
        return replace(self, most_positions=min(self.most_positions, positions))


@dataclass(frozen=True)
class Lengths:
    """The lengths of clips that stand one after the other: mel frames, even, and the tokens the decoder is given."""

    frames: Sequence[int]
    tokens: Sequence[int]

    @property
    def positions(self) -> list[int]:
        """Return how many positions the encoder has of each clip."""
        return [frames // 2 for frames in self.frames]


def bucket_edges(
    samples: Sequence[Sample], full_frames: int, *, frames_per_s: float = 100.0, count: int = 6
) -> tuple[int, ...]:
    """At most `count` lengths in mel frames, those that add the least padding; every clip fits under the last one.

    Few shapes on purpose: Apple's GPU allocator fragments on many.
    """
    lengths = [math.ceil(frames_of(s, frames_per_s) / _FRAME_GRID) * _FRAME_GRID for s in samples]
    clips = Counter(min(length, full_frames) for length in lengths)
    # best[edge]: (padded frames of all clips up to this edge, the edges used), one more edge allowed in each turn
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for _ in range(count):
        for edge in sorted(clips, reverse=True):
            for lower, (cost, edges) in [*best.items()]:
                if lower < edge:
                    more = cost + edge * sum(n for length, n in clips.items() if lower < length <= edge)
                    best[edge] = min(best.get(edge, (math.inf, ())), (more, (*edges, edge)))
    return best[max(clips)][1] if clips else (full_frames,)


def frames_of(sample: Sample, frames_per_s: float) -> float:
    """The most mel frames that a clip has by its duration."""
    return sample.duration_s * frames_per_s + _SPARE


def padded_frames(frames: float, full_frames: int) -> int:
    """The length to which a clip is padded where shapes have no price."""
    return min(math.ceil(frames / _FINE_GRID) * _FINE_GRID, full_frames)


def padded_tokens(longest: int, most: int, grid: int = LABEL_GRID) -> int:
    """The length to which labels of `longest` tokens are padded, for a decoder that takes `most`."""
    return min(math.ceil(longest / grid) * grid, most)


def positions(frames: int, tokens: int) -> int:
    """The most positions that a layer has for a clip of so many mel frames, which the encoder halves, and tokens."""
    return max(frames // 2, tokens)


def clips_within(most: int, frames: int, tokens: int) -> int:
    """How many such clips make at most so many positions in each layer; at least 1."""
    return max(1, most // positions(frames, tokens))


def equal_part(whole: int, most: int) -> int:
    """The size of the fewest equal parts of `whole` that are not larger than `most`."""
    return math.ceil(whole / math.ceil(whole / most))


def micro_batches(lengths: Sequence[int], most: Callable[[int], int], fixed_cost: int) -> list[list[int]]:
    """The places of a step's clips, of so many frames each, in the micro-batches that cost least.

    A micro-batch is padded to its longest clip, holds at most `most(frames)` clips of it, and costs `fixed_cost` frames
    more than its clips. Of ways that cost the same, the one with the fewest parts, of the most equal sizes: few shapes.
    """
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    best = [(0, 0, 0, 0)]  # for the first n clips: (cost, parts, sum of squared sizes, last size)
    for count in range(1, len(order) + 1):
        ways = []
        for size in range(1, count + 1):
            longest = lengths[order[count - size]]
            if size > most(longest):
                continue
            cost, parts, squares, _ = best[count - size]
            ways.append((cost + fixed_cost + size * longest, parts + 1, squares + size * size, size))
        best.append(min(ways))
    found, end = [], len(order)
    while end:
        start = end - best[end][-1]
        found.append(order[start:end])
        end = start
    return found[::-1]


def even_parts(sizes: Sequence[int], most: int, count: int) -> list[list[int]]:
    """Places of `sizes` in few parts of about the same sum, each of at most `count` sizes and `most` in all.

    What is larger than `most` is a part of its own.
    """
    order = sorted(range(len(sizes)), key=lambda place: (-sizes[place], place))
    for number in range(math.ceil(len(sizes) / count), len(sizes) + 1):
        parts: list[list[int]] = [[] for _ in range(number)]
        sums = [0] * number
        for place in order:
            least = sums.index(min(sums))
            parts[least].append(place)
            sums[least] += sizes[place]
        if all(
            len(part) == 1 or (len(part) <= count and total <= most) for part, total in zip(parts, sums, strict=True)
        ):
            return [sorted(part) for part in parts]
    return []
