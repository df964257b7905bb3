"""config.ini: its sections, and what `config show` prints of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from damage import damaged
from fuzzing import command, fuzz, outcome
from hypothesis import example

from distributed.plan.job import Job, resolve
from distributed.plan.json_fields import build, json_of
from distributed.run_dir.find import run_dirs
from whisper_tuner.config import ConfigFile, Profile
from whisper_tuner.data.dataset import load_manifest

CONFIG = b"""\
[DEFAULT]
seed = 7

[model:small]  # the quick one
base_model = model
learning_rate = 1e-4

[dataset:mine]
train = clips.csv
validation = more.csv

[profile:mine]
model = small
dataset = mine
method = lora
lora_targets = q_proj v_proj
runs_dir = ~/runs
warmup_ratio = 0.1

[distributed:both]
base_profile = mine
strategy = diloco
communication_interval = 5
outer_lr = 0.7
nesterov = no
hosts_config = hosts.json
"""
LITTLE = b"[profile:mine]\nbase_model = model\ntrain = clips.csv\n"


@pytest.fixture(scope="module")
def config(folder: Path) -> Path:
    (folder / "model").mkdir()
    return folder / "config.ini"


def jobs(file: Path) -> list[Job]:
    config = ConfigFile(file)
    return [resolve(config, name) for name in config.names("distributed") + config.names("profile")]


@fuzz("config.ini", damaged(CONFIG))
@example(data=CONFIG)
@example(data=LITTLE + "language = \u2028\nbatchsize = 8\n".encode())
@example(data=LITTLE + "language = \u2028\nepochs\n".encode())
@example(data=LITTLE.replace(b"model", b"m" * 300))
@example(data=LITTLE.replace(b"clips", b"c" * 300))
@example(data=LITTLE + b"runs_dir = " + b"r" * 300)
@example(data=LITTLE + b"runs_dir = \0")
@example(data=LITTLE + b"seed = " + b"9" * 400)
@example(data=LITTLE + b"weight_decay = 1e999")
def test_jobs(config: Path, data: bytes):
    """What is resolved is resolved so again, travels to a worker and back, and was said somewhere."""
    config.write_bytes(data)
    found = outcome(jobs, config, names="config.ini", of=data) or []
    assert found == [] or jobs(config) == found
    for job in found:
        assert build(Profile, json.loads(json_of(job.profile)), "profile") == job.profile
        assert {origin.partition(":")[0] for origin in job.origin.values()} <= {"config.ini"}
        if data == CONFIG:
            assert (job.profile.seed, job.profile.method, job.profile.learning_rate) == (7, "lora", 1e-4)
            assert job.profile.lora_targets == ("q_proj", "v_proj") and job.profile.warmup_ratio == 0.1
        assert job.strategy_config(total_steps=1000)
        assert all(abs(value) < 2**63 for value in vars(job.profile).values() if isinstance(value, int | float))
        outcome(load_manifest, job.profile.train, names=job.profile.train)
        outcome(run_dirs, [job.profile.runs_dir], names=job.profile.runs_dir)


@fuzz("config.ini, shown", damaged(CONFIG), cost=20)
@example(data=CONFIG.replace(b"= mine", b"= [/b]").replace(b":mine", b":[/b]"))
@example(data=CONFIG + b"device = [/red]\n")
@example(data=CONFIG.replace(b"method = lora", b"language = [/red]"))
def test_shown(config: Path, data: bytes):
    """What can be resolved is shown with its values; what cannot is refused, and nothing else happens."""
    config.write_bytes(data)
    found = outcome(lambda: ConfigFile(config), names="config.ini", of=data)
    job = found and outcome(lambda: resolve(found, "both"), names="config.ini", of=data)
    status, said = command("config", "show", "both", "--config", str(config))
    assert status == (0 if job else 3)
    if job:
        words = " ".join(said.split())
        assert str(job.profile.batch_size) in words and job.profile.method in words
    status, said = command("config", "show", "--config", str(config))
    assert (status, bool(said)) == (0, True) or status == 3
