"""What the benchmark of scaling makes of recorded events and counters, which cases it has, and which it does again."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from benchmarks.base import BUNDLED_DATA, BUNDLED_MODEL
from benchmarks.scaling import Bench
from benchmarks.scaling_cases import (
    LINKS,
    SETS,
    Case,
    H,
    Result,
    cases,
    cpus_of,
    missed,
    missed_wers,
    speed_rows,
    wer_rows,
    window,
)
from benchmarks.scaling_run import Point, Sample, Steady, steady, time_to, times_of_agreements

# Two hosts, rounds of two steps. The second round ends with step 4, to which b comes 2 s after a; it then takes 1 s.
EVENTS = [
    {"type": "start", "host": "a", "time": 8.0},
    {"type": "step", "host": "a", "step": 1, "time": 11.0, "seconds": 1.0, "samples": 4, "bytes": 0},
    {"type": "step", "host": "b", "step": 1, "time": 12.0, "seconds": 2.0, "samples": 4, "bytes": 0},
    *(
        {"type": "step", "host": host, "step": 2, "time": 20.0, "seconds": 8.0, "samples": 4, "bytes": 70}
        | {"seconds_exchanging": 5.0}
        for host in "ab"
    ),
    *(
        {"type": "round", "host": host, "round": 1, "step": 2, "time": time}
        for host, time in zip("ab", (20.1, 20.5), strict=True)
    ),
    {"type": "step", "host": "a", "step": 3, "time": 22.0, "seconds": 2.0, "samples": 4, "seconds_exchanging": 0.0},
    {"type": "step", "host": "b", "step": 3, "time": 23.0, "seconds": 3.0, "samples": 5, "seconds_exchanging": 0.0},
    {"type": "step", "host": "a", "step": 4, "time": 28.0, "seconds": 6.0, "samples": 4, "seconds_exchanging": 3.0}
    | {"bytes": 1_000_000},
    {"type": "step", "host": "b", "step": 4, "time": 28.0, "seconds": 5.0, "samples": 3, "seconds_exchanging": 1.0}
    | {"bytes": 1_000_000},
    {"type": "round", "host": "a", "round": 2, "step": 4, "time": 28.1},
]
SAMPLES = [
    Sample(time=0.0, sent={"a": 0, "b": 0}, hosts=0.0, machine=100.0),
    Sample(time=18.0, sent={"a": 0, "b": 0}, hosts=10.0, machine=112.0),
    Sample(time=28.0, sent={"a": 2_000_000, "b": 3_000_000}, hosts=20.0, machine=127.0),
    Sample(time=40.0, sent={"a": 9e9, "b": 9e9}, hosts=50.0, machine=157.0),
]


def test_a_steady_speed_leaves_the_beginning_out_and_says_where_the_time_went():
    found = steady(EVENTS, SAMPLES, (2, 4))
    assert found.clips == 16 and found.rate == pytest.approx(16 / 8)
    # 16 s of two hosts: 12 in steps 3 and 4 without exchanges, 2 in which a waits for b, 2 in exchanges.
    assert (found.computing, found.waiting, found.exchanging) == pytest.approx((12 / 16, 2 / 16, 2 / 16))
    assert found.counted == {"a": 1_000_000, "b": 1_000_000}
    assert found.sent == pytest.approx({"a": 1_600_000, "b": 2_400_000})  # of 10 s the last 8
    assert found.mb_per_1000(found.sent) == pytest.approx(2.0 / 16 * 1000)
    assert found.others == pytest.approx(0.5) and found.cores == pytest.approx(1.0)


def test_hosts_that_never_wait_have_times_of_their_own():
    events = [
        {"type": "step", "host": host, "step": step, "time": step * pace, "seconds": pace, "samples": 2}
        for host, pace in (("a", 1.0), ("b", 4.0))
        for step in range(1, 6)
    ]
    found = steady(events, SAMPLES, (1, 5))
    assert found.rate == pytest.approx(2 / 1 + 2 / 4)
    assert (found.waiting, found.exchanging) == (0.0, 0.0) and found.computing == pytest.approx(1.0)


def test_a_run_that_lacks_the_steps_is_no_result():
    with pytest.raises(ValueError, match="no steps 2 and 9 of a, b"):
        steady(EVENTS, SAMPLES, (2, 9))


def test_time_to_a_wer_lies_between_two_models():
    curve = [Point(step=s, seconds=t, wer=w) for s, t, w in ((10, 60.0, 50.0), (20, 120.0, 30.0), (25, 150.0, 34.0))]
    assert time_to(curve, 60.0) == 60.0 and time_to(curve, 30.0) == 120.0
    assert time_to(curve, 40.0) == pytest.approx(90.0)
    assert time_to(curve, 29.0) is None


def test_agreements_are_rounds_or_steps():
    assert times_of_agreements(EVENTS, [1, 2]) == {1: (2, pytest.approx(10.5)), 2: (4, pytest.approx(18.1))}
    steps = [event for event in EVENTS if event["type"] == "step"]
    assert times_of_agreements(steps, [3]) == {3: (3, pytest.approx(13.0))}


def test_sets_of_hosts():
    assert cpus_of("3x0.5") == [0.5, 0.5, 0.5] and cpus_of("1+0.5+0.25") == [1.0, 0.5, 0.25]
    assert cpus_of("2x0.5of1") == [0.5, 0.5] and cpus_of("0.8+0.4of0.9") == [0.8, 0.4]


OPTIONS = {"methods": ["lora", "full"], "sets": SETS, "links": LINKS, "wer_links": ["100mbit"]}
OPTIONS |= {"seeds": 2, "rounds": 0, "repeats": 1, "batch": 8, "quick": False}
PLAIN = {"diloco": {}, "plain": {"wire": "float32"}, "allreduce": {"strategy": "allreduce"}}


def all_cases(*, ways=PLAIN, **changes) -> list[Case]:
    return cases(SimpleNamespace(**OPTIONS | changes), ways, clips=400)


def test_every_case_stands_beside_its_references_and_is_measured_over_whole_rounds():
    found = all_cases()
    assert len(set(map(str, found))) == len(found) == len(set(found))
    speed = [case for case in found if case.kind == "speed"]
    for case in speed:
        beside = {other.way for other in speed if (other.hosts, other.method) == (case.hosts, case.method)}
        assert "one" in beside and ("apart" in beside or case.hosts == "1x0.5")
        assert 0 < case.first < case.last < case.steps and case.first % H == case.last % H == 0
        assert len(case.cpus) == 1 if case.way == "one" else case.cpus == cpus_of(case.hosts)
    names = [str(case) for case in found if case.kind == "wer"]
    assert "wer/full/1x0.5/-/one/1" in names and "wer/lora/2x0.5/100mbit/allreduce/0" in names
    assert not any("+" in name for name in names)


def test_other_rounds_are_measured_as_a_whole():
    assert window({"communication_interval": "25"}, 7) == (100, 25, 75)
    assert window({}, 7) == (90, 30, 80)
    assert window({"communication_interval": "1000000"}, 7) == (90, 30, 80)


def result_of(case: Case, *, rate: float = 2.0, wers: tuple[float, ...] = ()) -> Result:
    steady = Steady(
        rate=rate,
        clips=500,
        computing=0.8,
        waiting=0.05,
        exchanging=0.15,
        counted={"a": 1_000_000},
        sent={"a": 1_100_000.0},
        others=0.0,
        cores=len(case.cpus) * 0.5,
    )
    curve = tuple(Point(step=10 * n, seconds=60.0 * n, wer=wer) for n, wer in enumerate(wers, 1))
    return Result(case=case, steady=steady, curve=curve)


def test_speeds_are_compared_with_the_references_beside_them():
    of_two = all_cases(methods=["lora"], sets=["2x0.5"], links=["1gbit"], ways={"diloco": {}}, seeds=0)
    rates = {"one": 2.0, "apart": 4.0, "diloco": 3.0}
    rows = {row[2]: row for row in speed_rows([result_of(case, rate=rates[case.way]) for case in of_two])}
    assert rows["diloco"] == [
        *("2x0.5", "1gbit", "diloco", "3.00", "", "1.50", "75%", "80%", "5%", "15%", "2.2", "2.0", "0.50", "0.00")
    ]


def test_equal_hosts_are_compared_with_one_of_them_whichever_set_it_stands_beside():
    found = all_cases(
        methods=["lora"], sets=["2x0.5", "4x0.5", "4x0.25"], links=["1gbit"], ways={"diloco": {}}, seeds=0
    )
    measured = [case for case in found if case.way == "diloco" or (case.hosts, case.way) == ("4x0.5", "one")]
    rows = {row[0]: row for row in speed_rows([result_of(case, rate=3.0) for case in measured]) if row[2] == "diloco"}
    assert [rows[hosts][5] for hosts in ("2x0.5", "4x0.5", "4x0.25")] == ["1.00", "1.00", ""]


def test_repeated_speeds_are_told_by_their_medians():
    found = all_cases(methods=["lora"], sets=["2x0.5"], links=["1gbit"], ways={"diloco": {}}, seeds=0, repeats=3)
    assert [str(case) for case in found if case.way == "one"] == [
        f"speed/lora/2x0.5/-/one{at}" for at in ("", "/1", "/2")
    ]
    rates = {"one": [2.0, 1.0, 3.0], "apart": [4.0, 9.0, 4.4], "diloco": [4.0, 3.0, 3.3]}
    results = [result_of(case, rate=rates[case.way][case.seed]) for case in found]
    rows = {row[2]: row for row in speed_rows(results)}
    assert rows["diloco"][3:7] == ["3.30", "3.00 to 4.00 of 3", "1.65", "75%"]
    assert missed(results)[0].startswith("speed/lora/2x0.5/1gbit/diloco/2: 1.65 times one host")


def test_slower_than_promised_is_a_miss():
    known = {"methods": ["full"], "links": ["100mbit", "20mbit"], "ways": {"diloco": {}}, "seeds": 0}
    found = all_cases(sets=["1x0.5", "2x0.5", "1+0.5"], **known)
    rates = {("1x0.5", "one"): 2.0, ("2x0.5", "apart"): 4.0, ("1+0.5", "one"): 4.0}
    results = [result_of(case, rate=rates.get((case.hosts, case.way), 3.5)) for case in found if case.hosts != "2x0.5"]
    results += [result_of(case, rate=4.0) for case in found if (case.hosts, case.way) == ("2x0.5", "apart")]
    [close, far] = [case for case in found if (case.hosts, case.way) == ("2x0.5", "diloco")]
    told = missed([*results, result_of(close, rate=3.7), result_of(far, rate=3.3)])
    assert told == [
        *(f"speed/full/1+0.5/{link}/diloco: 58% of its hosts' own speeds, not 93%" for link in known["links"]),
        "speed/full/2x0.5/100mbit/diloco: 92% of hosts that exchange nothing, not 95%",
        "speed/full/2x0.5/20mbit/diloco: 1.65 times one host, not 1.7",
    ]


def test_time_to_what_one_host_reaches_over_seeds():
    whole = [case for case in all_cases(methods=["lora"], sets=["1x0.5", "2x0.5"]) if case.kind == "wer"]
    one, two = ([case for case in whole if case.way == way] for way in ("one", "diloco"))
    assert wer_rows([result_of(case, wers=(50.0, 30.0)) for case in two])[1] is None
    results = [result_of(case, wers=(50.0, wer)) for case, wer in zip(one, (29.0, 31.0), strict=True)]
    results += [result_of(case, wers=(30.0, wer)) for case, wer in zip(two, (28.0, 33.0), strict=True)]
    (alone, pair), fixed = wer_rows(results)
    assert fixed == 30.0
    assert alone[3:] == ["29.0, 31.0", "30.0", "2.0", "2.0 (by 1 of 2)", "1.00", "1.9", "1.00"]
    assert pair[3:] == ["28.0, 33.0", "30.5", "2.0", "1.0", "1.95", "1.0", "1.90"]
    assert wer_rows(results, fixed=10.0)[0][1][6:8] == ["not reached", ""]
    name = "wer/lora/2x0.5/100mbit/diloco"
    assert missed_wers(results, 30.0) == missed_wers(results, 31.0) == []
    assert missed_wers(results, 50.0) == [f"{name}: 1.00 times as soon at 50.0 as one host, not 1.8"]
    assert missed_wers([*results[:2], *(result_of(case, wers=(50.0, 40.0)) for case in two)], 31.0) == [
        f"{name}: 0 of 2 seeds reach 31.0, of one host 2"
    ]
    assert missed_wers(results, None) == missed_wers(results, 10.0) == []


@pytest.fixture
def bench_of(tmp_path):
    options = {"methods": ["lora"], "sets": ["1x0.5", "2x0.5"], "links": ["1gbit"], "wer_links": ["1gbit"]}
    options |= {"also": [], "seeds": 1, "rounds": 3, "wer": None, "language": "", "cases": ["*"]}
    paths = {"model": BUNDLED_MODEL, "data": BUNDLED_DATA, "out": tmp_path}
    return lambda **changes: Bench(SimpleNamespace(**OPTIONS | options | paths | changes))


def test_checkpoints_of_a_wer_case_are_a_twentieth_of_its_run_apart(bench_of):
    bench = bench_of(also=[("allreduce", {"strategy": "allreduce"})])
    found = {str(case): bench.between_checkpoints(case) for case in bench.cases}
    # 240 clips, 8 epochs: 240 steps
    assert (found["wer/lora/2x0.5/1gbit/diloco/0"], found["wer/lora/2x0.5/1gbit/allreduce/0"]) == (5, 25)
    assert found["speed/lora/2x0.5/-/apart"] > 10_000 and found["speed/lora/2x0.5/1gbit/diloco"] == 0


def test_what_is_done_is_not_done_again_and_what_failed_is(bench_of):
    asked = []

    def measure(case: Case) -> dict:
        asked.append(str(case))
        if asked.count(str(case)) == 1 and case.way == "apart":
            raise RuntimeError("no such luck")
        done = result_of(case, wers=(40.0,) if case.is_wer else ())
        return {"steady": asdict(done.steady), "curve": [*map(asdict, done.curve)]}

    def run(patterns: list[str], most: int | None = None) -> Bench:
        bench = bench_of(cases=patterns)
        bench.done.run(bench.chosen(), measure, most)
        return bench

    failed = run(["speed/lora/2x0.5/-/*"])
    assert asked == ["speed/lora/2x0.5/-/one", "speed/lora/2x0.5/-/apart"]
    assert "- speed/lora/2x0.5/-/apart: the run failed: RuntimeError: no such luck" in failed.report()
    run(["*/apart", "speed/*/one"], 1)
    bench = run(["*"])
    assert len(asked) == len(set(asked)) + 1 and set(asked) == set(map(str, bench.cases))
    assert not bench.done.left(bench.cases) and bench.report()[-2:] == [
        "- speed/lora/2x0.5/1gbit/diloco: 1.00 times one host, not 1.8",
        "- wer/lora/2x0.5/1gbit/diloco: 1.00 times as soon at 40.0 as one host, not 1.8",
    ]
