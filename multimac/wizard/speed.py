"""What training together promises, and the strategy for it: from each machine's speed, the payload and the network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distributed.preflight.speed import Speed

HOME_NETWORK = 12.5e6  # bytes a second, which is 100 Mbit/s; assumed where nothing was measured
SMALL_SHARE = 0.2  # of the time that communication may take
FEWEST_ROUNDS = 20  # with fewer, DiLoCo's outer optimizer has too few steps to learn from


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run has to do: the bytes of one agreement, the optimizer steps of each host, the number of hosts."""

    payload: int
    steps: int
    hosts: int


def exchange_s(work: Work, bytes_s: float | None) -> float:
    """Seconds of one agreement: a ring all-reduce sends 2 (N - 1) / N times the payload."""
    return 2 * (work.hosts - 1) / work.hosts * work.payload / (bytes_s or HOME_NETWORK)


def speed_up(speeds: Sequence[Speed], work: Work, bytes_s: float | None, steps_a_round: int) -> float | None:
    """How many times as fast as the first machine (the master) alone; None if a machine was not measured.

    Every host gets clips in proportion to its speed. What a step takes beside its clips is left out: alone, the master
    makes as many steps, of more clips.
    """
    if not speeds or any(speed.clips_s is None for speed in speeds):
        return None
    computing = step_s(speeds) * steps_a_round
    share = computing / (computing + exchange_s(work, bytes_s))
    return sum(speed.clips_s for speed in speeds) / speeds[0].clips_s * share


def step_s(speeds: Sequence[Speed]) -> float:
    """Seconds of a step of all machines that were measured, with clips in proportion to their speeds; 1 if none was."""
    measured = [speed for speed in speeds if speed.clips_s]
    clips = sum(speed.clips_s * speed.step_s for speed in measured)
    return clips / sum(speed.clips_s for speed in measured) if measured else 1.0


def suggested_interval(speeds: Sequence[Speed], work: Work, bytes_s: float | None) -> int:
    """Steps in a DiLoCo round: SMALL_SHARE of the time for communication at most, FEWEST_ROUNDS at least."""
    wanted = math.ceil(exchange_s(work, bytes_s) / (SMALL_SHARE * step_s(speeds)))
    return max(1, min(max(5, wanted), work.steps // FEWEST_ROUNDS))


def suggested_strategy(speeds: Sequence[Speed], work: Work, bytes_s: float | None) -> str:
    """AllReduce where agreeing at every step costs little, or where a run is too short for rounds."""
    cheap = exchange_s(work, bytes_s) <= SMALL_SHARE * step_s(speeds)
    return "allreduce" if cheap or work.steps < 2 * FEWEST_ROUNDS else "diloco"
