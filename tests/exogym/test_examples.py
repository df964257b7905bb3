"""gym/example: each script runs as its user starts it, on real data, in real processes, and at its smallest size."""

from __future__ import annotations

import csv
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
EXAMPLES = PROJECT / "gym" / "example"
SHARED = {"comparison"}


def run(name: str, *arguments: str | Path) -> str:
    """What it prints. PYTHONPATH is what the examples say it should be."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(PROJECT / "gym")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(shown: str) -> dict[str, list[float]]:
    """Of the table of comparison.py: its figures by name, accuracy from 0 to 1."""
    found = {}
    for line in shown.split("MB sent by a node\n")[1].splitlines():
        if match := re.fullmatch(r"(\S.*?)  +(\d.*)", line):
            found[match[1]] = [float(x[:-1]) / 100 if x[-1] == "%" else float(x) for x in match[2].split()]
    return found


def test_every_script_has_a_test():
    scripts = {path.stem for path in EXAMPLES.glob("*.py")} - SHARED
    assert scripts == set(re.findall(r'run\("(\w+)"', Path(__file__).read_text(encoding="utf-8")))


def test_mnist_from_its_files(tmp_path, monkeypatch):
    """Scikit-learn's digits enlarged to 24x24, in files like those of MNIST."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from comparison import load_digits

    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    for part, data in zip(("train", "t10k"), load_digits(), strict=True):
        pixels, labels = data.tensors
        images = (pixels.view(-1, 8, 8) * 255).byte().repeat_interleave(3, 1).repeat_interleave(3, 2)
        for name, values in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels.byte())):
            head = struct.pack(f">HBB{values.dim()}i", 0, 8, values.dim(), *values.shape)
            (tmp_path / "MNIST" / "raw" / name).write_bytes(head + values.numpy().tobytes())
    shown = run("mnist", "--quick", "--nodes", 1, "--data", tmp_path)
    assert shown.startswith(f"data: MNIST in {tmp_path}, 1,437 images")
    assert all(accuracy > 0.3 for _, _, accuracy, _ in rows(shown).values())


@pytest.mark.slow
def test_mnist_that_is_not_there(tmp_path):
    command = [sys.executable, str(EXAMPLES / "mnist.py"), "--data", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(PROJECT / "gym")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(f"there is no MNIST in {tmp_path}")


def test_cifar(tmp_path, monkeypatch):
    shown = run("cifar", "--quick", "--nodes", 1)
    assert shown.startswith("data: two photographs, 2,250 images")
    assert all(accuracy > 0.12 for _, _, accuracy, _ in rows(shown).values())  # of ten classes
    monkeypatch.syspath_prepend(EXAMPLES)
    from cifar import load

    for name, label in (("data_batch_1", 3), ("data_batch_2", 7), ("test_batch", 9)):
        (tmp_path / f"{name}.bin").write_bytes(bytes([label, *1024 * [0], *1024 * [51], *1024 * [255]]))
    train_data, val_data = load(tmp_path)
    assert train_data.tensors[1].tolist() == [3, 7] and val_data.tensors[1].tolist() == [9]
    assert train_data.tensors[0][1, :, 5, 6].tolist() == pytest.approx([0, 0.2, 1])


@pytest.mark.slow
def test_nanogpt():
    shown = run("nanogpt", "--quick")
    (_, loss, sent), (_, other_loss, less_sent) = rows(shown).values()
    assert loss < 3.6 and other_loss < 3.6  # ln 59 = 4.08 of 59 characters: it has learnt which are frequent
    assert sent > 19 * less_sent
    assert "Written by the model" in shown and "\nFrom fairest" in shown


@pytest.mark.slow
def test_federated():
    shown = run("federated", "--quick", "--nodes", 3)
    found = rows(shown)
    assert found["FedAvg"][2] > found["node 0 alone"][2]
    assert 0 < found["FedAvg, islands of 2"][3] < found["FedAvg"][3]


@pytest.mark.slow
def test_scaling_of_diloco(tmp_path):
    run("diloco_scaling_batchsize", "--quick", "--csv", tmp_path / "scaling.csv")
    with (tmp_path / "scaling.csv").open(encoding="utf-8") as file:
        alone, two = csv.DictReader(file)
    assert (alone["nodes"], alone["steps"], alone["bytes_sent_by_a_node"]) == ("1", "45", "0.0")
    assert (two["nodes"], two["steps"], two["rounds"]) == ("2", "23", "5")
    assert float(two["bytes_sent_by_a_node"]) == pytest.approx(5 * 4 * 4810, rel=0.01)


@pytest.mark.slow
def test_lesson_1():
    shown = run("tutorial_basic", "--quick")
    assert [line[:6] for line in shown.splitlines() if line.startswith("Step")] == [f"Step {n}" for n in range(1, 8)]
    assert "It sent 0 bytes" in shown and "the same weights: True" in shown


@pytest.mark.slow
def test_lesson_2_on_some_strategies():
    """All of them are a test of minutes."""
    found = rows(run("tutorial_strategies", "--quick", "--only", "AllReduce", "DeMo"))
    assert list(found) == ["AllReduce", "DeMo"]
    assert all(accuracy > 0.3 for _, _, accuracy, _ in found.values())


@pytest.mark.slow
def test_lesson_2_on_all_strategies():
    found = rows(run("tutorial_strategies", "--epochs", 5))
    assert len(found) == 11 and all(accuracy > 0.8 for _, _, accuracy, _ in found.values())
    most = found["AllReduce"][3]
    assert all(sent <= most for _, _, _, sent in found.values())


@pytest.mark.slow
def test_lesson_3():
    found = rows(run("tutorial_custom", "--quick"))
    assert list(found) == ["votes on signs", "neighbours, and all"]
    assert all(accuracy > 0.4 for _, _, accuracy, _ in found.values())


@pytest.mark.slow
def test_lesson_5():
    shown = run("tutorial_pipeline", "--quick").splitlines()
    alone, same, rounded = (float(re.search(r"loss (\S+)", line)[1]) for line in shown)
    assert same == pytest.approx(alone, abs=2e-4) and rounded == pytest.approx(alone, abs=2e-2)


@pytest.mark.slow
def test_lesson_4(tmp_path):
    shown = run("tutorial_production", "--quick", "--out", tmp_path)
    stopped = int(re.search(r"stopped after (\d+) steps", shown)[1])
    assert 12 <= stopped < 46 and f"goes on from step {stopped}" in shown and "46 steps in all" in shown
    assert list((tmp_path / "checkpoints").iterdir())
    with (tmp_path / "figures.csv").open(encoding="utf-8") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["kind"] == "train"]
    assert steps[-1] == 46 and steps == sorted(steps)
    assert "2 processes ended" in shown and "All have the same weights: True" in shown
