"""The cases of scaling.py: on which hosts, over which links and in which way a run is measured, and what came of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.scaling_figures import Point, Steady

SETS = ("1x0.5", "2x0.5", "3x0.5", "4x0.5", "1+0.5+0.25")
LINKS, WER_LINKS = ("1gbit", "100mbit", "20mbit"), ("100mbit",)
# What a case sets; all else is left at its default.
WAYS: dict[str, dict[str, str]] = {
    "diloco": {},
    "plain": {
        "wire": "float32",
        "overlap_steps": "0",
        "share_moments": "false",
        "scale_lr": "false",
        "weigh_steps": "false",
    },
    "allreduce": {"strategy": "allreduce"},
    "fixed": {"shares": "fixed"},
    "one": {},
    "apart": {"communication_interval": "1000000"},
}
RECIPE = "Seq2SeqTrainer"
NO_LINK = "-"  # of hosts that send nothing
H = 10  # steps: what is measured is a multiple of them
LEAST_ROUNDS = 3  # of so many steps, of a speed case; the first and the last one do not count
WARM = 20  # steps; what is measured by default lies in the first 16 rounds, which send more than later ones
SHARED = 60  # steps after which shares follow the hosts' speeds, where those differ
ROUNDS, SLOW_ROUNDS = 6, 4
QUICK_STEPS = 4 * H  # of a WER case; the first checkpoint comes after 25
BATCH = 8
RECIPE_STEPS, RECIPE_CLIPS = 6, 64  # clips at least


@dataclass(frozen=True, kw_only=True)
class Case:
    """kind: speed or wer. hosts: 2x0.5, or 1+0.5+0.25 if they are unequal; 2x0.5of1 where only the thread that trains
    is limited to half a core, as the GPU of a Mac leaves its cores alone. settings: of its way, as text.

    A way "one" is the first of these hosts alone, measured beside the others: no machine is equally fast all day.
    steps: after which it ends, 0 for whole epochs; those after `first` and up to `last` are measured, 0 for all.
    """

    kind: str
    method: str
    hosts: str
    link: str
    way: str
    settings: str
    seed: int
    steps: int
    first: int
    last: int

    def __str__(self) -> str:
        return "/".join([self.kind, self.method, self.hosts, self.link, self.way, *self._seed])

    @property
    def is_wer(self) -> bool:
        return self.kind == "wer"

    @property
    def _seed(self) -> list[str]:
        return [str(self.seed)] if self.is_wer or self.seed else []

    @property
    def cpus(self) -> list[float]:
        """Cores of each host that train."""
        shares = cpus_of(self.hosts)
        return shares[:1] if self.way == "one" else shares

    @property
    def all_cpus(self) -> float | None:
        """Cores of each host, if more of them than those that train."""
        _, _, whole = self.hosts.partition("of")
        return float(whole) if whole else None


@dataclass(frozen=True, kw_only=True)
class Result:
    """steady: None if it failed. curve: of a WER case. seconds: with start and evaluation."""

    case: Case
    status: int
    steady: Steady | None
    curve: tuple[Point, ...]
    seconds: float
    commit: str

    @classmethod
    def read(cls, record: dict) -> Result:
        values = {
            "case": Case(**record["case"]),
            "steady": Steady(**record["steady"]) if record["steady"] else None,
            "curve": tuple(Point(**point) for point in record["curve"]),
        }
        return cls(**record | values)


def cpus_of(hosts: str) -> list[float]:
    own = hosts.partition("of")[0]
    count, _, share = own.partition("x")
    return [float(share)] * int(count) if share else [float(each) for each in own.split("+")]


def window(
    way: str, method: str, link: str, rounds: int, *, unequal: bool = False, quick: bool = False
) -> tuple[int, int, int]:
    """Steps in all, and those after which and up to which a speed case is measured: whole rounds, if there are any.

    A step or round of full fine-tuning takes a minute and more over a slow link.
    """
    slow = method == "full" and link == "20mbit"
    if way == RECIPE:
        return (3, 1, 3) if quick else (RECIPE_STEPS, 1, RECIPE_STEPS)
    if WAYS[way].get("strategy") == "allreduce":
        if quick or slow:
            return 5, 1, 4
        return (12, 2, 11) if method == "full" and link == "100mbit" else (4 + 6 * rounds, 4, 3 + 6 * rounds)
    rounds = LEAST_ROUNDS if quick else min(rounds, SLOW_ROUNDS) if slow else rounds
    every = int(WAYS[way].get("communication_interval", H))
    every = every if every <= rounds * H else H
    rounds = max(LEAST_ROUNDS, -(-(rounds - 2) * H // every) + 2)
    before = (SHARED if unequal else WARM) // every
    return (before + rounds) * every, (before + 1) * every, (before + rounds - 1) * every


def cases(
    methods: Iterable[str],
    sets: Sequence[str],
    links: Sequence[str],
    wer_links: Sequence[str],
    ways: Sequence[str],
    seeds: int,
    clips: int,
    *,
    rounds: int = 0,
    repeats: int = 1,
    batch: int = BATCH,
    quick: bool = False,
) -> list[Case]:
    """References stand beside what is compared with them. rounds: of speed cases; 0: an epoch is measured, or more.

    repeats: of speed cases, each time with clips in another order. In turn, as no machine is equally fast all day.
    """
    rounds = rounds or max(ROUNDS, round(clips / (batch * H)) + 2)

    def case(kind: str, method: str, hosts: str, link: str, way: str, seed: int = 0) -> Case:
        steps, first, last = window(way, method, link, rounds, unequal="+" in hosts, quick=quick)
        if kind == "wer":
            steps, first, last = (QUICK_STEPS if quick else 0), H, 0
        settings = json.dumps(WAYS.get(way, {}))
        about = {"kind": kind, "method": method, "hosts": hosts, "link": link, "way": way, "settings": settings}
        return Case(**about, seed=seed, steps=steps, first=first, last=last)

    found: list[Case] = []
    for method in methods:
        for turn, hosts in itertools.product(range(repeats), sets):
            unequal = "+" in hosts
            own = [way for way in ways if way != "fixed" or unequal]
            if len(cpus_of(hosts)) == 1:
                found += [case("speed", method, hosts, NO_LINK, way, turn) for way in ("one", RECIPE)]
                continue
            found += [case("speed", method, hosts, NO_LINK, way, turn) for way in ("one", "apart")]
            peers = () if "of" in hosts else (RECIPE,)  # its main thread does all
            found += [case("speed", method, hosts, link, way, turn) for link in links for way in (*own, *peers)]
        for seed in range(seeds):
            for hosts in sets:
                if len(cpus_of(hosts)) == 1:
                    found.append(case("wer", method, hosts, NO_LINK, "one", seed))
                elif "+" not in hosts:
                    # All weights at each step of a whole run take hours; and AllReduce's WER is one host's.
                    own = [way for way in ways if way != "fixed" and (way != "allreduce" or method == "lora")]
                    found += [case("wer", method, hosts, link, way, seed) for link in wer_links for way in own]
    return found


def left(wanted: Iterable[Case], results: Mapping[Case, Result]) -> list[Case]:
    """Those that are not done, or have failed."""
    return [case for case in wanted if case not in results or results[case].status]
