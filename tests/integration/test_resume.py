"""Runs that were stopped or broke off, and went on: in the end nobody can tell."""

from __future__ import annotations

import functools
import hashlib
import signal
from pathlib import Path

import pytest
from waiting import wait_until

PROJECT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.lab, pytest.mark.slow]
DILOCO = f"""
[distributed:d]
base_profile = tiny
also_train = {PROJECT}/bundled/data/validation.csv*1.5
shares = fixed
communication_interval = 5
wire = float32
overlap_steps = 0
checkpoint_interval = 1
dropout = 0.1
max_steps = 80
epochs = 3
"""
ALL_REDUCE = """
[distributed:d]
base_profile = tiny
shares = fixed
strategy = allreduce
checkpoint_interval = 4
max_steps = 80
epochs = 3
"""


def digest(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "final" / "model.safetensors").read_bytes()).hexdigest()


def wait_for_step(runner, step: int, rank: int = 1) -> None:
    wait_until(lambda: any(e["rank"] == rank and e["step"] >= step for e in runner.events("step")), 120)


@pytest.fixture(scope="module")
def whole(runner_in, tmp_path_factory):
    """The digest of a run that nothing has stopped; one for each text."""

    @functools.cache
    def digest_of(text: str) -> str:
        runner = runner_in(tmp_path_factory.mktemp("whole"))
        runner.run("d", "h2", text=text)
        return digest(runner.run_dir)

    return digest_of


@pytest.mark.parametrize("text", [DILOCO, ALL_REDUCE], ids=["diloco", "allreduce"])
def test_ctrl_c_and_resume_end_bit_for_bit_as_without(runner, whole, text):
    expected = whole(text)
    process = runner.start("d", "h2", text=text)
    wait_for_step(runner, 7)
    runner.lab["h1"].signal(2, "cli_typer.py")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert f"--resume {runner.run_dir}" in out
    done = runner.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumes after step" in done.stdout
    assert digest(runner.run_dir) == expected
    assert not (runner.run_dir / "checkpoints").exists()
    assert not list(Path(runner.lab["h1"].home).glob("project-h2/runs/*"))
    again = runner.resume()
    assert again.returncode == 6 and "is finished" in again.stderr


def test_a_killed_launcher_and_a_damaged_checkpoint_cost_at_most_a_round(runner, whole):
    expected = whole(DILOCO)
    process = runner.start("d", "h2", text=DILOCO)
    wait_for_step(runner, 16)
    runner.lab.kill("h1", "distributed.launcher.main")
    process.communicate(timeout=15)
    runner.wait_until_nothing_is_left(25)
    newest = max((runner.run_dir / "checkpoints").glob("*/*.safetensors"))
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    done = runner.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert digest(runner.run_dir) == expected
    [went_on] = [event["step"] for event in runner.events("resume") if event["rank"] == 0]
    assert 10 <= went_on < 80


def test_what_cannot_be_resumed(runner):
    process = runner.start("d", "h2", text=DILOCO)
    twice = runner.resume()
    assert twice.returncode == 6 and "is running" in twice.stderr
    runner.lab["h1"].signal(signal.SIGTERM, "cli_typer.py")
    assert process.wait(60) == 130
    (runner.run_dir / "run.json").write_text("{")
    broken = runner.resume()
    assert broken.returncode == 6 and "run.json" in broken.stderr and "start a new one" in broken.stderr
    assert "Traceback" not in broken.stderr
