"""The benchmark of strategies: a very small run of the script itself, and what it says of figures made by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import strategies
from benchmarks.digits import PARTS, Figures, evaluate, load_digits, new_net
from benchmarks.strategies import PROJECT, Result, Runs, Table, best_rate, task_of
from benchmarks.strategy_settings import BY_KEY, ENTRIES
from exogym import ExogymError

ALLREDUCE, DILOCO, DEMO = (BY_KEY[key] for key in ("allreduce", "diloco", "demo"))


def figures(accuracy: float = 0.97, sent: float = 1e6, **others: object) -> Figures:
    values = {"train_loss": 0.1, "val_loss": 0.2, "val_accuracy": 0.9, "first": [568] * 4, "seconds": 9.0}
    return Figures(accuracy=accuracy, sent=[int(sent)] * 4, **values | others)


@pytest.fixture
def trained(monkeypatch):
    """What has been trained, as (key, net, seed); figures are those in `trained.gives`, by key."""

    class Trained(list):
        pass

    def train(strategy, *, net, steps, seed):
        key = next(e.key for e in ENTRIES if e.strategy == type(strategy).__name__)
        done.append((key, net, seed))
        found = done.gives.get(key, figures())
        if isinstance(found, Exception):
            raise found
        return found

    done = Trained()
    done.gives = {}
    monkeypatch.setattr(strategies, "train", train)
    return done


def table(entries, seeds=1, steps=2000, out=None, **given):
    runs = Runs([task_of(entry, steps=steps, seed=seed) for seed in range(seeds) for entry in entries], out)
    for task in runs.tasks:
        runs.results[task] = Result(task=task, figures=given[task.key][task.seed], commit="abc")
    return Table(runs, entries, steps)


def test_medians_ratios_and_claims_come_from_the_figures(tmp_path):
    found = table(
        [ALLREDUCE, DILOCO],
        seeds=3,
        out=tmp_path / "done.jsonl",
        allreduce=[figures(0.96, 300e6), figures(0.97, 300e6), figures(0.99, 300e6)],
        diloco=[figures(0.95, 3e6), figures(0.96, 3e6), figures(0.90, 3e6)],
    )
    assert found.times_less(DILOCO) == 100 and found.behind(DILOCO) == pytest.approx(0.95 / 0.97 - 1)
    [(verdict, sentence)] = found.claims()
    assert verdict == "holds" and "100.0 times less than AllReduce over 2,000 steps" in sentence
    assert found.lines()[-1] == "No misses."


def test_a_strategy_that_falls_behind_or_sends_too_much_is_a_miss_with_its_reason(tmp_path):
    few = {"allreduce": [figures(0.97, 300e6)], "diloco": [figures(0.94, 4e6)]}
    found = table([ALLREDUCE, DILOCO], out=tmp_path / "done.jsonl", **few)
    sends, falls = found.misses()
    assert sends.startswith("DiLoCo at H=100 sends 75.0 times less")
    assert falls == f"DiLoCo, H=100: accuracy 3.1 % below AllReduce's, 3 % allowed: {DILOCO.note}"
    assert any("-3.1 (misses)" in line for line in found.lines())
    short = table([ALLREDUCE, DILOCO], steps=120, out=tmp_path / "done.jsonl", **few)
    assert [verdict for verdict, _ in short.claims()] == ["too short to judge"]


def test_nodes_that_send_unequally_are_told_of(tmp_path):
    unequal = replace(figures(), sent=[4_000_000, 1_000_000, 1_000_000, 2_000_000])
    found = table([ALLREDUCE], out=tmp_path / "done.jsonl", allreduce=[unequal])
    assert found.unequal() == ["AllReduce: nodes send 4.00, 1.00, 1.00, 2.00 MB; above is the mean"]


def test_what_is_done_is_kept_and_what_failed_is_done_again(tmp_path, trained):
    tasks = [task_of(entry, steps=50, seed=seed) for seed in range(2) for entry in (ALLREDUCE, DILOCO)]
    trained.gives["diloco"] = ExogymError("node 1 of 4 failed:\nValueError: oh")
    Runs(tasks, tmp_path / "done.jsonl").run(3)
    assert trained == [("allreduce", "mlp", 0), ("diloco", "mlp", 0), ("allreduce", "mlp", 1)]
    del trained[:], trained.gives["diloco"]
    runs = Runs(tasks, tmp_path / "done.jsonl")
    runs.run(9)
    assert trained == [("diloco", "mlp", 0), ("diloco", "mlp", 1)] and not runs.left()
    assert Runs(tasks, tmp_path / "done.jsonl").results == runs.results
    other = task_of(ALLREDUCE, lr=7e-3, steps=50, seed=0)
    assert Runs([*tasks, other], tmp_path / "done.jsonl").left() == [other]


def test_a_run_that_failed_is_a_miss_with_its_last_line(tmp_path, trained):
    trained.gives["diloco"] = ExogymError("node 1 of 4 failed:\nValueError: oh")
    task = task_of(DILOCO, steps=50, seed=0)
    runs = Runs([task], tmp_path / "done.jsonl")
    runs.run(9)
    assert Table(runs, [DILOCO], 50).misses() == [f"{task}: the run failed: ValueError: oh"]


def test_the_best_rate_has_the_highest_accuracy_then_the_lowest_loss():
    found = {1e-3: figures(val_accuracy=0.95), 3e-3: figures(val_accuracy=0.96), 1e-2: figures(val_accuracy=0.96)}
    found[1e-2] = replace(found[1e-2], val_loss=0.15)
    assert best_rate(found) == 1e-2 and best_rate({}) is None


def test_the_digits_are_split_the_same_way_each_time():
    parts = load_digits()
    assert {name: len(part) for name, part in parts.items()} == PARTS and sum(PARTS.values()) == 1797
    assert all(torch.equal(part.pixels, load_digits()[name].pixels) for name, part in parts.items())
    pixels = torch.cat([part.pixels for part in parts.values()])
    assert len(pixels.unique(dim=0)) == 1797 and pixels.min() == 0 and pixels.max() == 1
    loss, accuracy = evaluate(new_net("mlp", seed=0), parts["test"])
    assert 2 < loss < 2.6 and accuracy < 0.3


def test_settings_are_those_that_the_strategies_take():
    for entry in ENTRIES:
        entry.build(entry.lr)
    assert len(BY_KEY) == len(ENTRIES) and all(entry.lr in entry.rates for entry in ENTRIES)


def test_labels_of_the_chart_cover_neither_points_nor_each_other_and_the_file_is_the_same_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.strategy_chart import Point, draw_chart

    points = [Point(f"strategy number {n}", "one", 3.0, 97 + n / 50) for n in range(6)]
    points.append(Point("far away", "two", 300.0, 97.0))
    boxes = draw_chart(points, tmp_path / "a.svg", least=94.0)
    draw_chart(points, tmp_path / "b.svg", least=94.0)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    labels = range(len(boxes) - len(points), len(boxes))
    assert not any(boxes[n].overlaps(other) for n in labels for other in boxes[:n])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_script_trains_resumes_and_leaves_the_results_alone(tmp_path):
    before = (PROJECT / "benchmarks" / "RESULTS.md").read_bytes()
    command = [sys.executable, str(PROJECT / "benchmarks" / "strategies.py"), "--quick", "--only", "allreduce,diloco"]
    command += ["--out", str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    first = subprocess.run([*command, "--more", "1"], capture_output=True, text=True, timeout=900, env=env)
    assert first.returncode == 0, first.stderr
    assert "1 of 2" in first.stdout and "runs left to do: 1" in first.stdout
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    assert done.returncode == 0, done.stderr
    assert "2 of 2" in done.stdout and "1 of 2" not in done.stdout
    less = next(line for line in done.stdout.splitlines() if line.startswith("| DiLoCo, H=100 |")).split(" | ")[-2]
    assert float(less) == pytest.approx(60, rel=0.01)  # two rounds in 120 steps
    assert Path(tmp_path, "quick", "strategies.svg").exists()
    assert (PROJECT / "benchmarks" / "RESULTS.md").read_bytes() == before
