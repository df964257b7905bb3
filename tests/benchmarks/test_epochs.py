"""What the benchmark of epochs says of WERs, and what it does again."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks import epochs
from benchmarks.epochs import PROJECT, Bench, Result, Task, config, judge
from distributed.plan.job import resolve
from whisper_tuner.config import ConfigFile


def runs(ranks: int, number: int, *wers: float | None) -> list[Result]:
    return [
        Result(
            task=Task(ranks=ranks, epochs=number, seed=seed),
            before=67.7,
            wer=wer,
            seconds=10.0 * number,
            status=3 if wer is None else 0,
            commit="abc",
        )
        for seed, wer in enumerate(wers)
    ]


def test_noise_is_two_standard_errors_of_the_difference():
    """Deviation of (20, 22) and (30, 34): sqrt((2 + 8) / 2); two means of two runs each: times sqrt(1/2 + 1/2)."""
    verdicts = judge([*runs(2, 8, 20.0, 22.0), *runs(4, 8, 30.0, 34.0), *runs(2, 16, 25.0, 25.0)])
    [verdict] = verdicts
    assert (verdict.ranks, verdict.epochs, verdict.difference) == (2, 16, 4.0)
    assert verdict.noise == pytest.approx(2 * math.sqrt(5)) and not verdict.missed


@pytest.mark.parametrize(
    ("longer", "missed"),
    [((19.0, 18.0, 20.0), False), ((22.0, 21.0, 22.0), False), ((45.0, 43.0, 46.0), True), ((20.0, 21.0, 52.0), True)],
    ids=["better", "noise", "collapse", "collapse of one seed"],
)
def test_a_collapse_is_a_miss_and_noise_is_not(longer, missed):
    shorter = [*runs(2, 8, 19.0, 21.0, 22.0), *runs(4, 8, 21.0, 24.0, 23.0)]
    [verdict] = judge([*shorter, *runs(2, 16, *longer)])
    assert verdict.missed is missed


def test_each_length_is_compared_with_its_half_on_as_many_ranks():
    results = [r for ranks in (2, 4) for number in (8, 16, 32) for r in runs(ranks, number, 20.0, 21.0)]
    assert [(v.ranks, v.epochs) for v in judge(results)] == [(2, 16), (2, 32), (4, 16), (4, 32)]
    assert judge([*runs(2, 8, 20.0, 21.0), *runs(2, 32, 20.0, 21.0), *runs(4, 16, 20.0, 21.0)]) == []


def test_without_a_measure_of_noise_nothing_passes():
    [verdict] = judge([*runs(2, 8, 20.0), *runs(2, 16, 10.0)])
    assert verdict.missed


def test_what_is_done_is_not_done_again_and_what_failed_is(tmp_path, monkeypatch):
    asked, failing = [], [Task(ranks=2, epochs=2, seed=0)]

    def train(task, folder):
        asked.append((task.epochs, task.seed))
        fails = task in failing and not failing.remove(task)
        return replace(*runs(task.ranks, task.epochs, None if fails else 20.0), task=task)

    monkeypatch.setattr(epochs, "train", train)
    Bench((2,), (1, 2), 2, tmp_path).run(2)
    assert asked == [(1, 0), (2, 0)]
    assert Bench((2,), (1,), 2, tmp_path).report()[-1] == "No misses so far; runs left to do: 1."
    bench = Bench((2,), (1, 2), 2, tmp_path)
    assert [(task.epochs, task.seed) for task in bench.left()] == [(2, 0), (1, 1), (2, 1)]
    assert "- 2 ranks, 2 epochs, seed 0: the run failed, status 3" in bench.report()
    bench.run(9)
    assert asked[2:] == [(2, 0), (1, 1), (2, 1)]
    assert Bench((2,), (1, 2), 2, tmp_path).report()[-1] == "No misses."
    assert len((tmp_path / "done.jsonl").read_text().splitlines()) == 5


def test_the_settings_are_the_demos_and_the_strategys_defaults(tmp_path):
    (tmp_path / "config.ini").write_text(config(Task(ranks=4, epochs=16, seed=7)))
    job = resolve(ConfigFile(tmp_path / "config.ini"), "epochs")
    demo = ConfigFile(PROJECT / "config.ini").profile("demo")
    assert (job.profile.epochs, job.profile.seed, job.profile.runs_dir) == (16, 7, tmp_path / "runs")
    assert (job.profile.learning_rate, job.profile.test) == (demo.learning_rate, demo.test)
    assert job.strategy_settings == {}
