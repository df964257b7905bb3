"""What scaling.py tells of its cases: tables, and where hosts are slower than is promised."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.scaling_cases import Case, Result, cpus_of
from benchmarks.scaling_figures import time_to

# What `diloco` promises. Times one host: by the number of hosts.
TIMES, TIMES_20MBIT = {2: 1.8, 3: 2.5, 4: 3.2}, {2: 1.7, 3: 2.5, 4: 3.2}
OF_LIMIT = {"lora": {2: 0.97, 3: 0.96, 4: 0.95}, "full": {2: 0.95, 3: 0.93, 4: 0.90}}  # at 100 Mbit/s
OF_SUM = 0.93  # of unequal hosts' own speeds
OTHERS = 0.1  # cores that others may use before it is a miss
MARGIN = 2.0  # points of WER: also reported is the time until so close to the WER to reach
SPEED_HEAD = (
    "hosts",
    "link",
    "way",
    "clips/s",
    "lowest to highest",
    "times one host",
    "of the limit",
    "computing",
    "waiting",
    "exchange",
    "MB sent: interface",
    "counter",
    "cores of a host",
    "others' cores",
)
WER_HEAD = (
    "hosts",
    "link",
    "way",
    "final WER of each seed",
    "mean",
    "min of training",
    "min to the WER",
    "times one host",
    f"to {MARGIN:g} points more",
    "times one host",
)


def typical(results: Sequence[Result]) -> list[tuple[Result, list[float]]]:
    """Of repeated cases the one in the middle by clips a second, of two the slower; and what all had, in order."""
    alike: dict[Case, list[Result]] = {}
    for result in results:
        alike.setdefault(replace(result.case, seed=0), []).append(result)
    by_rate = [sorted(own, key=lambda result: result.steady.rate) for own in alike.values()]
    return [(own[(len(own) - 1) // 2], [result.steady.rate for result in own]) for own in by_rate]


def speed_rows(results: Sequence[Result]) -> list[list[str]]:
    """Medians, compared with those of the references beside them: those with the same hosts."""
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
                *("" if share is None else f"{share:.0%}" for share in shares),
                f"{figures.mb_per_1000(figures.sent):.1f}",
                f"{figures.mb_per_1000(figures.counted):.1f}" if figures.counted else "",
                f"{figures.cores / len(case.cpus):.2f}" if figures.cores else "",
                f"{figures.others:.2f}",
            ]
        )
    return rows


def references(case: Case, results: Sequence[Result]) -> tuple[float | None, float | None]:
    """(clips a second of the first of its hosts alone, those of hosts that exchange nothing), None if not measured."""
    rates = {(r.case.hosts, r.case.way): r.steady.rate for r, _ in typical(results) if r.case.method == case.method}
    share = case.hosts.partition("x")[2]  # "" of unequal hosts
    alike = [rate for (hosts, way), rate in rates.items() if share and way == "one" and hosts.endswith(f"x{share}")]
    return rates.get((case.hosts, "one")) or next(iter(alike), None), rates.get((case.hosts, "apart"))


def missed(results: Sequence[Result]) -> list[str]:
    """Where hosts are slower than is promised."""
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
    """Means over seeds, and the WER to reach: without `fixed` one host's mean at its end, None if that is not done."""
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
    """Where hosts come to a WER later than is promised, or fewer of their seeds come to it than one host's."""
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
    """Each way's results of all seeds, and those of one host."""
    ways: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        ways.setdefault((result.case.hosts, result.case.link, result.case.way), []).append(result)
    return ways, next((found for (_, _, way), found in ways.items() if way == "one"), [])


def _times(results: Sequence[Result], wer: float | None) -> list[float]:
    """Seconds to the WER, of the seeds that reach it."""
    found = [] if wer is None else [time_to(result.curve, wer) for result in results]
    return [seconds for seconds in found if seconds is not None]


def _reached(found: Sequence[Result], alone: Sequence[Result], wer: float) -> tuple[str, str]:
    """Minutes to a WER, on average over the seeds that reach it, and how many times as fast as one host."""
    times, of_one = _times(found, wer), _times(alone, wer)
    if not times:
        return "not reached", ""
    mean = statistics.mean(times)
    some = f" (by {len(times)} of {len(found)})" if len(times) < len(found) else ""
    return f"{mean / 60:.1f}{some}", f"{statistics.mean(of_one) / mean:.2f}" if of_one else ""
