"""Where a long clip can be cut: the pauses between what is said in it."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from whisper_tuner.data.checks.facts import FAINTEST_DB, FRAME_S, frame_levels, silence_below

SHORTEST_PAUSE_S = 0.2  # before a t or a k nothing sounds for up to 0.15 s, and that is inside of words
EDGE_S = 0.3  # of silence that a piece keeps at each end: a first or last sound may be quieter than the limit
_SHORTEST_SHARE = 0.5  # of the longest piece: many short pieces teach less of what stands beside what

Span = tuple[float, float]
"""From and to, in seconds."""


class NoPause(Exception):
    """at: where the speech begins that is too long, in seconds; None if nothing is said at all."""

    def __init__(self, at: float | None = None):
        super().__init__(at)
        self.at = at


def spoken(waveform: np.ndarray, rate: int) -> list[Span]:
    """Find the spans that sound without a pause. waveform: mono float32 [n]."""
    frames = frame_levels(waveform - waveform.mean(), rate)
    sounds = np.flatnonzero(frames > max(silence_below(frames), FAINTEST_DB))
    if not len(sounds):
        return []
    ends = np.flatnonzero(np.diff(sounds) > math.ceil(SHORTEST_PAUSE_S / FRAME_S))
    first, last = np.append(sounds[0], sounds[ends + 1]), np.append(sounds[ends], sounds[-1])
    n = max(1, round(FRAME_S * rate))
    return [(begin * n / rate, (end + 1) * n / rate) for begin, end in zip(first.tolist(), last.tolist(), strict=True)]


def pieces(said: list[Span], longest_s: float) -> list[Span]:
    """Pieces of at most longest_s, cut in the longest pauses; of silence each keeps EDGE_S at its ends, no more.

    said: see `spoken`. Raises NoPause.
    """
    if not said:
        raise NoPause
    room = longest_s - 2 * EDGE_S
    cuts = [0]
    while cuts[-1] < len(said):
        begins = said[cuts[-1]][0]
        fit = [number for number in range(cuts[-1], len(said)) if said[number][1] - begins <= room]
        if not fit:
            raise NoPause(begins)
        rest = fit[-1] + 1 == len(said)
        enough = [number for number in fit if said[number][1] - begins >= _SHORTEST_SHARE * longest_s] or fit
        cuts.append(len(said) if rest else 1 + max(enough, key=lambda number: said[number + 1][0] - said[number][1]))
    return [_with_edges(said, first, last - 1) for first, last in pairwise(cuts)]


def _with_edges(said: list[Span], first: int, last: int) -> Span:
    before = (said[first - 1][1] + said[first][0]) / 2 if first else 0.0
    after = (said[last][1] + said[last + 1][0]) / 2 if last + 1 < len(said) else math.inf
    return max(before, said[first][0] - EDGE_S, 0.0), min(after, said[last][1] + EDGE_S)
