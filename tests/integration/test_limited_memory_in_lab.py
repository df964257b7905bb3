"""Two hosts train what neither has the memory for alone: as a pipeline, or with the optimizer's moments divided."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_whisper import write_whisper
from transformers import WhisperConfig, WhisperForConditionalGeneration
from waiting import wait_until

from distributed.plan.automatic import more_bytes
from distributed.run_dir.summary import read_run
from exogym.strategy import PipelineConfig
from whisper_tuner.config import Profile
from whisper_tuner.export.final import load_model
from whisper_tuner.model.memory import PARTS, profile_memory

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(1500)]
PROJECT = Path(__file__).parents[2]
LIMIT = 2_900_000_000
TEXT = """
[profile:deep]
base_model = {model}
train = {project}/bundled/data/train.csv
validation =
test =
max_steps = {steps}
batch_size = 4
learning_rate = 1e-4
dropout = 0
method = full
language = en
audio_context = cropped
num_threads = 1
device = cpu
seed = 3
checkpoint_interval = 2
[distributed:d]
base_profile = deep
{strategy}
"""
PIPELINE = "strategy = pipeline\nwire = float32"
ALL_REDUCE = "strategy = allreduce\nshares = fixed"


@pytest.fixture(scope="module")
def lab():
    """Hosts whose sshd is in a group with a limit, and so all that it starts."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("the lab needs Linux and root")
    from lab import Lab

    with Lab(hosts=2, rate=None, shared_home=True, memory=10**12) as lab:
        yield lab


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> Path:
    """A model of 100 million weights, half of them in each part."""
    folder = tmp_path_factory.mktemp("deep")
    write_whisper(folder, multilingual=True, seconds=30)
    config = WhisperConfig.from_pretrained(folder)
    config.update({"d_model": 768, "init_std": 0.02, "encoder_layers": 7, "decoder_layers": 5})
    config.update({f"{part}_{name}": value for part in PARTS for name, value in SIZES.items()})
    model = WhisperForConditionalGeneration(config)
    model.generation_config = model.generation_config.from_pretrained(folder)
    model.save_pretrained(folder)
    return folder


SIZES = {"ffn_dim": 3072, "attention_heads": 12}


def losses(runner) -> list[float]:
    """Return the mean loss of each step, over the tokens of all ranks that had some."""
    steps: dict[int, list[dict]] = {}
    for event in runner.events("step"):
        steps.setdefault(event["step"], []).append(event)
    return [
        sum((e["loss"] or 0) * e["tokens"] for e in each) / sum(e["tokens"] for e in each) for each in steps.values()
    ]


def finetune(runner) -> list[str]:
    return [sys.executable, "cli_typer.py", "finetune", "deep", "--config", str(runner.folder / "config.ini")]


def runs_out_of_memory(runner) -> None:
    """The launcher would try again for as long as steps count in between."""
    process = runner.lab.popen("h1", finetune(runner), cwd=str(PROJECT))
    wait_until(lambda: any("ran out of memory" in lost["reason"] for lost in runner.events("lost")), 240)
    runner.lab.kill("h1", "distributed.launcher.main")
    process.communicate(timeout=60)
    runner.wait_until_nothing_is_left(60)


def weights(runner) -> dict[str, torch.Tensor]:
    return load_file(runner.run_dir / "final" / "model.safetensors")


def test_a_pipeline_trains_what_neither_host_can_alone_and_goes_on_after_a_loss(lab, runner_in, deep, tmp_path):
    text = TEXT.format(model=deep, project=PROJECT, steps=4, strategy=PIPELINE)
    alone, limited, together, broken = runners = [
        runner_in(tmp_path / name) for name in ("alone", "limited", "together", "broken")
    ]
    for runner in runners:
        runner.folder.mkdir()
        runner.config(text)
    done = lab.exec("h1", finetune(alone), cwd=str(PROJECT), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    try:
        for host in ("h1", "h2"):
            lab.set_memory(host, LIMIT)
        runs_out_of_memory(limited)
        said = together.run("d", "h2", text=text).stdout
        process = broken.start("d", "h2", text=text)
        wait_until(lambda: len(broken.events("checkpoint")) >= 2, 120)
        lab.kill("h2", "distributed.worker.main")
        told = "".join(process.communicate(timeout=120))
        assert process.returncode and "a pipeline ends with any of its stages" in told and "--resume" in told
        broken.wait_until_nothing_is_left(60)
        resumed = broken.resume()
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    finally:
        for host in ("h1", "h2"):
            lab.set_memory(host, 10**12)
    assert f"the decoder on {lab['h2'].address}; if one of them is lost the run ends" in said
    assert losses(together) == pytest.approx(losses(alone), rel=1e-4) and len(losses(alone)) == 4
    assert read_run(together.run_dir).state == read_run(broken.run_dir).state == "finished"
    expected, found, again = (weights(runner) for runner in (alone, together, broken))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-4)
        assert torch.equal(again[name], found[name])
    load_model(together.run_dir / "final")
    profile = Profile(
        base_model=str(deep), train=Path("x"), method="full", language="en", audio_context="cropped", batch_size=4
    )
    for rank, part in enumerate(PARTS):
        held = max(event["memory"] for event in together.events("step") if event["rank"] == rank)
        [trial] = [event for event in together.events("memory") if event["rank"] == rank]
        more = more_bytes(PipelineConfig(), 2)
        forecast = profile_memory(profile, longest_s=trial["clip_s"], more_bytes=more, part=part)
        print(
            f"{part}: forecast {forecast / 1e9:.2f} GB, after steps {held / 1e9:.2f}, trial {trial['needed'] / 1e9:.2f}"
        )


def test_divided_moments_train_what_neither_host_can_with_all_of_them(lab, runner_in, deep, tmp_path):
    whole, limited, divided = runners = [runner_in(tmp_path / name) for name in ("whole", "limited", "divided")]
    for runner in runners:
        runner.folder.mkdir()
        runner.config(TEXT.format(model=deep, project=PROJECT, steps=4, strategy=ALL_REDUCE))
    whole.run("d", "h2", text=TEXT.format(model=deep, project=PROJECT, steps=4, strategy=ALL_REDUCE))
    try:
        for host in ("h1", "h2"):
            lab.set_memory(host, LIMIT)
        runs_out_of_memory(limited)
        strategy = f"{ALL_REDUCE}\nshard_optimizer = true"
        divided.run("d", "h2", text=TEXT.format(model=deep, project=PROJECT, steps=4, strategy=strategy))
    finally:
        for host in ("h1", "h2"):
            lab.set_memory(host, 10**12)
    assert losses(divided) == pytest.approx(losses(whole), rel=1e-6) and len(losses(whole)) == 4
    expected, found = weights(whole), weights(divided)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    print("most bytes:", {event["host"]: event["memory"] for event in divided.events("step")})
