import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.plan.json_fields import build, json_of
from distributed.plan.run_spec import Bundle, Rendezvous, RunSpec
from exogym.strategy import AllReduceConfig, DeMoConfig, DiLoCoConfig, OptimSpec
from whisper_tuner.config import Profile
from whisper_tuner.errors import ConfigError

PROFILE = Profile(base_model="m", train=Path("train.csv"), lora_targets=("q_proj",))
SPEC = RunSpec(
    run_id="r",
    run_dir="runs/r",
    cache_dir="c",
    rank=1,
    world_size=2,
    hosts=("a", "b"),
    profile=PROFILE,
    strategy_settings=DiLoCoConfig(H=5, lr=1e-4, outer_momentum=0.9),
    rendezvous=Rendezvous(address="10.0.0.1", key="f00d"),
)


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        dataclasses.replace(SPEC, strategy="allreduce", strategy_settings=AllReduceConfig(check_interval=3)),
        dataclasses.replace(SPEC, strategy="demo", strategy_settings=DeMoConfig(compression_topk=8)),
        RunSpec(run_id="r", run_dir=".", cache_dir=".", bundle=Bundle(path="p", sha256="s")),
    ],
    ids=["diloco", "allreduce", "demo", "own model"],
)
def test_a_spec_survives_the_journey(spec):
    assert RunSpec.from_json(spec.to_json()) == spec
    assert "f00d" not in repr(spec)  # the run's key is no part of what an error or a log may show


def test_only_names_travel():
    """An optimizer as an object is a user's own, and goes with their model."""
    spec = dataclasses.replace(SPEC, strategy_settings=DiLoCoConfig(outer_optim=OptimSpec(name="sgd", lr=1.0)))
    with pytest.raises(ConfigError, match="outer_optim: expected str, found dict"):
        RunSpec.from_json(spec.to_json())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": "1"}, "rank: expected int, found str"),
        ({"rank": True}, "rank: expected int, found bool"),
        ({"resume": 1}, "resume: expected bool, found int"),
        ({"hosts": "ab"}, "hosts: expected list, found str"),
        ({"hosts": ["a", 2]}, r"hosts\[1\]: expected str, found int"),
        ({"rendezvous": {"address": "10.0.0.1"}}, "rendezvous: no 'key'"),
        ({"shell": "rm"}, "unknown key 'shell'"),
        ({"run_id": None}, "run_id: expected str, found NoneType"),
        ({"machine_workers": 0}, "machine_workers = 0"),
        ({"profile": None}, "no 'profile', and no 'bundle'"),
        ({"strategy_settings": None}, "no 'strategy_settings', and no 'bundle'"),
        ({"strategy": "dilco"}, "unknown strategy 'dilco'"),
        ({"strategy": ["diloco"]}, "unknown strategy"),
        ({"strategy": "allreduce"}, "strategy_settings: unknown key 'H'"),
    ],
)
def test_a_wrong_spec_is_refused_by_key(change, words):
    data = json.loads(SPEC.to_json()) | change
    with pytest.raises(ConfigError, match=f"run spec: .*{words}"):
        RunSpec.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("H", 0, "H must be at least 1"),
        ("lr", 10**400, "lr: a number of 401 digits"),
        ("outer_optim", "adam", "outer_optim = adam needs outer_lr"),
        ("momentum", 1, "unknown key 'momentum'"),
    ],
)
def test_wrong_settings_of_a_strategy_are_refused_by_key(key, value, words):
    data = json.loads(SPEC.to_json())
    data["strategy_settings"][key] = value
    with pytest.raises(ConfigError, match=f"run spec: strategy_settings: {words}"):
        RunSpec.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", '{"run_id": 1}'])
def test_what_is_no_spec_is_refused(text):
    with pytest.raises(ConfigError, match="run spec"):
        RunSpec.from_json(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epochs": 0}, "epochs = 0: expected a number at least 1"),
        ({"learning_rate": 1}, ""),
        ({"learning_rate": True}, "learning_rate: expected float, found bool"),
        ({"train": ""}, "train: an empty path"),
        ({"epoch": 3}, "unknown key 'epoch'"),
    ],
)
def test_a_profile_is_as_strict_as_in_config_ini(change, words):
    data = json.loads(json_of(PROFILE)) | change
    if not words:
        assert build(Profile, data, "profile").learning_rate == 1.0
        return
    with pytest.raises(ConfigError, match=f"profile: {words}"):
        build(Profile, data, "profile")


def test_a_spec_is_read_before_torch_is_there():
    read = "import sys; from distributed.plan.run_spec import RunSpec; RunSpec.from_json(sys.argv[1])"
    watch = f"{read}; print({{'torch', 'numpy', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", watch, SPEC.to_json()], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_every_profile_field_has_a_help_text():
    assert all(field.metadata["help"] for field in dataclasses.fields(Profile))
