"""Scripts and functions as several real processes."""

import json
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from exogym_toys import Points
from launched_script import SETTINGS, Normed, strategy, whole

from exogym import AllReduceStrategy, LaunchedTrainer, LocalTrainer, NodeFailed, SettingError
from exogym.comm.process_group import leave_default_group
from exogym.launch import init, launch, main
from exogym.strategy import communicate

PROJECT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("launched_script.py")
PATHS = [str(PROJECT / path) for path in ("gym", ".", "tests/exogym")]


def start(*words):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}
    command = [sys.executable, "-m", "exogym.launch", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def run(*words):
    """Status, and all that it said."""
    process = start(*words)
    said, complaints = process.communicate(timeout=120)
    return process.returncode, said + complaints


def written(folder, ranks):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def is_alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def all_ended(folder, ranks, within):
    pids = [int((folder / f"{rank}.pid").read_text()) for rank in range(ranks)]
    end = time.monotonic() + within
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(map(is_alive, pids))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.slow
def test_options_before_and_after_the_script_and_its_own_words(tmp_path):
    words = ["--lr", "0.1", "data", "--nproc_per_node=2", "-v", "--backend", "gloo", "--", "--backend", "mine"]
    status, said = run("--max-restarts", 1, SCRIPT, "show", tmp_path, *words)
    assert status == 0, said
    own = ["--lr", "0.1", "data", "-v", "--backend", "mine"]
    assert written(tmp_path, 2) == [{"argv": own, "world_size": 2, "sum": 3.0, "backend": "gloo"}] * 2


def test_a_script_that_is_started_alone_is_a_group_of_one(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}
    subprocess.run([sys.executable, SCRIPT, "show", tmp_path], check=True, env=environment)
    assert written(tmp_path, 1) == [{"argv": [], "world_size": 1, "sum": 1.0, "backend": "gloo"}]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fail", "fail_and_end_late"])
def test_a_rank_that_fails_is_told_with_its_traceback_and_nothing_is_left(mode, tmp_path):
    started = time.monotonic()
    status, said = run(SCRIPT, mode, tmp_path, "--nproc-per-node", 3)
    assert status == 1 and time.monotonic() - started < 60
    told = said[said.index("error: rank 1 failed with status 1: Traceback") :]
    assert 'raise ValueError("on purpose")' in told and told.strip().endswith("ValueError: on purpose")
    assert all_ended(tmp_path, 3, within=0)


@pytest.mark.slow
def test_another_process_may_stand_between(tmp_path, monkeypatch):
    between = tmp_path / "python"
    between.write_text(f'#!/bin/sh\n"{sys.executable}" "$@"\nexit $?\n')
    between.chmod(0o755)
    monkeypatch.setenv("PYTHON_EXEC", str(between))
    status, said = run(SCRIPT, "show", tmp_path, "--nproc-per-node", 1)
    assert status == 0, said


@pytest.mark.slow
def test_restarted_after_a_failure(tmp_path):
    status, said = run(SCRIPT, "recover", tmp_path, "--nproc-per-node", 2, "--max-restarts=1", "--monitor-interval=0.2")
    assert status == 0, said
    assert written(tmp_path, 2) == [12.0, 12.0] and "ValueError: the first time" in said


@pytest.mark.parametrize(
    ("blow", "status"),
    [
        (signal.SIGKILL, -9),
        pytest.param(signal.SIGTERM, 128 + 15, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_the_ranks_end_with_their_launcher(tmp_path, blow, status):
    launcher = start(SCRIPT, "wait", tmp_path, "--nproc-per-node", 2)
    try:
        end = time.monotonic() + 60
        while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(0.2)
        launcher.send_signal(blow)
        said = launcher.communicate(timeout=60)
        assert launcher.returncode == status, said
        assert all_ended(tmp_path, 2, within=5)
    finally:
        launcher.kill()


@pytest.mark.slow
def test_two_machines_train_together_as_two_local_nodes_do(tmp_path):
    port = free_port()
    words = ["--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", port, "--start-timeout", 60]
    machines = [start(SCRIPT, "train", tmp_path, *words, "--node-rank", number) for number in range(2)]
    for machine in machines:
        said = machine.communicate(timeout=120)
        assert machine.returncode == 0, said
    first, second = written(tmp_path, 2)
    for name in ("allreduce", "diloco"):
        trainer = LocalTrainer(Normed(), Points(16))
        local = trainer.fit(strategy=strategy(name), num_nodes=2, **SETTINGS)
        model, result = (local.model, local.result) if hasattr(local, "result") else (local, trainer.result)
        assert first[name] == [whole(model), result.digest, result.steps, [0]]
        assert second[name] == [*first[name][:3], []]


@pytest.mark.slow
def test_a_machine_that_does_not_come(tmp_path):
    words = ["--nnodes", 2, "--node-rank", 0, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    status, said = run(SCRIPT, "show", tmp_path, *words, "--start-timeout", 2)
    assert status == 1 and "error: the 2 machines did not meet: " in said


def times_rank(number, comment):
    comm = init()
    if comment == "fail, and end late":
        communicate.all_reduce(torch.ones(1))
        if comm.rank == 1:
            leave_default_group()
            multiprocessing.util.Finalize(None, time.sleep, [3], exitpriority=1)
            raise KeyError("missing")
        communicate.all_reduce(torch.ones(1))
    if comment == "fail" and comm.rank == 1:
        raise KeyError("missing")
    return number * comm.rank


@pytest.mark.slow
@pytest.mark.parametrize("comment", ["fail", "fail, and end late"])
def test_a_function_that_fails_in_one_rank(comment):
    with pytest.raises(NodeFailed, match=r"(?s)rank 1 failed with status 1: Traceback.*KeyError: 'missing'"):
        launch(times_rank, [5, comment], nproc_per_node=2)
    assert "EXOGYM_BACKEND" not in os.environ


def test_a_function_returns_what_it_returns_on_each_rank():
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    assert launch(times_rank, [5, "go on"], nproc_per_node=2) == [0, 5]
    assert handlers == {number: signal.getsignal(number) for number in signal.valid_signals()}


def test_what_cannot_be_launched(tmp_path, capsys):
    assert main([]) == 2 and main(["--help"]) == 0
    assert "--start-timeout" in capsys.readouterr().out
    assert main([str(tmp_path / "none.py"), "--nproc-per-node", "2"]) == 2
    assert "there is no script" in capsys.readouterr().err
    assert main([str(SCRIPT), "--backend", "glo"]) == 2
    assert "unknown backend 'glo'; did you mean 'gloo'?" in capsys.readouterr().err
    with pytest.raises(SettingError, match="nproc-per-node: Unsupported"):
        launch(SCRIPT, nproc_per_node="many")
    for given in ({"nproc_per_node": 0}, {"nnodes": "x"}, {"nnodes": "2:1"}, {"max_restarts": -1}):
        with pytest.raises(SettingError):
            launch(SCRIPT, **given)
    with pytest.raises(SettingError, match=r"<lambda> cannot be found by its name"):
        launch(lambda: None)


def test_settings_of_a_launched_trainer(monkeypatch):
    trainer = LaunchedTrainer(Normed(), Points(8))
    with pytest.raises(SettingError, match="fit has no setting 'num_epoch'; did you mean 'num_epochs'"):
        trainer.fit(AllReduceStrategy(lr=0.1), num_epoch=1)
    with pytest.raises(SettingError, match="num_nodes = 4, but 1 processes were launched"):
        trainer.fit(AllReduceStrategy(lr=0.1), num_epochs=1, num_nodes=4)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingError, match=r"not launched as it should be: .*RANK expected"):
        trainer.fit(AllReduceStrategy(lr=0.1), num_epochs=1)


def test_ranks_of_one_machine_share_its_memory(monkeypatch):
    trainer = LaunchedTrainer(Normed(), Points(8))
    alone = trainer._memory(torch.device("cpu"), 0.5).most
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert trainer._memory(torch.device("cpu"), 0.5).most < 0.6 * alone
