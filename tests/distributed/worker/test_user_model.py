"""A user's own model at a rank: what is opened, and what is saved."""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distributed.plan.run_spec import Bundle, RunSpec
from distributed.worker.load import load_bundle
from exogym.settings import FitSettings
from exogym.strategy import DiLoCoStrategy
from exogym.train_node import TrainResult
from whisper_tuner.errors import RunError

RESULT = TrainResult(
    steps=4,
    rounds=2,
    samples=8,
    train_loss=0.5,
    val_loss=None,
    best_step=None,
    digest=7,
    stopped=False,
    bytes_sent=16,
    seconds=1.5,
    seconds_communicating=0.5,
)


@pytest.fixture
def sent(tmp_path: Path) -> RunSpec:
    """A line and four points, as they have been sent to a host that trains on its CPU."""
    settings = FitSettings(strategy=DiLoCoStrategy(), max_steps=4, num_nodes=2)
    data = pickle.dumps((nn.Linear(2, 1), [torch.ones(4, 2)], None, settings))
    path = tmp_path / "bundle.pickle"
    path.write_bytes(data)
    bundle = Bundle(path=str(path), sha256=hashlib.sha256(data).hexdigest())
    return RunSpec(run_id="r", run_dir=str(tmp_path), cache_dir=str(tmp_path), bundle=bundle, device="cpu")


def test_what_was_sent_is_opened_and_its_model_is_saved_with_the_result(sent, tmp_path):
    work = load_bundle(sent)
    assert work.settings.device == "cpu" and work.settings.max_steps == 4
    assert len(work.train) == 1 and work.validation is None
    work.save(tmp_path / "final", RESULT)
    assert json.loads((tmp_path / "final" / "result.json").read_text()) == asdict(RESULT)
    saved = load_file(tmp_path / "final" / "model.safetensors")
    assert all(torch.equal(weight, saved[name]) for name, weight in work.model.state_dict().items())


def test_a_bundle_that_was_changed_on_the_way_is_not_opened(sent):
    Path(sent.bundle.path).write_bytes(b"not what was sent")
    with pytest.raises(RunError, match="not the file that was sent"):
        load_bundle(sent)
