import dataclasses
import json
from pathlib import Path

import pytest

from distributed.plan.run_spec import Rendezvous, RunSpec, profile_from_json, profile_to_json
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
    profile=profile_to_json(PROFILE),
    rendezvous=Rendezvous(address="10.0.0.1", port=4000, prefix="p"),
)


def test_a_spec_survives_the_journey():
    arrived = RunSpec.from_json(SPEC.to_json())
    assert arrived == SPEC
    assert profile_from_json(arrived.profile) == PROFILE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": "1"}, "rank: expected int, found str"),
        ({"rank": True}, "rank: expected int, found bool"),
        ({"hosts": "ab"}, "hosts"),
        ({"rendezvous": {"address": "10.0.0.1", "port": 1}}, "no 'prefix'"),
        ({"shell": "rm"}, "unknown key 'shell'"),
        ({"run_id": None}, "run_id: expected str, found NoneType"),
    ],
)
def test_a_wrong_spec_is_refused_by_key(change, words):
    data = json.loads(SPEC.to_json()) | change
    with pytest.raises(ConfigError, match=words):
        RunSpec.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"run_id": 1}'])
def test_what_is_no_spec_is_refused(text):
    with pytest.raises(ConfigError, match="run spec"):
        RunSpec.from_json(text)


def test_values_out_of_range_are_refused_as_in_config_ini():
    with pytest.raises(ConfigError, match="epochs"):
        profile_from_json(profile_to_json(PROFILE) | {"epochs": 0})


def test_every_profile_field_has_a_help_text():
    assert all(field.metadata["help"] for field in dataclasses.fields(Profile))
