"""How much of the work each rank gets: as much as the others, or in proportion to its measured speed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from exogym.comm.comm import Comm
from exogym.membership import SPEEDS
from exogym.samplers.elastic import ElasticSampler
from exogym.settings import LoopSettings
from exogym.state.node_state import NodeState, Position

WINDOW, FEWEST = 128, 6  # steps that a speed is the mean of, at most and at least
BLOCKS = 16  # at most, into which they are put: steps differ, with one long clip or many short ones, and blocks less
EQUAL = 1.1  # speeds that differ by no more than this factor count as equal
FITTING = 1.05  # shares that are as close to the speeds stay
DOUBT = 3  # standard errors by which speeds must differ more than that
LEAST = 0.05  # of a mean share, for the slowest
OFTEN, SELDOM = 8, 128  # steps between two comparisons: soon after work was shared, and when nothing has changed since


class Measured(NamedTuple):
    """speed: cost a second; 0 if it is not known. error: its standard error, as a part of it."""

    speed: float
    error: float


UNKNOWN = Measured(0.0, 0.0)


class Speed:
    """The speed of this rank, over the last steps in which it had work.

    They are put into blocks of steps that follow each other. Only the middle half of these counts, by speed: so a first
    step that compiles, or one in which the machine slept, does not.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # cost, seconds

    def add(self, cost: float, seconds: float) -> None:
        if cost > 0 and seconds > 0:
            self._steps.append((cost, seconds))

    def clear(self) -> None:
        """Forget all steps: one of another size has another speed, as part of its time is the same for all sizes."""
        self._steps.clear()

    def measured(self) -> Measured:
        count = len(self._steps)
        if count < FEWEST:
            return UNKNOWN
        steps = -(-count // BLOCKS)  # in a block; the newest steps are in one
        own = list(self._steps)[count % steps :]
        blocks = [tuple(map(sum, zip(*own[at : at + steps], strict=True))) for at in range(0, len(own), steps)]
        count = len(blocks)
        by_speed = sorted(blocks, key=lambda block: block[0] / block[1])
        middle = by_speed[count // 4 : count - count // 4]
        speed = sum(cost for cost, _ in middle) / sum(seconds for _, seconds in middle)
        slowest, fastest = (cost / seconds for cost, seconds in (middle[0], middle[-1]))
        return Measured(speed, (fastest - slowest) / speed / math.sqrt(count - FEWEST + 1))


def fair_shares(measured: Sequence[Measured], present: Sequence[float]) -> list[float] | None:
    """Return weights of mean 1 in place of the `present` ones; None if those may stay.

    A rank's speed grows with its share where part of a step costs the same whatever its size. So one dealing in
    proportion to speeds is too cautious, never too bold, and the next ones end where all ranks take equally long.
    """
    speeds = [speed for speed, _ in measured]
    if min(speeds) <= 0:
        return None
    mean = sum(speeds) / len(speeds)
    fitting = [max(LEAST, round(speed / mean, 3)) for speed in speeds]
    changes = [new / old for new, old in zip(fitting, present, strict=True)]
    if _factor(changes) <= FITTING + DOUBT * max(error for _, error in measured):
        return None
    if _factor(speeds) > EQUAL:
        return fitting
    return [1.0] * len(present) if _factor(present) > 1 else None


def _factor(values: Sequence[float]) -> float:
    """Return the factor by which they differ at most."""
    return max(values) / min(values)


def told(members: Sequence[str], shares: Sequence[float], speeds: Sequence[float]) -> str:
    """Say it in words: `shares h1 40 %, h2 35 %, h3 25 %: h1 is 1.6 times as fast as h3`."""
    slowest, fastest = (members[speeds.index(speed)] for speed in (min(speeds), max(speeds)))
    parts = [f"{member} {100 * share / sum(shares):.0f} %" for member, share in zip(members, shares, strict=True)]
    return f"shares {', '.join(parts)}: {fastest} is {_factor(speeds):.2g} times as fast as {slowest}"


class Shares:
    """When ranks compare their speeds, and what they make of them: decided by what they have in common alone."""

    def __init__(self, state: NodeState, comm: Comm, settings: LoopSettings):
        self._state, self._comm = state, comm
        self._measured = state.sampler if settings.auto_shares and isinstance(state.sampler, ElasticSampler) else None
        self.speed = Speed()

    def is_comparison_due(self, at: Position) -> bool:
        """Say whether speeds are to be compared: soon after the work was shared, then in ever longer intervals."""
        seldom = max(SELDOM, 4 * self._state.strategy.config.steps_in_round)  # ranks wait for each other there
        interval = min(max(OFTEN, at.compared_at - at.shared_at), seldom)
        is_due = at.step >= at.compared_at + interval
        return self._measured is not None and self._comm.world_size > 1 and is_due

    def compare(self) -> tuple[list[float], str] | None:
        """Return the weights by which ranks should share the work from now on, and what to tell of them.

        None if they should go on as they do. May raise Rejoined.
        """
        mine = torch.tensor(self.speed.measured(), dtype=torch.float64)
        gathered = self._comm.commit_together(SPEEDS, lambda: self._comm.all_gather(mine))
        measured, members = [Measured(*each.tolist()) for each in gathered], self._comm.members
        shares = fair_shares(measured, self.kept(members))
        self._state.compared()
        return (shares, told(members, shares, [speed for speed, _ in measured])) if shares else None

    def kept(self, members: Sequence[str]) -> list[float]:
        """Return the present weights of members; one who has none gets the mean."""
        sampler = self._measured
        if sampler is None:
            return [1.0] * len(members)
        weights = dict(zip(sampler.members, sampler.weights, strict=True))
        mean = sum(weights.values()) / len(weights)
        return [weights.get(member, mean) for member in members]
