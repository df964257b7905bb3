"""Each strategy on three hosts: one is lost and comes back, the run is stopped and resumed, all clips count once."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab import faults
from saved_model import saved_digest
from watched import Watched

from distributed.run_dir.summary import read_run
from exogym.strategy import STRATEGIES

pytestmark = pytest.mark.lab
PROJECT = Path(__file__).parents[2]
TEXT = """
[distributed:d]
base_profile = tiny
shares = fixed
strategy = {strategy}
communication_interval = 4
epochs = {epochs}
learning_rate = {lr}
{keys}
"""
TEST = f"test = {PROJECT}/bundled/data/test.csv\n"


@dataclass(frozen=True)
class Case:
    """fault: kill (the worker), freeze (it) or cut (the host's cable)."""

    strategy: str
    keys: str = ""
    fault: str = "kill"
    host: str = "h2"
    lr: float = 1.5e-3


# Strategies that are not named here have a case without keys of their own.
SPARTA = Case("sparta", "p_sparta = 0.02", "freeze")
CASES = {
    "allreduce": Case("allreduce", fault="cut"),
    "allreduce, moments divided": Case("allreduce", "shard_optimizer = true"),
    "diloco with momentum": Case("diloco", "outer_momentum = 0.5", "freeze"),
    "the server is lost": Case("parameter_server", host="h1"),
    "fedavg": Case("fedavg", fault="cut"),
    "fedavg in islands": Case("fedavg", "island_size = 2"),
    "demo": Case("demo", "compression_topk = 16", lr=5e-4),
    "sparta": SPARTA,
    "sparta, 8 bits of the largest": Case("sparta", "compression_method = topk\nquantization_bits = 8"),
    "sparta_diloco": Case("sparta_diloco", "p_sparta = 0.02\nsparta_interval = 2", "freeze"),
}
NO_CASE = {"pipeline", *(case.strategy for case in CASES.values())}  # a pipeline ends with any of its hosts
CASES |= {name: Case(name) for name in STRATEGIES if name not in NO_CASE}


@contextlib.contextmanager
def fault(runner, case: Case):
    host = runner.lab[case.host]
    if case.fault == "kill":
        faults.kill(host, "distributed.worker.main")
        yield
    else:
        with faults.cut(host) if case.fault == "cut" else faults.frozen(host, "distributed.worker.main"):
            yield


def start(runner, case: Case, epochs: int, keys: str = "") -> Watched:
    text = TEXT.format(strategy=case.strategy, epochs=epochs, lr=case.lr, keys=case.keys + "\n" + keys)
    fields = {field.name for field in dataclasses.fields(STRATEGIES[case.strategy][0])}
    return Watched(runner, "h2", "h3", text=text, epochs=epochs, has_rounds="H" in fields)


def lose_and_get_back(run: Watched, case: Case) -> None:
    run.wait_for("commit", 2)
    with fault(run.runner, case):
        run.wait_for_hosts(2)
    run.wait_for_hosts(3)
    run.wait_for("commit", len(run.of("commit")) + 2)


def stop_and_resume(run: Watched) -> str:
    """What the resumed run prints."""
    assert "finishing the step, then saving" in run.stop()
    assert {event["digest"] for event in run.of("done")} == {saved_digest(run.runner.run_dir)}
    assert run.runner.left_over() == []
    done = run.runner.resume()
    assert done.returncode == 0, done.stdout + done.stderr + run.log()
    assert "resumes after step" in done.stdout and "starts afresh" not in done.stdout
    assert [event["exactly"] for event in run.of("resume") if "exactly" in event][-3:] == [True] * 3
    run.check()
    return done.stdout


def check_what_is_shown(run: Watched, case: Case) -> None:
    summary = read_run(run.runner.run_dir)
    lost, total = run.address[case.host], run.of("step")[-1]["step"]
    assert summary.state == "finished" and lost in summary.lost and summary.attempts == 2
    assert summary.steps == summary.total_steps == total
    command = [sys.executable, "cli_typer.py", "runs", "show", str(run.runner.run_dir)]
    shown = run.runner.lab.exec("h1", command, cwd=str(PROJECT), timeout=60).stdout
    assert f"{total} of {total}" in shown and case.strategy in shown and lost in shown
    assert ("rounds" in shown) == run.has_rounds


@pytest.mark.slow
def test_ranks_that_never_agree_lose_one_and_get_it_back_and_end_with_one_model(runner):
    run = start(runner, SPARTA, epochs=3)
    lose_and_get_back(run, SPARTA)
    out = run.end()
    assert "training continues with" in out and "round" not in out and "sent" in out
    assert len(run.of("done")) == 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_a_host_is_lost_and_comes_back_and_the_run_is_stopped_and_resumed(runner, name):
    case = CASES[name]
    run = start(runner, case, epochs=6, keys=TEST)
    lose_and_get_back(run, case)
    out = stop_and_resume(run)
    before, after = (event["wer"] for event in run.of("evaluation"))
    print(f"{name}: WER {before:.1f} before, {after:.1f} after")
    assert f"WER after: {after:.1f}" in out
    assert after < before - 10
    check_what_is_shown(run, case)
