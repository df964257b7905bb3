"""Runs that go on without a terminal: real launchers, the bundled model."""

import contextlib
import os
import time
from pathlib import Path

import pytest

import cli_typer
from whisper_tuner.errors import ExitStatus
from whisper_tuner.runs import is_running, launcher_pid

PROJECT = Path(__file__).parents[2]
CONFIG = """
[profile:tiny]
base_model = {project}/bundled/model
train = {project}/bundled/data/train.csv
max_steps = 40
batch_size = 2
num_threads = 1
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "config.ini").write_text(CONFIG.format(project=PROJECT))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for run in tmp_path.glob("runs/*"):
        if pid := launcher_pid(run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


def test_detach_stop_resume_attach(folder, capfd):
    assert cli_typer.main(["finetune", "tiny", "--detach"]) == ExitStatus.OK
    [run] = folder.glob("runs/*")
    events = run / "events.jsonl"
    deadline = time.monotonic() + 60
    while not (events.exists() and '"type": "step"' in events.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert is_running(run)
    assert cli_typer.main(["runs", "stop"]) == ExitStatus.OK
    assert not is_running(run) and '"status": 130' in events.read_text()
    assert cli_typer.main(["runs", "attach"]) == ExitStatus.RUN
    assert "is not going on" in capfd.readouterr().err
    assert cli_typer.main(["finetune", "--resume", "last", "--detach"]) == ExitStatus.OK
    deadline = time.monotonic() + 30
    while not is_running(run):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert cli_typer.main(["runs", "attach"]) == ExitStatus.OK
    out, _ = capfd.readouterr()
    assert "goes on after step" in out and f"model: {run / 'final'}" in out
