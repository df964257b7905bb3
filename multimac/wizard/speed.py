"""What training together promises, and the strategy for it: from each machine's speed, the payload and the network."""

from __future__ import annotations

from collections.abc import Sequence

from distributed.checkup.speed import Speed
from distributed.plan.automatic import FEWEST_ROUNDS, Conditions

SMALL_SHARE = 0.2  # of a step; agreeing at each may take so much


def speed_up(speeds: Sequence[Speed], waiting: float) -> float | None:
    """How many times as fast as the first machine (the master) alone; None if a machine was not measured.

    Every host gets clips in proportion to its speed. What a step takes beside its clips is left out: alone, the master
    makes as many steps, of more clips. waiting: the part of the time that all wait for the network.
    """
    if not speeds or any(speed.clips_s is None for speed in speeds):
        return None
    return sum(speed.clips_s for speed in speeds) / speeds[0].clips_s * (1 - waiting)


def waiting_at_every_step(conditions: Conditions) -> float:
    """The part of the time that AllReduce takes."""
    exchange_s = conditions.exchange_s()
    return exchange_s / (exchange_s + conditions.step_s)


def suggested_strategy(conditions: Conditions) -> str:
    """AllReduce where agreeing at every step costs little, or where a run is too short for rounds."""
    is_known = conditions.parameters > 0
    cheap = is_known and conditions.exchange_s() <= SMALL_SHARE * conditions.step_s
    return "allreduce" if cheap or conditions.steps < 2 * FEWEST_ROUNDS else "diloco"
