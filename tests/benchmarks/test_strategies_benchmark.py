"""The benchmark of strategies: a very small run of the script itself, and what it says of figures made by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks import strategies
from benchmarks.base import PROJECT, Done
from benchmarks.digits import PARTS, Figures, evaluate, load_digits, new_net
from benchmarks.strategies import Table, task_of, work
from benchmarks.strategy_settings import BY_KEY, ENTRIES
from exogym import ExogymError

ALLREDUCE, DILOCO = BY_KEY["allreduce"], BY_KEY["diloco"]


def figures(accuracy: float = 0.97, sent: float = 1e6) -> Figures:
    return Figures(train_loss=0.1, val_loss=0.2, accuracy=accuracy, sent=[int(sent)] * 4, seconds=9.0)


def table(out: Path, steps: int = 2000, **given: list[Figures]) -> Table:
    """Make the table of figures that are given by strategy, one for each seed."""
    entries, done, tasks = [BY_KEY[key] for key in given], Done(out), []
    for key, own in given.items():
        for seed, each in enumerate(own):
            tasks.append(task_of(BY_KEY[key], steps=steps, seed=seed))
            done.keep(tasks[-1], {"figures": asdict(each)}, "abc")
    return Table(done, tasks, entries, steps)


def test_medians_ratios_and_claims_come_from_the_figures(tmp_path):
    found = table(
        tmp_path,
        allreduce=[figures(0.96, 300e6), figures(0.97, 300e6), figures(0.99, 300e6)],
        diloco=[figures(0.95, 3e6), figures(0.96, 3e6), figures(0.90, 3e6)],
    )
    assert found.times_less(DILOCO) == 100 and found.behind(DILOCO) == pytest.approx(0.95 / 0.97 - 1)
    [(verdict, sentence)] = found.claims()
    assert verdict == "holds" and "100.0 times less than AllReduce over 2,000 steps" in sentence
    assert found.lines()[-1] == "No misses."


def test_a_strategy_that_falls_behind_or_sends_too_much_is_a_miss(tmp_path):
    few = {"allreduce": [figures(0.97, 300e6)], "diloco": [figures(0.94, 4e6)]}
    found = table(tmp_path, **few)
    sends, falls = found.misses()
    assert sends.startswith("DiLoCo at H=100 sends 75.0 times less")
    assert falls == "DiLoCo, H=100: accuracy 3.1 % below AllReduce's, 3 % allowed"
    assert any("-3.1 (misses)" in line for line in found.lines())
    assert [verdict for verdict, _ in table(tmp_path, steps=120, **few).claims()] == ["too short to judge"]


def test_a_run_that_failed_is_a_miss_with_its_last_line(tmp_path, monkeypatch):
    def fail(strategy, **_):
        raise ExogymError("node 1 of 4 failed:\nValueError: oh")

    monkeypatch.setattr(strategies, "train", fail)
    task, done = task_of(DILOCO, steps=50, seed=0), Done(tmp_path)
    done.run([task], work)
    assert f"- {task}: the run failed: ValueError: oh" in Table(done, [task], [DILOCO], 50).lines()


def test_the_digits_are_split_the_same_way_each_time():
    parts = load_digits()
    assert {name: len(part) for name, part in parts.items()} == PARTS and sum(PARTS.values()) == 1797
    assert all(torch.equal(part.tensors[0], load_digits()[name].tensors[0]) for name, part in parts.items())
    pixels = torch.cat([part.tensors[0] for part in parts.values()])
    assert len(pixels.unique(dim=0)) == 1797 and pixels.min() == 0 and pixels.max() == 1
    loss, accuracy = evaluate(new_net("mlp", seed=0), parts["test"])
    assert 2 < loss < 2.6 and accuracy < 0.3


def test_settings_are_those_that_the_strategies_take():
    for entry in ENTRIES:
        entry.build()
    assert len(BY_KEY) == len(ENTRIES)


def test_the_same_figures_give_the_same_chart(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.charts import Point, draw_accuracy

    points = [Point(f"strategy number {n}", "one", 3.0, 97 + n / 50) for n in range(6)]
    for name in ("a.svg", "b.svg"):
        draw_accuracy([*points, Point("far away", "two", 300.0, 97.0)], tmp_path / name, least=94.0)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_script_trains_resumes_and_leaves_the_results_alone(tmp_path):
    before = (PROJECT / "benchmarks" / "RESULTS.md").read_bytes()
    command = [sys.executable, str(PROJECT / "benchmarks" / "strategies.py"), "--quick", "--only", "allreduce,diloco"]
    command += ["--out", str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    first = subprocess.run([*command, "--more", "1"], capture_output=True, text=True, timeout=900, env=env)
    assert first.returncode == 0, first.stderr
    assert "runs left to do: 1" in first.stdout
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    assert done.returncode == 0, done.stderr
    assert "; 0 left" in done.stdout and "allreduce on mlp" not in done.stdout
    less = next(line for line in done.stdout.splitlines() if line.startswith("| DiLoCo, H=100 |")).split(" | ")[-2]
    assert float(less) == pytest.approx(60, rel=0.01)  # two rounds in 120 steps
    assert Path(tmp_path, "quick", "strategies.svg").exists()
    assert (PROJECT / "benchmarks" / "RESULTS.md").read_bytes() == before
