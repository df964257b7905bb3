"""A run with every option that changes clips from epoch to epoch: it goes on bit for bit, and saves a plain model."""

import csv
import dataclasses
import shutil
from pathlib import Path

import pytest
import soundfile
import torch
from small_run import PROJECT, folder  # noqa: F401
from transformers import WhisperForConditionalGeneration

from distributed.plan.run_spec import RunSpec
from distributed.worker.load import load_whisper
from exogym import AllReduceStrategy, LocalTrainer
from exogym.errors import CheckpointError
from exogym.strategy import strategy_config
from whisper_tuner.config import Profile
from whisper_tuner.data.labels import TIMESTAMPS

BUNDLED = PROJECT / "bundled" / "model"
ALL_ON = {
    "no_speech": "train",
    "timestamps_share": 0.5,
    "previous_text_share": 0.5,
    "speed_perturbation": 0.1,
    "mask_time_prob": 0.1,
    "mask_feature_prob": 0.1,
    "label_smoothing": 0.1,
    "dropout": 0.1,
}


@pytest.fixture
def model(tmp_path) -> Path:
    """The bundled model, with timestamps."""
    path = shutil.copytree(BUNDLED, tmp_path / "model")
    whisper = WhisperForConditionalGeneration.from_pretrained(path)
    torch.manual_seed(0)
    whisper.resize_token_embeddings(whisper.config.vocab_size + TIMESTAMPS)
    whisper.save_pretrained(path)
    return path


@pytest.fixture
def profile(folder, model):  # noqa: F811
    """One of two clips more has no text, and is short."""
    with (folder / "train.csv").open("a", newline="", encoding="utf-8") as file:
        for name, seconds in (("silence", 1.0), ("click", 0.1)):
            soundfile.write(folder / f"{name}.wav", torch.zeros(int(16_000 * seconds)).numpy(), 16_000)
            csv.writer(file).writerow([name, f"{name}.wav", "" if name == "silence" else "click", seconds])
    lists = {kind: folder / f"{kind}.csv" for kind in ("train", "validation")}
    return Profile(base_model=str(model), batch_size=3, seed=5, device="cpu", num_threads=1, **lists, **ALL_ON)


def work_of(profile: Profile, tmp_path: Path):
    about = {"run_id": "r", "run_dir": str(tmp_path), "cache_dir": str(tmp_path / "cache"), "hosts": ("rank0",)}
    spec = RunSpec(**about, profile=profile, strategy="allreduce", strategy_settings=strategy_config("allreduce", {}))
    return load_whisper(spec, lambda event: None, ())


def fit(work, **more) -> LocalTrainer:
    trainer = LocalTrainer(work.model, work.train, work.validation)
    trainer.fit(AllReduceStrategy(lr=1e-4), num_epochs=3, device="cpu", **more)
    return trainer


@pytest.mark.slow
def test_a_run_with_every_option_goes_on_bit_for_bit(profile, tmp_path):
    whole = fit(work_of(profile, tmp_path))
    kept, steps = str(tmp_path / "kept"), []
    stopped = fit(work_of(profile, tmp_path), save_dir=kept, logger=steps.append, should_stop=lambda: len(steps) > 12)
    assert stopped.result.stopped and 5 < stopped.result.steps < whole.result.steps
    torch.manual_seed(123)
    resumed = fit(work_of(profile, tmp_path), save_dir=kept, resume=True)
    assert resumed.result.digest == whole.result.digest and resumed.result.val_loss == whole.result.val_loss


def test_the_epoch_reaches_the_clips(profile, tmp_path):
    def clips(epoch, data):
        """Return all that is learnt in an epoch, whatever the order of its clips."""
        return sorted(token for step in data.epoch(epoch) for batch in step for token in batch["labels"].tolist())

    work = work_of(dataclasses.replace(profile, batch_size=14), tmp_path)
    assert clips(0, work.train) == clips(0, work.train) != clips(1, work.train)
    assert clips(0, work.validation) == clips(1, work.validation)


@pytest.mark.slow
def test_what_decides_about_clips_is_checked_on_resume(profile, tmp_path):
    kept = str(tmp_path / "kept")
    fit(work_of(profile, tmp_path), save_dir=kept, checkpoint_interval=2)
    marked = {field.name for field in dataclasses.fields(Profile) if field.metadata["changes_plan"]}
    assert ALL_ON.keys() - {"label_smoothing", "dropout", "no_speech"} <= marked
    changed = work_of(dataclasses.replace(profile, speed_perturbation=0.2), tmp_path)
    with pytest.raises(CheckpointError, match="speed_perturbation"):
        fit(changed, save_dir=kept, resume=True)


def test_the_trained_model_knows_nothing_of_the_options_but_that_it_may_write_nothing(profile, tmp_path):
    base = WhisperForConditionalGeneration.from_pretrained(profile.base_model)
    work = work_of(profile, tmp_path)
    work.save(tmp_path / "final", None)
    saved = WhisperForConditionalGeneration.from_pretrained(tmp_path / "final")
    was, now = base.config.to_dict(), saved.config.to_dict()
    assert {key for key in was if was[key] != now[key]} <= {"activation_dropout", "_name_or_path"}
    assert saved.config.apply_spec_augment is False
    assert base.generation_config.begin_suppress_tokens == [base.config.eos_token_id]
    assert saved.generation_config.begin_suppress_tokens is None
