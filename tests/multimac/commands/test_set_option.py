"""`--set KEY=VALUE`: as if it stood in config.ini, in a new run and when that is resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_attach_stop import CONFIG
from waiting import wait_until

import cli_typer
from distributed.run_dir.log import read_events
from distributed.run_dir.summary import read_run
from whisper_tuner.errors import ExitStatus

PROJECT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_run_keeps_what_was_set_when_it_is_resumed(tmp_path):
    (tmp_path / "config.ini").write_text(CONFIG.format(project=PROJECT))
    command = [sys.executable, str(PROJECT / "cli_typer.py"), "finetune"]
    asked = ["tiny", "--set", "max_steps=30", "--set", "checkpoint_interval = 1", "--set", "learning_rate=2e-4"]
    process = subprocess.Popen([*command, *asked], cwd=tmp_path, stdout=subprocess.DEVNULL)

    def steps() -> list[int]:
        files = list(tmp_path.glob("runs/*/events.jsonl"))
        return [event["step"] for event in read_events(files[0])[0] if event["type"] == "step"] if files else []

    wait_until(steps, 60)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == ExitStatus.INTERRUPTED and 0 < max(steps()) < 30
    done = subprocess.run([*command, "--resume", "last"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == ExitStatus.OK and max(steps()) == 30, done.stdout + done.stderr
    [run] = tmp_path.glob("runs/2*")
    settings = read_run(run).settings
    assert (settings["max_steps"], settings["learning_rate"], settings["checkpoint_interval"]) == (30, 2e-4, 1)


def test_a_setting_given_as_an_option_is_named_as_one(capsys):
    assert cli_typer.main(["finetune", "demo", "--batch-size", "4"]) == 2
    assert "--set batch_size=VALUE" in capsys.readouterr().err
    assert cli_typer.main(["train", "recordings", "--batch-size", "4"]) == 2
    assert "a profile's batch_size in config.ini" in capsys.readouterr().err
