"""`distributed-train` on lab hosts: real SSH, real processes, the bundled model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from own_model import FITTED, SCRIPT
from safetensors.torch import load_file

from distributed.plan.forecast import FACTS
from whisper_tuner.export.final import load_model

pytestmark = pytest.mark.lab
PROJECT = Path(__file__).parents[2]

DILOCO = """
[distributed:diloco]
base_profile = tiny
shares = fixed
communication_interval = 3
wire = float32
overlap_steps = 0
max_steps = 7
"""
LORA = DILOCO.replace("max_steps = 7", "max_steps = 3\nmethod = lora\nlora_r = 4")
LONG = """
[distributed:long]
base_profile = tiny
shares = fixed
strategy = allreduce
epochs = 1000
"""
ALL_REDUCE = """
[distributed:two]
base_profile = tiny
shares = fixed
strategy = allreduce
audio_context = full
dropout = 0
max_steps = 4
batch_size = 2
[profile:one]
base_model = {model}
train = {train}
validation =
test =
epochs = 1
warmup_ratio = 0
learning_rate = 3e-4
num_threads = 1
seed = 3
audio_context = full
dropout = 0
max_steps = 4
batch_size = 2
shards = {shards}
"""


def test_three_hosts_agree_bit_for_bit_after_each_round_and_leave_a_model(runner):
    first = runner.run("diloco", "h2", "h3", text=DILOCO)
    digests = {}
    for event in runner.events("round"):
        digests.setdefault(event["round"], []).append(event["digest"])
    assert sorted(digests) == [1, 2, 3]  # steps 3 and 6, and the short tail at 7
    assert all(len(of_round) == 3 and len(set(of_round)) == 1 for of_round in digests.values())
    assert len({of_round[0] for of_round in digests.values()}) == 3
    model, _ = load_model(runner.run_dir / "final")
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert "sent in" in first.stdout
    assert runner.left_over() == []


@pytest.mark.slow
def test_a_second_run_sends_nothing_and_lora_leaves_an_adapter(runner):
    runner.run("diloco", "h2", text=DILOCO)
    again = runner.run("diloco", "h2", text=LORA)
    assert f"{runner.lab['h2'].address}: up to date" in again.stdout
    assert (runner.run_dir / "final" / "adapter_config.json").is_file()
    start = runner.events("start")[0]
    # Frozen weights do not travel: four bytes for each other's change, and one for its second moment.
    assert runner.events("round")[0]["bytes"] < 5.2 * start["trainable"] + 64


OPEN = """
[distributed:open]
base_profile = tiny
max_steps = 12
"""


@pytest.mark.slow
def test_what_a_profile_leaves_open_is_chosen_measured_once_and_said(runner):
    FACTS.file.unlink(missing_ok=True)
    first = runner.run("open", "h2", text=OPEN)
    assert "measuring three training steps on each host" in first.stdout
    [said] = [line for line in first.stdout.splitlines() if line.startswith("rounds of ")]
    assert "(assumed)" not in said and "; hosts share Adam's second moments; " in said
    assert said.endswith("the larger its learning rate (scale_lr); a step counts by how much text it has (weigh_steps)")
    spec = json.loads((runner.run_dir / "run.json").read_text())["ranks"][1]["spec"]
    chosen = spec["strategy_settings"]
    assert f"rounds of {chosen['H']} steps, " in said and f" as {chosen['wire']}, " in said
    assert chosen["share_moments"] and chosen["scale_lr"] and chosen["weigh_steps"]
    digests = [event["digest"] for event in runner.events("round") if event["round"] == 1]
    assert len(digests) == 2 and len(set(digests)) == 1
    again = runner.run("open", "h2", text=OPEN + "epochs = 2\n")
    assert "measuring" not in again.stdout and "(assumed)" not in again.stdout and "rounds of " in again.stdout


def test_dry_run_changes_nothing(runner):
    command = [*runner.command("diloco", "h2", text=DILOCO), "--dry-run"]
    done = runner.lab.exec("h1", command, cwd=str(PROJECT))
    assert done.returncode == 0 and "clips" in done.stdout
    assert runner.run_dir is None


@pytest.mark.slow
def test_two_hosts_with_all_reduce_equal_one_process(runner):
    addresses = [runner.lab[name].address for name in ("h1", "h2")]
    tiny = runner.config("").read_text()
    model, train = (line.split(" = ")[1] for line in tiny.splitlines() if line.startswith(("base_model", "train")))
    text = ALL_REDUCE.format(model=model, train=train, shards=" ".join(addresses))
    runner.run("two", "h2", text=text)
    two, losses_of_two = runner.run_dir, runner.events("step")
    command = [*runner.command("one", text=text)[:2], "finetune", "one", "--config", str(runner.folder / "config.ini")]
    done = runner.lab.exec("h1", command, cwd=str(PROJECT), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert runner.run_dir != two
    for event in runner.events("step"):
        parts = [e for e in losses_of_two if e["step"] == event["step"]]
        assert sum(part["samples"] for part in parts) == event["samples"] == 2
        mean = sum(part["loss"] * part["tokens"] for part in parts) / sum(part["tokens"] for part in parts)
        assert mean == pytest.approx(event["loss"], rel=1e-4)
    ours, theirs = (load_file(folder / "final" / "model.safetensors") for folder in (two, runner.run_dir))
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_worker(runner):
    process = runner.start("long", "h2", text=LONG)
    runner.lab.kill("h1", "distributed.launcher.main")
    _, err = process.communicate(timeout=15)
    assert process.returncode == 6 and "launcher ended without saying why" in err
    runner.wait_until_nothing_is_left(25)


def test_ctrl_c_stops_every_rank_at_the_same_weights_and_keeps_the_model(runner):
    process = runner.start("long", "h2", text=LONG)
    runner.lab["h1"].signal(2, "cli_typer.py")
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(runner.events("done")) == 2 and (runner.run_dir / "final" / "model.safetensors").is_file()
    assert runner.left_over() == []


def test_network_trainer_fits_a_model_of_the_users_own(runner):
    script = runner.folder / "fit.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(runner.hosts("h2"))]
    environment = {"PYTHONPATH": f"{PROJECT}/gym:{PROJECT}"}
    done = runner.lab.exec("h1", command, cwd=str(runner.folder), env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == FITTED
    assert (runner.run_dir / "bundle.pickle").stat().st_mode & 0o777 == 0o600
