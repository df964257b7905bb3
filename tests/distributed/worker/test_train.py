from pathlib import Path

import pytest
from torch import nn

from distributed.plan.run_spec import RunSpec
from distributed.worker.train import load_whisper
from exogym.config import strategy_config
from whisper_tuner.config import Profile
from whisper_tuner.model.wide_layers import SplitLinear

BUNDLED = Path(__file__).parents[3] / "bundled"


@pytest.mark.parametrize(("most", "kind"), [(None, nn.Linear), (500, SplitLinear)])
def test_a_device_that_sums_over_few_terms_is_given_layers_and_batches_that_fit(tmp_path, monkeypatch, most, kind):
    """The bundled model writes 809 tokens, and hears 4 s: 200 positions a clip."""
    monkeypatch.setattr("exogym.device.most_terms", lambda device: most)
    profile = Profile(base_model=str(BUNDLED / "model"), train=BUNDLED / "data" / "train.csv", device="cpu")
    about = {"run_id": "r", "run_dir": str(tmp_path), "cache_dir": str(tmp_path / "cache")}
    spec = RunSpec(**about, profile=profile, strategy_settings=strategy_config("diloco", {}))
    work = load_whisper(spec, lambda event: None, ())
    assert type(work.model.model.proj_out) is kind
    batches = work.train.samples
    assert batches.at_once(*batches.longest()) == (2 if most else 7)  # 1,500 positions at once on a CPU
