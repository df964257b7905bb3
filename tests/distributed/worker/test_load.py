"""What a rank loads: a profile's model and clips, a user's own model, and clips that come later from the launcher."""

from __future__ import annotations

import hashlib
import json
import pickle
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distributed.plan.run_spec import CHECKPOINTS, Bundle, Rendezvous, RunSpec
from distributed.worker import load
from distributed.worker.load import AudioPull, load_bundle, load_whisper
from distributed.worker.train import keep_spec
from exogym.settings import FitSettings
from exogym.strategy import DiLoCoStrategy, strategy_config
from exogym.train_node import TrainResult
from whisper_tuner.config import Profile
from whisper_tuner.data import feature_store
from whisper_tuner.data.audio import load_audio
from whisper_tuner.data.dataset import Sample, load_manifest, write_manifest
from whisper_tuner.errors import RunError
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
    slow = feature_store.load_audio
    # Each takes long enough for a busy machine to hear of the stop meanwhile.
    monkeypatch.setattr(feature_store, "load_audio", lambda *args: time.sleep(0.5) or slow(*args))
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


# a user's own model


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


# audio that this host lacks


@pytest.fixture
def said(monkeypatch, tmp_path) -> list[dict]:
    for name, value in {"POLL_S": 0.01, "LOOK_S": 0.1, "LONGEST_S": 1.0}.items():
        monkeypatch.setattr(load, name, value)
    monkeypatch.chdir(tmp_path)
    return []


@pytest.fixture
def unsent() -> set[str]:
    return set()


@pytest.fixture
def pull(said, unsent) -> AudioPull:
    return AudioPull(said.append, unsent)


def clips(*names: str) -> list[Sample]:
    return [Sample(id=name, audio=Path(name).absolute(), text="x", duration_s=1.0, line=1) for name in names]


def waited(pull: AudioPull, clip: Sample) -> float:
    began = time.monotonic()
    pull.wait(clip)
    return time.monotonic() - began


def test_what_is_not_there_is_asked_for_once_and_in_order(pull, said):
    Path("a.wav").touch()
    pull.order(clips("c.wav", "a.wav", "b.wav"))
    pull.order(clips("b.wav", "d.wav", "c.wav"))
    assert said == [{"type": "want", "files": ["c.wav", "b.wav"]}, {"type": "want", "files": ["d.wav"]}]


def test_nobody_waits_for_a_clip_that_is_there_or_was_not_asked_for_or_will_not_come(pull, unsent):
    Path("a.wav").touch()
    [*known, never] = clips("a.wav", "other.wav", "b.wav")
    pull.order([known[0], never])
    unsent.add("b.wav")
    assert sum(waited(pull, clip) for clip in (*known, never)) < 0.5


def test_whoever_waits_says_that_it_is_alive(pull, said):
    [clip] = clips("a.wav")
    pull.order([clip])
    threading.Timer(0.35, clip.audio.touch).start()
    assert waited(pull, clip) > 0.3
    assert len(said) > 2 and said[1:] == [{"type": "alive"}] * (len(said) - 1)


def test_a_slow_link_is_waited_for_as_long_as_anything_arrives(pull):
    [*others, last] = clips("a.wav", "b.wav", "c.wav")
    pull.order([*others, last])
    for when, clip in ((0.6, others[0]), (1.2, others[1]), (1.8, last)):
        threading.Timer(when, clip.audio.touch).start()
    pull.wait(last)
    assert last.audio.exists()


def test_nobody_waits_for_ever(pull):
    [clip] = clips("a.wav")
    pull.order([clip])
    assert 1 < waited(pull, clip) < 3
