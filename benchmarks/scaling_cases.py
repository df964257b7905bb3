"""The cases of scaling.py, on which hosts, over which links and in which way a run is measured; and their tables."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.base import table
from benchmarks.scaling_run import Point, Steady, time_to

SETS = ("1x0.5", "2x0.5", "3x0.5", "4x0.5", "1+0.5+0.25")
LINKS, WER_LINKS = ("1gbit", "100mbit", "20mbit"), ("100mbit",)
# What a case sets; all else is left at its default.
WAYS: dict[str, dict[str, str]] = {"diloco": {}, "one": {}, "apart": {"communication_interval": "1000000"}}
NO_LINK = "-"  # of hosts that send nothing
H = 10  # steps: what is measured is a multiple of them
LEAST_ROUNDS = 3  # of so many steps, of a speed case; the first and the last one do not count
WARM = 20  # steps; what is measured by default lies in the first 16 rounds, which send more than later ones
SHARED = 60  # steps after which shares follow the hosts' speeds, where those differ
ROUNDS = 6
QUICK_STEPS = 4 * H  # of a WER case; the first checkpoint comes after 25
BATCH = 8
FEW_STEPS = 25  # between checkpoints of a WER case, at least

# What `diloco` promises. Times one host: by the number of hosts.
TIMES, TIMES_20MBIT = {2: 1.8, 3: 2.5, 4: 3.2}, {2: 1.7, 3: 2.5, 4: 3.2}
OF_LIMIT = {"lora": {2: 0.97, 3: 0.96, 4: 0.95}, "full": {2: 0.95, 3: 0.93, 4: 0.90}}  # at 100 Mbit/s
OF_SUM = 0.93  # of unequal hosts' own speeds
OTHERS = 0.1  # cores that others may use before it is a miss
MARGIN = 2.0  # points of WER: also reported is the time until so close to the WER to reach
SPEED_HEAD = (
    *("hosts", "link", "way", "clips/s", "lowest to highest", "times one host", "of the limit", "computing", "waiting"),
    *("exchange", "MB sent: interface", "counter", "cores of a host", "others' cores"),
)
WER_HEAD = (
    *("hosts", "link", "way", "final WER of each seed", "mean", "min of training", "min to the WER", "times one host"),
    *(f"to {MARGIN:g} points more", "times one host"),
)


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
        seed = [str(self.seed)] if self.is_wer or self.seed else []
        return "/".join([self.kind, self.method, self.hosts, self.link, self.way, *seed])

    @property
    def is_wer(self) -> bool:
        return self.kind == "wer"

    @property
    def cpus(self) -> list[float]:
        """Return the cores of each host that train."""
        shares = cpus_of(self.hosts)
        return shares[:1] if self.way == "one" else shares

    @property
    def all_cpus(self) -> float | None:
        """Return the cores of each host, if it has more than those that train."""
        _, _, whole = self.hosts.partition("of")
        return float(whole) if whole else None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a case came to. curve: of a WER case."""

    case: Case
    steady: Steady
    curve: tuple[Point, ...] = ()


def cpus_of(hosts: str) -> list[float]:
    own = hosts.partition("of")[0]
    count, _, share = own.partition("x")
    return [float(share)] * int(count) if share else [float(each) for each in own.split("+")]


def window(
    settings: Mapping[str, str], rounds: int, *, unequal: bool = False, quick: bool = False
) -> tuple[int, int, int]:
    """Return the steps of a speed case, and those after which and up to which it is measured: whole rounds."""
    rounds = LEAST_ROUNDS if quick else rounds
    every = int(settings.get("communication_interval", H))
    every = every if every <= rounds * H else H
    rounds = max(LEAST_ROUNDS, -(-(rounds - 2) * H // every) + 2)
    before = (SHARED if unequal else WARM) // every
    return (before + rounds) * every, (before + 1) * every, (before + rounds - 1) * every


def cases(args: argparse.Namespace, ways: Mapping[str, Mapping[str, str]], clips: int) -> list[Case]:
    """List all cases that the options of scaling.py ask for; references stand beside what is compared with them.

    ways: settings by name. clips: of an epoch. Repeats come in turn, as no machine is equally fast all day.
    """
    rounds = args.rounds or max(ROUNDS, round(clips / (args.batch * H)) + 2)

    def case(kind: str, method: str, hosts: str, link: str, way: str, seed: int) -> Case:
        settings = {**WAYS, **ways}[way]
        steps, first, last = window(settings, rounds, unequal="+" in hosts, quick=args.quick)
        if kind == "wer":
            steps, first, last = (QUICK_STEPS if args.quick else 0), H, 0
        where = {"hosts": hosts, "link": link, "way": way, "settings": json.dumps(settings)}
        return Case(kind=kind, method=method, **where, seed=seed, steps=steps, first=first, last=last)

    found: list[Case] = []
    for method in args.methods:
        for turn, hosts in itertools.product(range(args.repeats), args.sets):
            found.append(case("speed", method, hosts, NO_LINK, "one", turn))
            if len(cpus_of(hosts)) > 1:
                found.append(case("speed", method, hosts, NO_LINK, "apart", turn))
                found += [case("speed", method, hosts, link, way, turn) for link in args.links for way in ways]
        for seed, hosts in itertools.product(range(args.seeds), args.sets):
            if len(cpus_of(hosts)) == 1:
                found.append(case("wer", method, hosts, NO_LINK, "one", seed))
            elif "+" not in hosts:
                found += [case("wer", method, hosts, link, way, seed) for link in args.wer_links for way in ways]
    return found


# Tables, and where hosts are slower than is promised.


def tables(results: Sequence[Result], methods: Sequence[str], fixed: float | None, clips: int) -> tuple[list, list]:
    """Return the lines of all tables, and the misses. fixed: the WER to reach, if not one host's; clips: of a WER."""
    lines: list[str] = []
    misses = [f"{r.case}: {r.steady.others:.1f} cores were used by others" for r in results if r.steady.others > OTHERS]
    misses += missed([result for result in results if not result.case.is_wer])
    for method in methods:
        own = [result for result in results if result.case.method == method]
        rows = speed_rows([result for result in own if not result.case.is_wer])
        of_wer = [result for result in own if result.case.is_wer]
        wers, goal = wer_rows(of_wer, fixed)
        misses += missed_wers(of_wer, goal)
        lines += ["", f"{method}: speed", "", *table(SPEED_HEAD, rows)] if rows else []
        if wers:
            about = f"{method}: WER of the {clips} validation and test clips, by `evaluate`"
            if goal is not None:
                about += f"; the WER to reach is {goal:.1f}" + ("" if fixed else ", one host's at its end")
            apart = f"about a twentieth of a run or {FEW_STEPS} steps"
            about += f". Between checkpoints, which are {apart} apart, it falls along a straight line"
            lines += ["", about, "", *table(WER_HEAD, wers)]
    return lines, misses


def typical(results: Sequence[Result]) -> list[tuple[Result, list[float]]]:
    """Choose of repeated cases the one in the middle by clips a second, of two the slower; and list what all had."""
    alike: dict[Case, list[Result]] = {}
    for result in results:
        alike.setdefault(replace(result.case, seed=0), []).append(result)
    by_rate = [sorted(own, key=lambda result: result.steady.rate) for own in alike.values()]
    return [(own[(len(own) - 1) // 2], [result.steady.rate for result in own]) for own in by_rate]


def speed_rows(results: Sequence[Result]) -> list[list[str]]:
    """Make rows of medians, compared with the references beside them: those with the same hosts."""
    rows = []
    for result, rates in typical(results):
        case, figures = result.case, result.steady
        one, limit = references(case, results)
        shares = (figures.computing, figures.waiting, figures.exchanging)
        rows.append(
            [
                *(case.hosts, case.link, case.way, f"{figures.rate:.2f}"),
                f"{rates[0]:.2f} to {rates[-1]:.2f} of {len(rates)}" if len(rates) > 1 else "",
                f"{figures.rate / one:.2f}" if one else "",
                f"{figures.rate / limit:.0%}" if limit else "",
                *(f"{share:.0%}" for share in shares),
                f"{figures.mb_per_1000(figures.sent):.1f}",
                f"{figures.mb_per_1000(figures.counted):.1f}",
                f"{figures.cores / len(case.cpus):.2f}",
                f"{figures.others:.2f}",
            ]
        )
    return rows


def references(case: Case, results: Sequence[Result]) -> tuple[float | None, float | None]:
    """Return the clips a second of the first of its hosts alone, and of hosts that exchange nothing, if measured."""
    rates = {(r.case.hosts, r.case.way): r.steady.rate for r, _ in typical(results) if r.case.method == case.method}
    share = case.hosts.partition("x")[2]  # "" of unequal hosts
    alike = [rate for (hosts, way), rate in rates.items() if share and way == "one" and hosts.endswith(f"x{share}")]
    return rates.get((case.hosts, "one")) or next(iter(alike), None), rates.get((case.hosts, "apart"))


def missed(results: Sequence[Result]) -> list[str]:
    """Tell where hosts are slower than is promised."""
    found = []
    for case, rate in ((r.case, r.steady.rate) for r, _ in typical(results) if r.case.way == "diloco"):
        cpus, (one, limit) = cpus_of(case.hosts), references(case, results)
        if len({*cpus}) > 1:
            if one and rate < OF_SUM * (both := one * sum(cpus) / cpus[0]):
                found.append(f"{case}: {rate / both:.0%} of its hosts' own speeds, not {OF_SUM:.0%}")
            continue
        wanted = OF_LIMIT[case.method].get(len(cpus), 0.0) if case.link == "100mbit" else 0.0
        if limit and round(rate / limit, 2) < wanted:
            found.append(f"{case}: {rate / limit:.0%} of hosts that exchange nothing, not {wanted:.0%}")
        times = (TIMES_20MBIT if case.link == "20mbit" else TIMES).get(len(cpus), 0.0)
        if one and rate / one < times:
            found.append(f"{case}: {rate / one:.2f} times one host, not {times}")
    return found


def wer_rows(results: Sequence[Result], fixed: float | None = None) -> tuple[list[list[str]], float | None]:
    """Make rows of means over seeds; and the WER to reach, without `fixed` one host's mean at its end, if measured."""
    ways, alone = _ways(results)
    if fixed is None and alone:
        fixed = statistics.mean(result.curve[-1].wer for result in alone)
    rows = []
    for key, found in ways.items():
        finals = [result.curve[-1] for result in found]
        row = [
            *key,
            ", ".join(f"{point.wer:.1f}" for point in finals),
            f"{statistics.mean(point.wer for point in finals):.1f}",
            f"{statistics.mean(point.seconds for point in finals) / 60:.1f}",
        ]
        for margin in (0.0, MARGIN):
            row += ["", ""] if fixed is None else _reached(found, alone, fixed + margin)
        rows.append(row)
    return rows, fixed


def missed_wers(results: Sequence[Result], wer: float | None) -> list[str]:
    """Tell where hosts come to a WER later than is promised, or fewer of their seeds come to it than one host's."""
    ways, alone = _ways(results)
    found, of_one = [], _times(alone, wer)
    for (hosts, link, way), own in ways.items() if of_one else ():
        times, wanted = _times(own, wer), TIMES.get(len(cpus_of(hosts)), 0.0)
        name = f"wer/{own[0].case.method}/{hosts}/{link}/{way}"
        if way != "diloco" or not wanted:
            continue
        if len(times) * len(alone) < len(of_one) * len(own):
            found.append(f"{name}: {len(times)} of {len(own)} seeds reach {wer:.1f}, of one host {len(of_one)}")
        if times and (ratio := statistics.mean(of_one) / statistics.mean(times)) < wanted:
            found.append(f"{name}: {ratio:.2f} times as soon at {wer:.1f} as one host, not {wanted}")
    return found


def _ways(results: Sequence[Result]) -> tuple[dict[tuple[str, str, str], list[Result]], list[Result]]:
    """Return each way's results of all seeds, and those of one host."""
    ways: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        ways.setdefault((result.case.hosts, result.case.link, result.case.way), []).append(result)
    return ways, next((found for (_, _, way), found in ways.items() if way == "one"), [])


def _times(results: Sequence[Result], wer: float | None) -> list[float]:
    """Return the seconds to the WER, of the seeds that reach it."""
    found = [] if wer is None else [time_to(result.curve, wer) for result in results]
    return [seconds for seconds in found if seconds is not None]


def _reached(found: Sequence[Result], alone: Sequence[Result], wer: float) -> tuple[str, str]:
    """Tell the minutes to a WER, on average over the seeds that reach it, and how many times as fast as one host."""
    times, of_one = _times(found, wer), _times(alone, wer)
    if not times:
        return "not reached", ""
    mean = statistics.mean(times)
    some = f" (by {len(times)} of {len(found)})" if len(times) < len(found) else ""
    return f"{mean / 60:.1f}{some}", f"{statistics.mean(of_one) / mean:.2f}" if of_one else ""
