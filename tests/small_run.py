"""A profile with a few real clips, and what is made of it in a run's folder."""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import signal
from pathlib import Path

import pytest

from distributed.plan.job import Job, resolve
from distributed.plan.prepare import Prepared, prepare_run
from distributed.run_dir.folder import launcher_pid
from distributed.ssh.host import Host, Hosts
from whisper_tuner.config import ConfigFile

PROJECT = Path(__file__).parents[1]
CONFIG = f"""
[profile:tiny]
base_model = {PROJECT}/bundled/model
train = train.csv
validation = validation.csv
test = test.csv
batch_size = 2
epochs = 3

[distributed:pair]
base_profile = tiny
communication_interval = 2
"""
CLIPS = {"train": 12, "validation": 4, "test": 2}
MASTER = Host(address="127.0.0.1")
PAIR = Hosts(master=MASTER, workers=(Host(address="twin"),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """config.ini, and a few of the bundled clips."""
    data = PROJECT / "bundled" / "data"
    for kind, count in CLIPS.items():
        rows = list(csv.reader((data / f"{kind}.csv").open(encoding="utf-8")))[: count + 1]
        with (tmp_path / f"{kind}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
        (tmp_path / kind).mkdir()
        for row in rows[1:]:
            shutil.copy(data / row[1], tmp_path / row[1])
    (tmp_path / "config.ini").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def job(folder: Path) -> Job:
    return resolve(ConfigFile(folder / "config.ini"), "pair")


@pytest.fixture
def run_dir(folder: Path) -> Path:
    (folder / "runs" / "a-run").mkdir(parents=True)
    return folder / "runs" / "a-run"


@pytest.fixture
def prepared(job: Job, run_dir: Path) -> Prepared:
    """The run on PAIR, saved as before its launcher starts."""
    found = prepare_run(job, run_dir, hosts=PAIR, machine_workers=(1, 1))
    found.launch.save(run_dir)
    return found


def end_runs(folder: Path) -> None:
    """Kill the launchers that are left of the runs in a folder."""
    for run in folder.glob("runs/*"):
        if pid := launcher_pid(run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
