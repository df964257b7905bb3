from pathlib import Path

import pytest

from distributed.launcher import evaluate
from distributed.plan.run_spec import RunSpec
from whisper_tuner.config import Profile

BUNDLED = Path(__file__).parents[3] / "bundled"


class Asked(Exception):
    pass


@pytest.mark.parametrize(("batch_size", "at_once"), [(4, 4), (64, 16)])
def test_a_large_training_batch_is_no_large_batch_of_30_s_windows(tmp_path, monkeypatch, batch_size, at_once):
    def note(*_model, batch_size, **_settings):
        raise Asked(batch_size)

    monkeypatch.setattr(evaluate, "evaluate", note)
    profile = Profile(base_model=str(BUNDLED / "model"), train=Path(), device="cpu", batch_size=batch_size)
    spec = RunSpec(run_id="r", run_dir=str(tmp_path), cache_dir=str(tmp_path / "a" / "cache"), profile=profile)
    with pytest.raises(Asked) as asked:
        evaluate.evaluate_run(spec, BUNDLED / "data" / "test.csv", lambda event: None)
    assert asked.value.args == (at_once,)
