"""The measurement of speed on this machine, in a process of its own as on any other."""

from __future__ import annotations

import dataclasses
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from distributed.plan.prepare import prepare_run
from distributed.plan.run_spec import RunSpec
from distributed.ssh.machine import LocalMachine
from multimac.wizard import speed
from multimac.wizard.draft import replaced


@pytest.fixture
def spec(job, run_dir: Path) -> RunSpec:
    alone = replaced(job, validation=None, test=None, epochs=speed.STEPS, max_steps=speed.STEPS)
    spec = prepare_run(alone, run_dir, local_ranks=1).launch.ranks[0].spec
    return dataclasses.replace(spec, cache_dir=str(run_dir / "cache"))


def measured(spec: RunSpec) -> speed.Speed:
    with ExitStack() as running:
        return speed._one(LocalMachine("here"), spec, running)


def test_a_machine_trains_a_few_steps_and_saves_nothing(spec, run_dir):
    found = measured(spec)
    assert (found.host, found.problem) == ("here", "") and found.trainable > 1_000_000
    assert found.clips_s == pytest.approx(2 / found.step_s) and found.step_s > 0
    assert not {"checkpoints", "final"} & {path.name for path in run_dir.iterdir()}


def test_what_is_wrong_on_a_machine_is_said(spec):
    lost = dataclasses.replace(spec, profile=dataclasses.replace(spec.profile, base_model="/nowhere"))
    assert "/nowhere" in measured(lost).problem and measured(lost).clips_s is None


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ('print(\'{"problem": "no memory"}\')', "no memory"),
        ("raise ZeroDivisionError('by hand')", "ZeroDivisionError: by hand"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGALRM)", "it did not finish 4 training steps in time"),
    ],
)
def test_a_process_that_ends_otherwise_is_a_problem(spec, monkeypatch, tmp_path, script, problem):
    run_instead(monkeypatch, tmp_path, script)
    assert measured(spec).problem == problem


def test_a_process_that_hangs_is_killed(spec, monkeypatch, tmp_path):
    run_instead(monkeypatch, tmp_path, "import time; time.sleep(30)")
    monkeypatch.setattr(speed, "LIMIT_S", 1.0)
    began = time.monotonic()
    assert measured(spec).problem == "it did not finish 4 training steps in time"
    assert time.monotonic() - began < 15


def run_instead(monkeypatch, tmp_path: Path, script: str) -> None:
    (tmp_path / "odd.py").write_text(script)
    monkeypatch.setattr(speed, "PROBE", "odd")
    monkeypatch.setattr(speed, "environment", lambda project: {"PYTHONPATH": f"{tmp_path}:{project}"})
