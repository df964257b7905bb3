"""Lab hosts that share one home and this repository's interpreter: quick to come up, real SSH and real links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from waiting import wait_until

PROJECT = Path(__file__).parents[2]
CONFIG = """
[profile:tiny]
base_model = {project}/bundled/model
train = {project}/bundled/data/train.csv
validation =
test =
epochs = 1
batch_size = 4
learning_rate = 3e-4
warmup_ratio = 0
num_threads = 1
device = cpu
seed = 3
"""


@pytest.fixture(scope="module")
def lab():
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("the lab needs Linux and root")
    from lab import Lab

    with Lab(hosts=3, rate=None, shared_home=True) as lab:
        yield lab


class Runner:
    """Starts the command line on the master h1, with a config.ini and hosts file of its own."""

    def __init__(self, lab, folder: Path):
        self.lab, self.folder = lab, folder
        self.names: dict[str, str] = {}  # in the hosts file, of hosts that are not known by their address

    def hosts(self, *names: str) -> Path:
        """A hosts file of h1 and `names`; each has a project folder of its own in the shared home."""
        called = {name: self.names.get(name, self.lab[name].address) for name in ("h1", *names)}
        workers = [{"host": called[name], "project_path": f"~/project-{name}"} for name in names]
        path = self.folder / "hosts.json"
        environment = str(Path(sys.executable).parent.parent)
        settings = {"master": called["h1"], "workers": workers, "python_env": environment}
        path.write_text(json.dumps(settings))
        return path

    def config(self, text: str) -> Path:
        path = self.folder / "config.ini"
        path.write_text(CONFIG.format(project=PROJECT) + text)
        return path

    def command(self, name: str, *workers: str, text: str = "") -> list[str]:
        options = ["--config", str(self.config(text)), "--hosts", str(self.hosts(*workers))]
        return [sys.executable, "cli_typer.py", "distributed-train", name, *options]

    def run(self, name: str, *workers: str, text: str = "") -> subprocess.CompletedProcess:
        done = self.lab.exec("h1", self.command(name, *workers, text=text), cwd=str(PROJECT), timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def start(self, name: str, *workers: str, text: str = "") -> subprocess.Popen:
        """Returns once every rank has trained a step."""
        before = self.run_dir
        process = self.lab.popen("h1", self.command(name, *workers, text=text), cwd=str(PROJECT))
        deadline = time.monotonic() + 120
        ranks = set(range(len(workers) + 1))
        while self.run_dir == before or {event["rank"] for event in self.events("step")} != ranks:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no step of every rank within 120 s"
            time.sleep(0.2)
        return process

    def resume(self, *options: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "cli_typer.py", "distributed-train", "--resume", str(self.run_dir)]
        command += ["--config", str(self.folder / "config.ini"), *options]
        return self.lab.exec("h1", command, cwd=str(PROJECT), timeout=600)

    @property
    def run_dir(self) -> Path | None:
        return max(self.folder.glob("runs/*"), default=None)

    def events(self, kind: str = "") -> list[dict]:
        path = self.run_dir / "events.jsonl" if self.run_dir else None
        if path is None or not path.exists():
            return []
        lines = path.read_text().split("\n")[:-1]  # the last one may be half written
        return [event for event in map(json.loads, lines) if kind in ("", event["type"])]

    def left_over(self) -> list[str]:
        """Workers and launchers that still live, on any host."""
        names = [("distributed.worker.main", host) for host in self.lab.hosts] + [("distributed.launcher.main", "h1")]
        return [f"{host}: {process}" for name, host in names for process in self.lab.processes(host, name)]

    def wait_until_gone(self, host: str, seconds: float) -> None:
        wait_until(lambda: not self.lab.processes(host, "distributed.worker.main"), seconds)

    def wait_until_nothing_is_left(self, seconds: float) -> None:
        wait_until(lambda: not self.left_over(), seconds, tell=self.left_over)


@pytest.fixture(scope="module")
def runner_in(lab) -> Callable[[Path], Runner]:
    return partial(Runner, lab)


@pytest.fixture
def runner(lab, runner_in, tmp_path) -> Runner:
    yield runner_in(tmp_path)
    for name in lab.hosts:
        lab.link(name, up=True)
        lab.pass_all(name)
        lab.kill(name, "distributed.")
        lab.kill(name, "cli_typer.py")
