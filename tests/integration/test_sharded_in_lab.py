"""Two hosts train together, with the optimizer's moments divided, what neither has the memory for alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from small_whisper import write_whisper
from transformers import WhisperConfig, WhisperForConditionalGeneration
from waiting import wait_until

from distributed.run_dir.summary import read_run

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(1200)]
PROJECT = Path(__file__).parents[2]
LIMIT = 2_400_000_000  # bytes of a host; alone a worker comes to 2.3 GB, beside the launcher and the command
TEXT = """
[profile:wide]
base_model = {model}
train = {project}/bundled/data/train.csv
validation =
test =
max_steps = 4
language = fr
batch_size = 4
learning_rate = 1e-4
dropout = 0
audio_context = cropped
num_threads = 1
device = cpu
seed = 3
checkpoint_interval = 2
[distributed:d]
base_profile = wide
strategy = allreduce
shard_optimizer = true
shares = fixed
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A model that is mostly embeddings: 62 million weights, which take little time."""
    folder = tmp_path_factory.mktemp("wide")
    write_whisper(folder, multilingual=True, seconds=30)
    config = WhisperConfig.from_pretrained(folder)
    config.d_model, config.vocab_size, config.init_std = 512, 120_000, 0.02
    model = WhisperForConditionalGeneration(config)
    model.generation_config = model.generation_config.from_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def losses(runner) -> list[float]:
    """The mean loss of each step, over the tokens of all ranks."""
    steps: dict[int, list[dict]] = {}
    for event in runner.events("step"):
        steps.setdefault(event["step"], []).append(event)
    return [sum(e["loss"] * e["tokens"] for e in each) / sum(e["tokens"] for e in each) for each in steps.values()]


def finetune(runner):
    command = [sys.executable, "cli_typer.py", "finetune", "wide", "--config", str(runner.folder / "config.ini")]
    return runner.lab.popen("h1", command, cwd=str(PROJECT))


def test_two_hosts_train_what_neither_can_alone(lab, runner_in, wide, tmp_path):
    text = TEXT.format(model=wide, project=PROJECT)
    runners = [runner_in(tmp_path / name) for name in ("alone", "limited", "together")]
    for runner in runners:
        runner.folder.mkdir()
        runner.config(text)
    alone, limited, together = runners
    process = finetune(alone)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    try:
        for host in ("h1", "h2"):
            lab.set_memory(host, LIMIT)
        assert lab.exec("h2", [sys.executable, "-c", f"bytearray({LIMIT})"]).returncode  # the limit is one
        process = finetune(limited)
        wait_until(lambda: limited.events("lost") or process.poll() is not None, 300)
        assert process.poll() or "memory" in limited.events("lost")[0]["reason"]
        for pattern in ("cli_typer.py", "distributed."):
            lab.kill("h1", pattern)
        together.run("d", "h2", text=text)
    finally:
        for host in ("h1", "h2"):
            lab.set_memory(host, None)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-4) and len(losses(alone)) == 4
    assert read_run(together.run_dir).state == "finished"
    print("most bytes:", {e["host"]: e["memory"] for e in together.events("step")})
