import json
from pathlib import Path

import pytest
import torch

from distributed.launcher import evaluate
from distributed.plan.run_spec import RunSpec
from whisper_tuner.config import Profile
from whisper_tuner.errors import RunError

BUNDLED = Path(__file__).parents[3] / "bundled"


class Asked(Exception):
    pass


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Evaluates with a model that only raises `error(batch size)`, on a device that is of this kind."""

    def evaluate_run(batch_size: int, kind: str, error) -> None:
        def fail(*_model, batch_size, **_settings):
            raise error(batch_size)

        monkeypatch.setattr("whisper_tuner.eval.evaluation.transcribe", fail)
        monkeypatch.setattr(evaluate.devices, "choose", lambda name: torch.device(kind))
        monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: module)
        profile = Profile(base_model=str(BUNDLED / "model"), train=Path(), batch_size=batch_size)
        spec = RunSpec(run_id="r", run_dir=str(tmp_path), cache_dir=str(tmp_path / "a" / "cache"), profile=profile)
        evaluate.evaluate_run(spec, BUNDLED / "data" / "test.csv", lambda event: None)

    return evaluate_run


@pytest.mark.parametrize(("batch_size", "kind", "at_once"), [(4, "mps", 4), (64, "cpu", 16), (64, "cuda", 64)])
def test_a_large_training_batch_is_no_large_batch_of_30_s_windows(run, batch_size, kind, at_once):
    with pytest.raises(Asked) as asked:
        run(batch_size, kind, Asked)
    assert asked.value.args == (at_once,)


def test_memory_that_runs_out_is_told_with_a_remedy_and_without_torchs(run):
    full = (
        "MPS backend out of memory (MPS allocated: 9.10 GiB, other allocations: 1.20 GiB, max allowed: 10.67 GiB). "
        "Tried to allocate 412.00 MiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit."
    )
    with pytest.raises(RunError) as caught:
        run(8, "mps", lambda _size: RuntimeError(full))
    told = str(caught.value)
    assert told.startswith("memory ran out while evaluating: the GPU's memory is full: torch holds 9.10 GiB")
    assert "--batch-size 1" in told and "WATERMARK" not in told


@pytest.mark.parametrize("has_text", [True, False])
def test_how_sure_a_difference_is_is_kept_with_the_figures(tmp_path, has_text):
    """The model after training is the one before, so nothing changes; without any text no difference can be told."""
    data, run_dir = BUNDLED / "data", tmp_path / "run"
    (run_dir / "final").parent.mkdir()
    (run_dir / "final").symlink_to(BUNDLED / "model")
    header, *rows = (data / "test.csv").read_text().splitlines()[:3]
    cells = [row.replace(",test/", f",{data}/test/").split(",") for row in rows]
    texts = [",".join([*row[:2], row[2] if has_text else "", row[-1]]) for row in cells]
    (tmp_path / "few.csv").write_text("\n".join([header, *texts]) + "\n")
    profile = Profile(base_model=str(BUNDLED / "model"), train=Path(), no_speech="train")
    spec = RunSpec(run_id="r", run_dir=str(run_dir), cache_dir=str(tmp_path / "a" / "cache"), profile=profile)
    told: list[dict] = []
    evaluate.evaluate_run(spec, tmp_path / "few.csv", told.append)
    after = json.loads((run_dir / "wer.json").read_text())["after"]
    assert after["before"] == after["wer"] and after["clips"] == 2
    assert after.get("wer_difference") == ([0.0, 0.0] if has_text else None)
    assert any("no test clip has a text" in event.get("what", "") for event in told) != has_text
