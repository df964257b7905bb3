"""What a worker is told (RunSpec), and what a run's folder remembers of it (run.json, shipment.json)."""

from __future__ import annotations

import json
import os
from pathlib import Path

from damage import damaged_json
from fuzzing import fuzz, outcome, same
from hypothesis import example

from distributed.hosts.sync import checked
from distributed.plan.json_fields import build, json_of
from distributed.plan.launch import Launch, Rank, load_audio, load_items
from distributed.plan.run_spec import Rendezvous, RunSpec
from distributed.ssh.host import Host
from exogym.strategy import DiLoCoConfig
from multimac.commands import resume
from multimac.view.models import origin_of
from whisper_tuner.config import Profile
from whisper_tuner.text import parse_json

PROFILE = Profile(base_model="model", train=Path("clips.csv"), lora_targets=("q_proj",))
SPEC = RunSpec(
    run_id="20251121-120000-mine",
    run_dir="runs/20251121-120000-mine",
    cache_dir=".multimac/cache",
    world_size=2,
    hosts=("mini.local", "10.0.0.2"),
    strategy_settings=DiLoCoConfig(H=5, outer_lr=0.7),
    profile=PROFILE,
    rendezvous=Rendezvous(address="10.0.0.1", key="f00d"),
)
LAUNCH = Launch(
    run_id=SPEC.run_id,
    name="mine",
    ranks=(Rank(label="mini.local", spec=SPEC), Rank(label="10.0.0.2", spec=SPEC, host=Host(address="10.0.0.2"))),
    master=Host(address="mini.local"),
)
RUN = json.loads(json_of(LAUNCH))
AUDIO = [["/data/a.wav", ".multimac/data/a.wav"], ["/data/b.wav", ".multimac/data/b.wav"]]
LISTS = {"hosts": {"10.0.0.2": AUDIO[:1]}, "audio": AUDIO}


def parsed(data: bytes) -> object:
    try:
        return parse_json(data)
    except ValueError:
        return None


@fuzz("RunSpec", damaged_json(json.loads(SPEC.to_json())))
def test_what_a_worker_is_told(data: bytes):
    told(data.decode("utf-8", "replace"))


@fuzz("RunSpec, its profile", damaged_json(json.loads(json_of(PROFILE))).map(parsed))
def test_what_a_worker_trains(data: object):
    trains(data)


@fuzz("run.json", damaged_json(RUN))
@example(data=json.dumps(RUN).replace("clips.csv", "c" * 300).encode())
def test_a_run_to_go_on_with(folder: Path, data: bytes):
    goes_on(folder, data)


@fuzz("run.json, for evaluate", damaged_json(RUN))
@example(data=b"[" * 3000)
def test_the_origin_of_a_model(folder: Path, data: bytes):
    (folder / "run.json").write_bytes(data)
    origin = outcome(origin_of, str(folder / "final"))
    if origin:
        document = parsed(data)
        told = document["ranks"][0]["spec"]["profile"]
        assert (origin.path, origin.base_model) == (folder, told["base_model"])
        assert origin.language == (told.get("language") or "") and origin.test == (document.get("test") or "")
    assert origin or data != json.dumps(RUN).encode()


@fuzz("shipment.json", damaged_json(LISTS), cost=4)
def test_the_files_of_a_resumed_run(folder: Path, data: bytes):
    shipped(folder, data)


def told(text: str) -> None:
    """What is accepted is what stands there, no value changed; and it comes back from another telling."""
    spec = outcome(RunSpec.from_json, text, names="run spec: ")
    if spec:
        assert RunSpec.from_json(spec.to_json()).to_json() == spec.to_json()
        assert holds(json.loads(spec.to_json()), parse_json(text))
    assert spec or text != SPEC.to_json()


def trains(data: object) -> None:
    profile = outcome(build, Profile, data, "run spec: profile", names="run spec: profile")
    if profile:
        assert build(Profile, json.loads(json_of(profile)), "run spec: profile") == profile
        assert holds(json.loads(json_of(profile)), data)
    whole = json.loads(json_of(PROFILE))
    assert profile or json.dumps(data) != json.dumps(whole)  # as text, where true is not 1.0


def goes_on(folder: Path, data: bytes) -> None:
    (folder / "run.json").write_bytes(data)
    launch = outcome(Launch.load, folder, names=folder / "run.json")
    if launch:
        assert holds(json.loads(json_of(launch)), parse_json(data))
        launch.save(folder)
        assert Launch.load(folder) == launch
        outcome(resume._check, folder, launch, "")
    assert launch or data != json.dumps(RUN).encode()


def shipped(folder: Path, data: bytes) -> None:
    """Every file that is listed, under the name that is listed, and none outside the project folder."""
    (folder / "shipment.json").write_bytes(data)
    document = parsed(data)
    audio = outcome(load_audio, folder, names=folder / "shipment.json")
    hosts = outcome(load_items, folder, names=folder / "shipment.json")
    assert (audio is None) == (hosts is None)
    if audio is None:
        assert data != json.dumps(LISTS).encode()
        return
    assert {name: str(item.local) for name, item in audio.items()} == {
        remote: str(Path(local)) for local, remote in document["audio"]
    }
    for host, items in hosts.items():
        assert [[str(item.local), item.remote] for item in items] == [
            [str(Path(local)), remote] for local, remote in document["hosts"][host]
        ]
        for item in outcome(checked, items) or ():
            assert Path(os.path.normpath(folder / item.remote)).is_relative_to(folder)


def holds(whole: object, part: object) -> bool:
    """Whether a document says all that another does; it may say more where that leaves out what has a default."""
    if isinstance(whole, dict) and isinstance(part, dict):
        return all(key in whole and holds(whole[key], value) for key, value in part.items())
    if isinstance(whole, list) and isinstance(part, list):
        return len(whole) == len(part) and all(map(holds, whole, part))
    number = type(whole) is float and type(part) is int  # 1 for 1.0
    return same(whole, float(part) if number else part)


def test_a_spec_of_brackets():
    told("[" * 3000)


def test_a_learning_rate_of_400_digits():
    trains(json.loads(json_of(PROFILE)) | {"learning_rate": 10**400})


def test_a_run_of_brackets(folder: Path):
    goes_on(folder, b"[" * 3000)


def test_a_run_with_a_timeout_of_400_digits(folder: Path):
    goes_on(folder, json.dumps(RUN | {"timeout_s": 10**400}).encode())


def test_a_run_without_ranks(folder: Path):
    goes_on(folder, json.dumps(RUN | {"ranks": []}).encode())


def test_a_shipment_of_brackets(folder: Path):
    shipped(folder, b"[" * 3000)


def test_a_shipment_with_a_number_for_a_name(folder: Path):
    shipped(folder, b'{"hosts": {"10.0.0.2": [["/data/a.wav", 7]]}, "audio": []}')
