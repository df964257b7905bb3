"""Whisper in two stages, each a process of this machine: the run is as on one rank, and a lost stage ends it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from small_run import PROJECT, end_runs
from waiting import wait_until

from distributed.run_dir.folder import launcher_pid
from distributed.run_dir.log import read_events
from multimac.commands.resume import resume_run
from multimac.commands.train import train_here
from whisper_tuner.errors import ConfigError, ExitStatus
from whisper_tuner.export.final import load_model

SECTION = f"""
[profile:split]
base_model = {PROJECT}/bundled/model
train = train.csv
validation = validation.csv
batch_size = 4
device = cpu
num_threads = 1
checkpoint_interval = 2
epochs = 3

[distributed:alone]
base_profile = split
strategy = allreduce

[distributed:pipeline]
base_profile = split
strategy = pipeline
wire = float32
"""


@pytest.fixture
def config(folder):
    path = folder / "config.ini"
    path.write_text(path.read_text() + SECTION)
    yield path
    end_runs(folder)


def events_of(run: Path, kind: str) -> list[dict]:
    return [event for event in read_events(run / "events.jsonl")[0] if event["type"] == kind]


def losses(run: Path) -> list[float]:
    return [event["loss"] for kind in ("step", "validation") for event in events_of(run, kind) if event["rank"] == 0]


def train(config: Path, name: str, *settings: str, **how) -> Path:
    """Return the run's folder."""
    before = {*config.parent.glob("runs/*")}
    assert train_here(config, name, settings=settings, **how) == ExitStatus.OK
    [run] = {*config.parent.glob("runs/*")} - before
    return run


def weights(run: Path) -> dict[str, torch.Tensor]:
    [file] = [*run.glob("final/model.safetensors"), *run.glob("final/adapter_model.safetensors")]
    return load_file(file)


@pytest.mark.parametrize(
    "settings",
    [
        ["method=full"],
        pytest.param(["method=lora", "lora_dropout=0", "frozen_precision=bf16"], marks=pytest.mark.slow),
        pytest.param(["method=lora", "lora_dropout=0", "gradient_checkpointing=true"], marks=pytest.mark.slow),
    ],
    ids=lambda settings: "-".join(settings),
)
def test_two_stages_train_what_one_rank_does(config, settings, capsys):
    settings = [*settings, "max_grad_norm=0.5", "dropout=0"]
    one, two = train(config, "alone", *settings), train(config, "pipeline", *settings)
    said = capsys.readouterr().out
    assert "the encoder is on rank0, the decoder on rank1; if one of them is lost the run ends" in said
    clips = len((config.parent / "train.csv").read_text().splitlines()) - 1
    assert said.count(f"\n{clips} clips, ") == 2
    assert len(losses(one)) == 12 and losses(two) == pytest.approx(losses(one), abs=1e-4)
    expected, found = weights(one), weights(two)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-4)
    model, _ = load_model(two / "final")
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in load_model(one / "final")[0].parameters()
    )
    trainable = [event["trainable"] for event in events_of(two, "start")]
    assert sum(trainable) == events_of(one, "start")[0]["trainable"] and all(trainable)


@pytest.mark.slow
def test_a_lost_stage_ends_the_run_and_it_goes_on_from_a_checkpoint(config, capfd):
    settings = ["method=full", "dropout=0", "epochs=12"]
    whole = train(config, "pipeline", *settings)
    run = train(config, "pipeline", *settings, detach=True)
    wait_until(lambda: len(events_of(run, "checkpoint")) >= 4, 120)
    [pid] = [event["pid"] for event in events_of(run, "hello") if event["rank"] == 1]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: launcher_pid(run) is None, 60)
    [end] = events_of(run, "end")
    assert end["status"] == ExitStatus.RUN and "a pipeline ends with any of its stages" in end["message"]
    assert f"Go on with: multimac finetune --resume {run}" in end["message"]
    assert not any(run.name in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))
    assert resume_run(config, str(run)) == ExitStatus.OK
    expected, found = weights(whole), weights(run)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["method=decoder"], "is for training both halves"),
        (["method=lora", "lora_part=decoder"], "is for training both halves"),
        (["yield_when=battery"], "yield_when lets one leave"),
    ],
)
def test_what_does_not_go_with_stages_is_said_before(config, settings, message):
    with pytest.raises(ConfigError, match=message):
        train_here(config, "pipeline", settings=settings)
    assert not [*config.parent.glob("runs/*")]


def test_it_needs_two_hosts(config):
    with pytest.raises(ConfigError, match="it needs 2 hosts, not 3"):
        train_here(config, "pipeline", ranks=3)
