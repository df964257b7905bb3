"""Runs that go on without a terminal: real launchers, the bundled model."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from small_run import end_runs
from waiting import wait_until

import cli_typer
from distributed.launcher.follow import finishing
from distributed.run_dir.folder import is_running
from multimac.commands import attach_stop
from whisper_tuner.errors import ExitStatus

PROJECT = Path(__file__).parents[3]
CONFIG = """
[profile:tiny]
base_model = {project}/bundled/model
train = {project}/bundled/data/train.csv
validation =
test =
max_steps = 40
batch_size = 2
num_threads = 1
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "config.ini").write_text(CONFIG.format(project=PROJECT))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    end_runs(tmp_path)


def wait_for(text: str, events: Path) -> None:
    wait_until(lambda: events.exists() and text in events.read_text(), 60)


def test_detach_stop_resume_attach(folder, capfd):
    assert cli_typer.main(["finetune", "tiny", "--detach"]) == ExitStatus.OK
    [run] = folder.glob("runs/*")
    events = run / "events.jsonl"
    assert is_running(run)
    wait_for('"type": "step"', events)
    assert cli_typer.main(["runs", "stop"]) == ExitStatus.OK
    assert not is_running(run) and '"status": 130' in events.read_text()
    assert cli_typer.main(["runs", "attach"]) == ExitStatus.RUN
    assert "is not running" in capfd.readouterr().err
    assert cli_typer.main(["finetune", "--resume", "last", "--detach"]) == ExitStatus.OK
    assert cli_typer.main(["runs", "attach"]) == ExitStatus.OK
    out, _ = capfd.readouterr()
    assert "resumes after step" in out and f"model: {run / 'final'}" in out


@pytest.mark.slow
def test_a_stop_while_wer_is_measured_leaves_the_model(folder, capfd):
    config = folder / "config.ini"
    config.write_text(
        config.read_text().replace("= 40", "= 1").replace("test =", f"test = {PROJECT}/bundled/data/test.csv")
    )
    assert cli_typer.main(["finetune", "tiny", "--detach"]) == ExitStatus.OK
    [run] = folder.glob("runs/*")
    wait_for('"type": "evaluating"', run / "events.jsonl")
    assert cli_typer.main(["runs", "stop"]) == ExitStatus.OK
    last, written = map(json.loads, (run / "events.jsonl").read_text().splitlines()[-2:])
    assert last["status"] == ExitStatus.INTERRUPTED and "the model is in final/" in last["message"]
    assert written["type"] == "report" and Path(written["path"]).is_file()
    assert (run / "final/model.safetensors").is_file() and not (run / "wer.json").exists()
    trained = (run / "final/model.safetensors").read_bytes()
    assert cli_typer.main(["finetune", "--resume", "last"]) == ExitStatus.RUN
    assert "is trained to its end" in capfd.readouterr().err
    assert (run / "final/model.safetensors").read_bytes() == trained


@pytest.mark.slow
def test_a_run_that_is_stopped_at_once_leaves_a_report_too(folder, capfd):
    # It is asked to stop, and cut off 0.2 s later: in shorter steps it would have ended by then, and have been saved.
    assert cli_typer.main(["finetune", "tiny", "--detach", "--set", "batch_size=120"]) == ExitStatus.OK
    [run] = folder.glob("runs/*")
    wait_for('"type": "step"', run / "events.jsonl")
    assert cli_typer.main(["runs", "stop", "--now"]) == ExitStatus.OK
    assert "stopped at once" in (run / "report.html").read_text() and not (run / "final").exists()
    capfd.readouterr()
    assert cli_typer.main(["runs", "show"]) == ExitStatus.OK
    shown, _ = capfd.readouterr()
    assert re.search(rf"^report +runs/{run.name}/report.html *$", shown, re.M) and "multimac report" not in shown
    (run / "report.html").unlink()
    assert cli_typer.main(["runs", "show"]) == ExitStatus.OK
    assert f"  multimac report {run.name}\n" in capfd.readouterr().out


@pytest.mark.slow
def test_ctrl_c_stops_the_run_that_is_attached(folder):
    config = folder / "config.ini"
    config.write_text(config.read_text().replace("= 40", "= 4000"))
    assert cli_typer.main(["finetune", "tiny", "--detach"]) == ExitStatus.OK
    [run] = folder.glob("runs/*")
    wait_for('"type": "step"', run / "events.jsonl")
    command = [sys.executable, str(PROJECT / "cli_typer.py"), "runs", "attach"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attached:
        attached.stdout.readline()  # it follows the run
        attached.send_signal(signal.SIGINT)
        said, _ = attached.communicate(timeout=60)
    assert attached.returncode == ExitStatus.INTERRUPTED and "finishing the step, then saving; Ctrl-C again" in said
    assert not is_running(run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_as_a_run_is_detached_ends_its_launcher(tmp_path, monkeypatch, number):
    started = []

    def launch(run_dir: Path, **_) -> subprocess.Popen:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        os.kill(os.getpid(), number)
        return started[0]

    monkeypatch.setattr(attach_stop, "start_launcher", launch)
    assert attach_stop.start(Console(), tmp_path, detach=True) == ExitStatus.INTERRUPTED
    assert started[0].wait(10) == -signal.SIGTERM


def test_an_exchange_is_waited_for_only_where_there_are_several_ranks():
    assert finishing(1) == "finishing the step, then saving"
    assert "an exchange that is on its way is waited for" in finishing(2)
