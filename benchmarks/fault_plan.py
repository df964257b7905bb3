"""What is to happen in a run of faults.py, drawn by a seed; nothing is done here."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from lab.mischief import Fault

BATCH, ROUND_STEPS = 4, 5
STRATEGIES = ("diloco", "hidden", "diloco", "allreduce")  # hidden: DiLoCo whose exchanges travel beside its steps
SHORT_S, LONG_S = (2.0, 9.0), (16.0, 28.0)  # a host comes back before it is given up, or after
FIRST_S, GAP_S, REST_S = 3.0, (4.0, 12.0), 2.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run and what happens to it. After each leg but the last the launcher is killed, and a checkpoint damaged.

    clocks are wrong during the whole run; a host of a `disk` fault has a small one.
    """

    number: int
    hosts: tuple[str, ...]
    strategy: str
    seed: int
    epochs: int
    legs: tuple[tuple[Fault, ...], ...] = ((),)
    damages: tuple[Fault, ...] = ()
    clocks: tuple[Fault, ...] = ()
    test: bool = False
    round_steps: int = ROUND_STEPS
    batch: int = BATCH

    def to_json(self) -> dict:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @property
    def round_samples(self) -> int:
        """Of all hosts together. Each makes every step."""
        return max(self.batch, len(self.hosts)) * (1 if self.strategy == "allreduce" else self.round_steps)

    @property
    def vain_rounds(self) -> int:
        """Rounds of training that a fault may undo: the one under way, and the one whose exchange travels."""
        return 2 if self.strategy == "hidden" else 1


def plan(seed: int, number: int, kinds: Sequence[str], count: int, epochs: dict[str, int]) -> Plan:
    """Run `number`: its kinds come from a deck that is dealt out over all runs, so that each comes as often."""
    rng = random.Random(f"{seed} {number}")
    decks = [random.Random(f"{seed} deck {n}").sample(kinds, len(kinds)) for n in range((number + 1) * count)]
    mine = [kind for deck in decks for kind in deck][number * count : (number + 1) * count]
    hosts = tuple(f"h{n}" for n in range(1, rng.choice((3, 4)) + 1))
    strategy = STRATEGIES[number % len(STRATEGIES)]
    legs, damages, clocks = [[]], [], []
    at, free = FIRST_S, dict.fromkeys(hosts, 0.0)
    for kind in mine:
        host, own_seed = rng.choice(hosts), rng.randrange(1 << 32)
        if kind == "clock":
            host = rng.choice([h for h in hosts if h not in {clock.host for clock in clocks}])
            clocks.append(Fault(at=0, host=host, kind=kind, seconds=0, seed=own_seed))
        elif kind == "damage":
            damages.append(Fault(at=0, host=host, kind=kind, seconds=0, seed=own_seed))
            legs.append([])
            at, free = FIRST_S, dict.fromkeys(hosts, 0.0)
        else:
            host = rng.choice([h for h in hosts if free[h] <= at] or [min(hosts, key=free.get)])
            at = max(at, free[host])
            lasts = 0.0 if kind == "kill" else rng.uniform(*rng.choice((SHORT_S, LONG_S)))
            legs[-1].append(Fault(at=at, host=host, kind=kind, seconds=lasts, seed=own_seed))
            free[host] = at + lasts + REST_S
            at += rng.uniform(*GAP_S)
    return Plan(
        number=number, hosts=hosts, strategy=strategy, seed=seed + number, epochs=epochs[strategy],
        legs=tuple(map(tuple, legs)), damages=tuple(damages), clocks=tuple(clocks),
    )  # fmt: skip
