"""Checkpoints: what is damaged never counts as good, and never keeps a rank from the others that it has."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from damage import damaged, damaged_json
from fuzzing import fuzz, outcome

from exogym.state.checkpoint import Checkpoints

STATE = {"step": 3, "loss": (2.5, 40.0), "best": None, "strategy": {"weights": torch.arange(2.0), "rounds": [1, 2]}}


def files(folder: Path, number: int) -> list[Path]:
    return [folder / f"{number:07d}" / f"rank0.{kind}" for kind in ("json", "safetensors")]


with TemporaryDirectory() as one:
    Checkpoints(one, "rank0").save(2, STATE)
    INDEX, WEIGHTS = (file.read_bytes() for file in files(Path(one), 2))


@pytest.fixture(scope="module")
def checkpoints(folder: Path) -> Checkpoints:
    """A good one, number 1, and one to be damaged, number 2."""
    checkpoints = Checkpoints(folder, "rank0")
    for number in (1, 2):
        checkpoints.save(number, STATE)
    return checkpoints


def look(checkpoints: Checkpoints) -> tuple[list[int], list[int]]:
    return checkpoints.good(), checkpoints.numbers()


def counts(checkpoints: Checkpoints, index: bytes, weights: bytes) -> None:
    """Number 1 always; number 2 only if it still holds what was saved."""
    for file, data in zip(files(checkpoints.folder, 2), (index, weights), strict=True):
        file.write_bytes(data)
    found = outcome(look, checkpoints)
    assert found in (([1, 2], [1, 2]), ([1], [1, 2]))
    state = outcome(checkpoints.load, 2, names=checkpoints.folder / "0000002")
    assert repr(state) == repr(STATE if found == ([1, 2], [1, 2]) else None)


@fuzz("checkpoint, rank0.json", damaged_json(json.loads(INDEX)))
def test_an_index(checkpoints: Checkpoints, data: bytes):
    counts(checkpoints, data, WEIGHTS)


@fuzz("checkpoint, rank0.safetensors", damaged(WEIGHTS))
def test_weights(checkpoints: Checkpoints, data: bytes):
    counts(checkpoints, INDEX, data)


def test_an_index_of_brackets(checkpoints: Checkpoints):
    counts(checkpoints, b"[" * 3000, WEIGHTS)


def test_a_checkpoint_under_another_number(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, "rank0")
    checkpoints.save(2, STATE)
    (tmp_path / "0000002").rename(tmp_path / "0000009")
    assert not checkpoints.good() and checkpoints.numbers() == [9]
