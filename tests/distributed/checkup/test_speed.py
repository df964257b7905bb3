"""The measurement of speed on this machine, in a process of its own as on any other."""

from __future__ import annotations

import dataclasses
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from small_run import folder, job, run_dir

from distributed.checkup import speed
from distributed.hosts import host_process
from distributed.hosts.paths import PROJECT
from distributed.plan import forecast
from distributed.plan.prepare import prepare_run
from distributed.plan.run_spec import RunSpec
from distributed.ssh.host import Host, Hosts
from distributed.ssh.machine import LocalMachine
from distributed.worker import speed as worker_speed
from whisper_tuner.data.dataset import load_manifest
from whisper_tuner.eval.evaluation import evaluate
from whisper_tuner.export.final import load_model
from whisper_tuner.fact_store import FactStore

__all__ = ["folder", "job", "run_dir"]


@pytest.fixture
def spec(job, run_dir: Path) -> RunSpec:
    alone = job.with_profile(validation=None, test=None, epochs=speed.STEPS, max_steps=speed.STEPS)
    spec = prepare_run(alone, run_dir, local_ranks=1).launch.ranks[0].spec
    return dataclasses.replace(spec, cache_dir=str(run_dir / "cache"))


def measured(spec: RunSpec) -> forecast.Speed:
    with ExitStack() as running:
        return speed._one(LocalMachine("here"), spec, [2, 3], running)


def test_a_machine_trains_a_few_steps_and_saves_nothing(spec, run_dir):
    found = measured(spec)
    assert (found.host, found.problem) == ("here", "") and found.trainable > 1_000_000
    assert found.clips_s == pytest.approx(2 / found.step_s) and found.step_s > 0
    assert [clips for clips, _ in found.sizes] == [2, 3] and min(seconds for _, seconds in found.sizes) > 0
    assert found.start_s > 0 and found.clip_s == 0
    assert not {"checkpoints", "final"} & {path.name for path in run_dir.iterdir()}


def test_the_errors_of_the_untouched_model_are_those_of_an_evaluation(spec, job):
    test = PROJECT / "bundled/data/validation.csv"
    profile = dataclasses.replace(spec.profile, base_model=str(PROJECT / "bundled/model"), test=test)
    found = worker_speed._transcribing(dataclasses.replace(spec, profile=profile))
    model, processor = load_model(PROJECT / "bundled/model")
    rates = evaluate(model, processor, load_manifest(test).samples).normalized
    assert (found["errors"], found["words"]) == (rates.errors, rates.words) and found["clip_s"] > 0


@pytest.mark.parametrize(("batch_size", "hosts", "clips"), [(8, 2, 4), (8, 3, 3), (8, 5, 2), (8, 7, 1), (4, 8, 1)])
def test_a_step_is_measured_with_about_as_many_clips_as_a_run_has(batch_size, hosts, clips):
    assert speed.clips_of_each(batch_size, hosts) == clips


@pytest.mark.slow
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
    monkeypatch.setattr(host_process, "environment", lambda project: {"PYTHONPATH": f"{tmp_path}:{project}"})


def test_speeds_are_remembered_for_a_run_like_this_one(job, monkeypatch, tmp_path):
    monkeypatch.setattr(forecast, "FACTS", FactStore(tmp_path))
    hosts, others = (Hosts(master=Host(address="a"), workers=(Host(address=name),)) for name in "bc")
    assert speed.remembered(job, hosts) == []
    speeds = [
        forecast.Speed(host=name, clips_s=1 / step_s, step_s=step_s, sizes=[[1, step_s], [2, 2 * step_s]])
        for name, step_s in (("a", 1.0), ("b", 4.0))
    ]
    speed.remember(job, hosts, speeds)
    assert speed.remembered(job, hosts) == speeds
    assert speed.remembered(job.with_profile(epochs=99, learning_rate=0.5), hosts) == speeds
    assert speed.remembered(job.with_profile(batch_size=99), hosts) == []
    assert speed.remembered(job, others) == []
    # The first host is this machine by any name, and alone its step has the whole batch.
    assert [one.sizes for one in speed.remembered(job, forecast.HERE)] == [speeds[0].sizes]
    speed.remember(job, forecast.HERE, [dataclasses.replace(speeds[0], sizes=[[1, 1.0]])])
    assert speed.remembered(job, forecast.HERE) == [] and len(speed.remembered(job, hosts)) == 2
    speed.remember(job, others, [speeds[0], forecast.Speed(host="c", problem="gone")])
    speed.remember(job, others, [])
    assert speed.remembered(job, others) == []
