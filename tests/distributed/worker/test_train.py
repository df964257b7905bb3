import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from distributed.plan.run_spec import CHECKPOINTS, Rendezvous, RunSpec
from distributed.worker.load import load_whisper
from distributed.worker.train import keep_spec
from exogym.strategy import strategy_config
from whisper_tuner.config import Profile
from whisper_tuner.data import feature_store
from whisper_tuner.data.audio import load_audio
from whisper_tuner.data.dataset import load_manifest, write_manifest
from whisper_tuner.model.layers import SplitLinear

BUNDLED = Path(__file__).parents[3] / "bundled"


def spec_of(folder: Path, **settings) -> RunSpec:
    data = {"train": BUNDLED / "data" / "train.csv"} | settings
    profile = Profile(base_model=str(BUNDLED / "model"), device="cpu", num_threads=1, **data)
    about = {"run_id": "r", "run_dir": str(folder), "cache_dir": str(folder / "cache")}
    return RunSpec(**about, profile=profile, strategy_settings=strategy_config("diloco", {}))


@pytest.fixture
def decoded(monkeypatch) -> list[Path]:
    found = []
    monkeypatch.setattr(feature_store, "load_audio", lambda path, *rest: found.append(path) or load_audio(path, *rest))
    return found


@pytest.mark.parametrize(("most", "kind"), [(None, nn.Linear), (500, SplitLinear)])
def test_a_device_that_sums_over_few_terms_is_given_layers_and_batches_that_fit(tmp_path, monkeypatch, most, kind):
    """The bundled model writes 809 tokens, and hears 4 s: 200 positions a clip."""
    monkeypatch.setattr("exogym.device.most_terms", lambda device: most)
    work = load_whisper(spec_of(tmp_path, audio_context="cropped"), lambda event: None, ())
    assert type(work.model.model.proj_out) is kind
    batches = work.train.samples
    assert batches.at_once(*batches.longest()) == (2 if most else 7)  # 1,500 positions at once on a CPU
    mixed = load_whisper(spec_of(tmp_path), lambda event: None, ()).train.samples
    assert mixed.longest()[0] == 3000 and mixed.at_once(*mixed.longest()) == 1


def test_a_worker_computes_its_log_mels_while_it_loads(tmp_path, decoded):
    events = []
    work = load_whisper(spec_of(tmp_path, validation=BUNDLED / "data" / "validation.csv"), events.append, ())
    clips = len(work.train.samples) + len(work.validation.samples)
    assert len(decoded) == clips
    told = [event for event in events if event["type"] == "preparing"]
    assert {event["total"] for event in told if event["done"] == event["total"]} == {
        len(work.train.samples),
        len(work.validation.samples),
    }
    for sampler in (work.train, work.validation):
        assert sum(len(batch["ids"]) for batches in sampler.epoch(0) for batch in batches) == len(sampler.samples)
    assert len(decoded) == clips


def test_a_short_run_prepares_what_it_trains(tmp_path, decoded):
    load_whisper(spec_of(tmp_path, max_steps=2, batch_size=3), lambda event: None, ())
    assert len(decoded) == 6


def test_a_worker_prepares_its_own_clips_that_are_here(tmp_path, decoded):
    clips = load_manifest(BUNDLED / "data" / "train.csv", max_duration_s=30).samples
    gone = [replace(clip, audio=tmp_path / clip.audio.name) for clip in clips[::2]]
    write_manifest(tmp_path / "train.csv", [*gone, *clips[1::2]])
    prepared = []
    for rank in (0, 1):
        decoded.clear()
        spec = replace(spec_of(tmp_path, train=tmp_path / "train.csv"), rank=rank, world_size=2, hosts=("ada", "bob"))
        load_whisper(spec, lambda event: None, ())
        assert decoded
        prepared += [path for path in decoded if path.exists()]
    assert sorted(prepared) == sorted(clip.audio for clip in clips[1::2])


def test_a_worker_that_is_asked_to_stop_prepares_no_more(tmp_path, decoded, monkeypatch):
    load = feature_store.load_audio
    # Each takes long enough for a busy machine to hear of the stop meanwhile.
    monkeypatch.setattr(feature_store, "load_audio", lambda *args: time.sleep(0.5) or load(*args))
    load_whisper(spec_of(tmp_path), lambda event: None, (), stopped=lambda: True)
    assert len(decoded) <= 2


def test_the_runs_key_is_in_no_file(tmp_path):
    place = Rendezvous(address="10.0.0.1", key="f00d" * 16)
    settings = strategy_config("diloco", {})
    profile = Profile(base_model="m", train=Path("train.csv"))
    spec = RunSpec(run_id="r", run_dir=str(tmp_path), cache_dir="c", profile=profile, strategy_settings=settings)
    keep_spec(replace(spec, rendezvous=place))
    (kept,) = (tmp_path / CHECKPOINTS).iterdir()
    assert RunSpec.from_json(kept.read_text()) == spec
