"""Hosts that are lost, freeze and come back during a run: it goes on, each clip counts once, nothing is left behind."""

from __future__ import annotations

import re
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from lab import faults
from waiting import wait_until
from watched import Watched

from exogym import Checkpoints, digest
from whisper_tuner.export.final import load_model

pytestmark = pytest.mark.lab
PROJECT = Path(__file__).parents[2]
TEXT = """
[distributed:d]
base_profile = tiny
shares = fixed
communication_interval = 4
wire = float32
overlap_steps = 0
checkpoint_interval = 1
epochs = {epochs}
min_hosts = {min_hosts}
"""


def started(runner, *workers: str, epochs: int, min_hosts: int = 1) -> Watched:
    return Watched(runner, *workers, text=TEXT.format(epochs=epochs, min_hosts=min_hosts), epochs=epochs)


@pytest.mark.slow
def test_one_host_after_the_other_is_lost_and_all_finish(runner):
    run = started(runner, "h2", "h3", epochs=8)
    killed = run.kill("h2")
    assert run.wait_for("generation", 2)["time"] - killed < 3
    assert run.of("generation")[1]["hosts"] == [run.address["h1"], run.address["h3"]]
    run.wait_for("generation", 3)
    with faults.frozen(runner.lab["h3"], "distributed.worker.main"):
        run.wait_for("lost", 1, host=run.address["h3"])
        run.wait_for("generation", 4)
    run.wait_for("back", 1, host=run.address["h3"])
    run.wait_for("generation", 5)
    killed = run.kill("h1")  # rank 0's
    assert run.wait_for("generation", 6)["time"] - killed < 3
    run.wait_for("generation", 7)
    out = run.end()
    assert [len(event["hosts"]) for event in run.of("generation")] == [3, 2, 3, 2, 3, 2, 3]
    assert f"{run.address['h2']} is lost: the worker was killed by" in out
    assert re.search(rf"{run.address['h3']} is lost: nothing heard for (\d|1[0-2]) s: asleep", out)
    assert len(run.of("hello", host=run.address["h3"])) == 1  # it slept, with its model in memory
    assert len(run.of("done")) == 3


@pytest.mark.slow
def test_a_host_that_its_user_needs_leaves_and_returns_with_the_same_worker(runner):
    run = started(runner, "h2", "h3", epochs=5)
    run.wait_for("commit", 2)
    address = run.address["h2"]
    asks = [sys.executable, "cli_typer.py", "hosts", "yield", address, "--run", str(runner.run_dir)]
    left = runner.lab.exec("h1", asks, cwd=str(PROJECT), timeout=60)
    assert left.returncode == 0 and f"{address} is left out since step" in left.stdout, left.stdout + left.stderr
    assert run.of("generation")[-1]["hosts"] == [run.address["h1"], run.address["h3"]]
    used = lambda: sum(sum(process.cpu_times()[:2]) for process in ours_on(runner.lab["h2"]))  # noqa: E731
    before, began = used(), time.monotonic()
    time.sleep(8)
    assert used() - before < 0.01 * (time.monotonic() - began)
    back = runner.lab.exec("h1", [*asks, "--back"], cwd=str(PROJECT), timeout=60)
    assert f"{address} takes part again" in back.stdout, back.stdout + back.stderr
    run.end()
    assert [len(event["hosts"]) for event in run.of("generation")] == [3, 2, 3]
    assert len(run.of("hello")) == 3 and not run.of("lost")


def ours_on(host) -> list[psutil.Process]:
    """All processes of a run on a host, with its sshd."""
    return [one for one in psutil.Process(host.pid).children(recursive=True) if one.is_running()]


@pytest.mark.slow
def test_too_few_hosts_pause_a_run_and_checkpoints_outlive_all_workers(runner):
    run = started(runner, "h2", epochs=5, min_hosts=2)
    run.wait_for("checkpoint", 4)
    for name in ("h1", "h2"):
        run.kill(name)
    resumed = run.wait_for("resume", 1)
    assert resumed["step"] > 0 and resumed["exactly"]
    pauses = len(run.of("paused"))
    run.kill("h2")
    assert run.wait_for("paused", pauses + 1)["hosts"] == [run.address["h1"]]
    assert "paused until 2 hosts are there" in run.end()
    assert len(run.of("generation")[-1]["hosts"]) == 2


@pytest.mark.slow
def test_workers_that_abort_in_an_exchange_and_while_a_group_forms_are_started_anew(runner):
    """As gloo over libuv does where it raises over TCP, see tests/gloo_uv."""
    run = started(runner, "h2", "h3", epochs=8)
    run.wait_for("commit", 2)
    with faults.frozen(runner.lab["h3"], "distributed.worker.main"):
        time.sleep(1)  # the others have made their steps, and exchange their weights with it
        runner.lab["h2"].signal(signal.SIGABRT, "distributed.worker.main")
        assert run.wait_for("generation", 2)["hosts"] == [run.address["h1"], run.address["h3"]]
        runner.lab["h1"].signal(signal.SIGABRT, "distributed.worker.main")
        for name in ("h2", "h1"):
            lost = run.wait_for("lost", 1, host=run.address[name])
            assert "the worker was killed by signal 6" in lost["reason"] and not lost["given_up"]
    run.wait_for_hosts(3)
    run.end()


@pytest.mark.slow
def test_a_worker_that_gets_no_more_memory_is_started_anew(runner):
    run = started(runner, "h2", epochs=6)
    run.wait_for("commit", 2)  # before a round has counted any error ends the run
    [worker] = runner.lab.processes("h2", "distributed.worker.main")
    resource.prlimit(worker.pid, resource.RLIMIT_AS, (1, 1))
    lost = run.wait_for("lost", 1, host=run.address["h2"])
    assert "RuntimeError" in lost["reason"] or "memory" in lost["reason"].lower(), lost
    run.wait_for("generation", 3)
    run.end()


@pytest.mark.slow
def test_a_master_whose_own_worker_is_given_up_gets_the_model_of_another(runner):
    run = started(runner, "h2", epochs=6)
    for life in (1, 2, 3):
        run.wait_for("hello", life, host=run.address["h1"])
        run.kill("h1")
    assert run.wait_for("lost", 3, host=run.address["h1"])["given_up"]
    assert "is lost and not tried again" in run.end()
    assert [event["host"] for event in run.of("saved")] == [run.address["h2"]]


@pytest.mark.slow
def test_a_lid_that_was_closed_for_long_is_opened_and_the_same_worker_goes_on(runner):
    """TCP would try again only half a minute later."""
    run = started(runner, "h2", epochs=20)
    with faults.asleep(runner.lab["h2"]):
        run.wait_for("generation", 2)
        time.sleep(30)
    woken = time.time()
    assert run.wait_for("back", 1)["time"] - woken < 12
    assert len(run.wait_for("generation", 3)["hosts"]) == 2
    run.end()
    assert len(run.of("hello", host=run.address["h2"])) == 1


@pytest.mark.slow
def test_a_host_that_was_cut_off_for_long_is_started_anew(runner):
    run = started(runner, "h2", epochs=10)
    with faults.cut(runner.lab["h2"]):
        run.wait_for("generation", 2)
        runner.wait_until_gone("h2", 25)
    run.wait_for("generation", 3)
    run.end()
    assert len(run.of("hello", host=run.address["h2"])) == 2


@pytest.mark.slow
def test_stopped_with_a_host_missing_and_resumed_on_others(runner):
    run = started(runner, "h2", epochs=3)
    run.wait_for("checkpoint", 4)
    with faults.cut(runner.lab["h2"]):
        run.wait_for("generation", 2)
        runner.lab["h1"].signal(2, "cli_typer.py")
        run.wait_for("saved", 1)
    out, err = run.process.communicate(timeout=60)
    assert run.process.returncode == 130, out + err
    assert (runner.run_dir / "final" / "model.safetensors").is_file()
    done = runner.resume("--hosts", str(runner.hosts("h3")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the hosts are not the same as before" in done.stdout
    assert f"{run.address['h3']}: its inner optimizer starts afresh" in done.stdout
    assert f"{run.address['h1']}: its" not in done.stdout  # it has kept its own
    assert {event["host"] for event in run.of("done")} == {run.address["h1"], run.address["h3"]}
    run.check()


@pytest.mark.slow
def test_two_hosts_that_cannot_reach_each_other_hold_nobody_up_for_long(runner):
    """The master reaches both. A blackholed link raises nothing in gloo."""
    run = started(runner, "h2", "h3", epochs=22)
    run.wait_for("commit", 3)
    with faults.blackhole(runner.lab["h2"], runner.lab["h3"]):
        begun = time.time()
        gone_on = _next_commit(run, begun + 1, seconds=28) - begun
        # The two who are left train on, for longer than the 23 s after which a worker that hears nothing ends itself.
        time.sleep(max(0.0, begun + 30 - time.time()))
    again = time.time()
    all_in = run.wait_for("generation", 3)["time"] - again
    print(f"{gone_on:.1f} s to the next round that counts; all are in again after {all_in:.1f} s")
    out = run.end()
    assert gone_on < 20 and all_in < 15
    h2, h3 = run.address["h2"], run.address["h3"]
    assert [len(event["hosts"]) for event in run.of("generation")] == [3, 2, 3]
    assert f"{h2} and {h3} cannot reach each other" in out and f"{h2} and {h3} reach each other again" in out
    assert not run.of("lost") and len(run.of("done")) == 3


def _next_commit(run: Watched, after: float, seconds: float) -> float:
    """When a round next counted."""
    wait_until(lambda: any(event["time"] > after for event in run.of("commit")), seconds, run.log)
    return min(event["time"] for event in run.of("commit") if event["time"] > after)


def test_the_model_outlives_the_master(runner):
    """The launcher dies, its run folder is gone: what the other host kept becomes a model."""
    run = started(runner, "h2", epochs=30)
    run.wait_for("round", 8)
    runner.lab.kill("h1", "distributed.launcher.main")
    run.process.communicate(timeout=15)
    runner.wait_until_nothing_is_left(25)
    digests = {event["digest"]: event["round"] for event in run.of("round")}
    name = runner.run_dir.name
    shutil.rmtree(runner.run_dir)
    command = [sys.executable, "cli_typer.py", "runs", "recover", name, "--hosts", str(runner.hosts("h2"))]
    done = runner.lab.exec("h1", command, cwd=str(PROJECT), timeout=120)
    recovered = PROJECT / "runs" / name
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        model, _ = load_model(recovered / "final")
        [kept] = recovered.glob("recovered/*/*/*.json")
        state = Checkpoints(kept.parents[1], kept.stem).load(int(kept.parent.name))
        assert digests[digest(state["agreed"]["strategy"]["weights"])] >= max(digests.values()) - 1
        assert all(torch.isfinite(p).all() for p in model.parameters())
    finally:
        shutil.rmtree(recovered, ignore_errors=True)
