"""Commands started as `nohup multimac ... &` in a script does: SIGINT and SIGHUP ignored, no terminal."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import end_runs
from test_attach_stop import CONFIG
from waiting import wait_until

from distributed.run_dir.folder import is_running
from whisper_tuner.errors import ExitStatus

PROJECT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.ini").write_text(CONFIG.format(project=PROJECT))
    yield tmp_path
    end_runs(tmp_path)


def background(folder: Path, *arguments: str) -> subprocess.Popen:
    ignoring = ["sh", "-c", 'trap "" INT HUP QUIT; exec "$@"', "sh"]
    command = [sys.executable, str(PROJECT / "cli_typer.py"), *arguments]
    with (folder / "nohup.out").open("ab") as out:
        return subprocess.Popen(
            [*ignoring, *command], cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def training(folder: Path, process: subprocess.Popen, text: str = '"type": "step"') -> Path:
    """The run's folder, once it trains."""

    def found() -> list[Path]:
        return [events for events in folder.glob("runs/*/events.jsonl") if text in events.read_text()]

    wait_until(lambda: found() or process.poll() is not None, 60)
    assert process.poll() is None, (folder / "nohup.out").read_text()
    return found()[0].parent


@pytest.mark.slow
def test_sigterm_and_runs_stop_end_in_order_and_the_run_can_be_resumed(folder):
    process = background(folder, "finetune", "tiny")
    run = training(folder, process)
    for number in (signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)  # ignored, as they were
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == ExitStatus.INTERRUPTED
    assert not is_running(run) and (run / "final/model.safetensors").is_file()
    said = (folder / "nohup.out").read_text()
    assert "finishing the step, then saving" in said and f"--resume {run}" in said
    resumed = background(folder, "finetune", "--resume", "last")
    training(folder, resumed, '"type": "resume"')
    assert background(folder, "runs", "stop").wait(30) == ExitStatus.OK
    assert resumed.wait(10) == ExitStatus.INTERRUPTED and not is_running(run)
