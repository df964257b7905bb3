"""A host leaves a running run and returns: real ranks on this machine, and what is said of wrong names."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from test_attach_stop import CONFIG
from waiting import wait_until

import cli_typer
from distributed.run_dir import away
from distributed.run_dir.away import ASKED, read_away, set_away
from distributed.run_dir.folder import is_running, launcher_pid, only_one
from distributed.run_dir.log import EventLog
from multimac.commands.train import train_here
from whisper_tuner.errors import ConfigError, ExitStatus

PROJECT = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that is running: its lock is held, and what happens is written by the test."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.ini").write_text("")
    folder = tmp_path / "runs" / "20260101-120000-mine"
    folder.mkdir(parents=True)
    names = ("mac-mini.local", "air.local")
    ranks = [{"label": name, "spec": {"strategy": "diloco"}} for name in names]
    (folder / "run.json").write_text(json.dumps({"name": "mine", "ranks": ranks}))
    log = EventLog(folder / "events.jsonl")
    log({"type": "phase", "phase": "start", "hosts": [*names]})
    with only_one(folder):
        yield folder, log


def test_errors_name_what_can_be_done(run, capfd):
    folder, log = run
    assert cli_typer.main(["hosts", "yield", "mac-mni.local"]) == ConfigError.exit_status
    said = capfd.readouterr().err
    assert "did you mean 'mac-mini.local'?" in said and "Its hosts: mac-mini.local, air.local." in said
    assert cli_typer.main(["hosts", "yield", "air", "--back"]) == ExitStatus.RUN
    assert "air.local is not left out" in capfd.readouterr().err
    set_away(folder, "air.local", True)
    assert cli_typer.main(["hosts", "yield", "air"]) == ExitStatus.RUN
    assert "multimac hosts yield air.local --back" in capfd.readouterr().err
    log({"type": "away", "host": "mac-mini.local", "reason": "on battery"})
    assert cli_typer.main(["hosts", "yield", "mac-mini", "--back"]) == ExitStatus.RUN
    assert "left out by itself: on battery" in capfd.readouterr().err
    assert read_away(folder) == ("air.local",)


def test_a_pipeline_can_do_without_no_host(run, capfd):
    folder, _ = run
    kept = folder / "run.json"
    kept.write_text(kept.read_text().replace("diloco", "pipeline"))
    assert cli_typer.main(["hosts", "yield", "air"]) == ExitStatus.RUN
    said = capfd.readouterr().err
    assert "none can be left out" in said and f"multimac runs stop {folder.name}" in said and not read_away(folder)


def test_what_is_asked_of_one_that_also_has_a_reason_of_its_own(run, capfd):
    """It stays away; nothing is said to be back before it is."""
    _, log = run
    leave = lambda reason: log({"type": "away", "host": "air.local", "reason": reason})  # noqa: E731
    threading.Timer(0.5, leave, [ASKED]).start()
    assert cli_typer.main(["hosts", "yield", "air"]) == ExitStatus.OK
    threading.Timer(0.5, leave, ["on battery"]).start()
    assert cli_typer.main(["hosts", "yield", "air", "--back"]) == ExitStatus.OK
    out = capfd.readouterr().out
    assert "air.local is left out; take it back with: multimac hosts yield air.local --back" in out
    assert "air.local stays away by itself: on battery" in out


def test_asked_in_the_last_round_it_waits_for_no_evaluation(run, capfd):
    folder, log = run
    threading.Timer(0.5, log, [{"type": "done", "host": "air.local"}]).start()
    assert cli_typer.main(["hosts", "yield", "air"]) == ExitStatus.OK
    threading.Timer(0.5, log, [{"type": "phase", "phase": "evaluate"}]).start()
    assert cli_typer.main(["hosts", "yield", "mac-mini"]) == ExitStatus.RUN
    assert cli_typer.main(["hosts", "yield", "air", "--back"]) == ExitStatus.OK
    said = capfd.readouterr()
    assert "air.local takes no more clips than it has in hand" in said.out and "air.local is not called" in said.out
    assert "mac-mini.local leads the run" in said.err and read_away(folder) == ()


def test_a_host_that_is_lost_is_not_waited_for(run, capfd):
    _, log = run
    log({"type": "lost", "host": "air.local", "reason": "asleep", "given_up": False})
    log({"type": "away", "host": "air.local", "reason": ASKED})
    assert cli_typer.main(["hosts", "yield", "air"]) == ExitStatus.OK
    assert cli_typer.main(["hosts", "yield", "air", "--back"]) == ExitStatus.OK
    said = capfd.readouterr().out
    assert "is lost; it stays left out once" in said and "is lost; it takes part again once" in said


def test_what_was_told_before_a_run_was_resumed_is_no_answer(run, capfd):
    folder, log = run
    log({"type": "start", "host": "air.local", "total_steps": 40, "device": "cpu"})
    log({"type": "away", "host": "air.local", "reason": "asked before"})
    log({"type": "phase", "phase": "start", "hosts": ["mac-mini.local", "air.local"]})
    threading.Timer(0.5, log, [{"type": "lost", "host": "air.local", "reason": "asleep", "given_up": True}]).start()
    assert cli_typer.main(["hosts", "yield", "air"]) == ExitStatus.OK
    assert "air.local is given up" in capfd.readouterr().out
    (folder / "events.jsonl").write_text("")  # and of a launcher that has told nothing yet
    assert cli_typer.main(["hosts", "yield", "mac", "--back"]) == ConfigError.exit_status
    threading.Timer(0.5, log, [{"type": "away", "host": "mac-mini.local", "reason": ASKED}]).start()
    assert cli_typer.main(["hosts", "yield", "mac-mini"]) == ExitStatus.OK


def test_a_file_that_is_damaged_leaves_nobody_out(run):
    folder, _ = run
    for text in ("", "[]", '{"hosts": 3}', '{"hosts": [1, null]}', "\x00"):
        (folder / "away.json").write_text(text)
        assert read_away(folder) == ()


def test_of_several_that_are_asked_at_once_none_is_forgotten(run, monkeypatch):
    folder, _ = run
    names = ("mac-mini.local", "air.local")
    monkeypatch.setattr(away, "read_away", lambda path: (read_away(path), time.sleep(0.2))[0])
    asking = [threading.Thread(target=set_away, args=(folder, name, True)) for name in names]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert {*read_away(folder)} == {*names}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["diloco", "allreduce"])
def test_a_rank_leaves_for_a_while_uses_no_processor_meanwhile_and_each_clip_counts_once(
    tmp_path, monkeypatch, capfd, strategy
):
    config = CONFIG.format(project=PROJECT).replace("max_steps = 40", "epochs = 5") + "\n[distributed:pair]\n"
    (tmp_path / "config.ini").write_text(config + f"base_profile = tiny\nstrategy = {strategy}\n")
    monkeypatch.chdir(tmp_path)
    assert train_here(Path("config.ini"), "pair", ranks=2, detach=True) == ExitStatus.OK
    [run] = tmp_path.glob("runs/*")
    try:
        log = run / "events.jsonl"
        wait_until(lambda: log.exists() and log.read_text().count('"type": "commit"') > 1, 90)
        assert cli_typer.main(["hosts", "yield", "rank1"]) == ExitStatus.OK
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        [pid] = [event["pid"] for event in events if event["type"] == "hello" and event["host"] == "rank1"]
        worker, launcher = psutil.Process(pid), psutil.Process(launcher_pid(run))
        spent = lambda process: sum(process.cpu_times()[:2])  # noqa: E731
        before, began = (spent(worker), spent(launcher)), time.monotonic()
        time.sleep(10)
        passed = time.monotonic() - began
        assert spent(worker) - before[0] < 0.01 * passed
        assert spent(launcher) - before[1] < 0.02 * passed
        assert is_running(run), "the other was done before"
        assert cli_typer.main(["hosts", "yield", "rank1", "--back"]) == ExitStatus.OK
        wait_until(lambda: not is_running(run), 240)
    finally:
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(launcher_pid(run), 9)
    said = capfd.readouterr().out
    assert "rank1 is left out since step" in said and "rank1 takes part again" in said
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    told = [event["hosts"] for event in events if event["type"] == "generation"]
    assert told == [["rank0", "rank1"], ["rank0"], ["rank0", "rank1"]] and events[-2]["status"] == 0
    counted = Counter(
        (epoch, name)
        for event in events
        if event["type"] == "commit"
        for of_host in event["samples"].values()
        for epoch, names in of_host.items()
        for name in names
    )
    assert len(counted) == 5 * 240 and set(counted.values()) == {1}
