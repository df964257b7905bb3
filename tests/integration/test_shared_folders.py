"""Lab hosts that all mount one folder, and one that has two names: refused before anything is changed there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from whisper_tuner.export.final import load_model

pytestmark = pytest.mark.lab
PROJECT = Path(__file__).parents[2]
SHORT = """
[distributed:short]
base_profile = tiny
strategy = allreduce
max_steps = 3
"""
UNCHECKED = """
import sys
import distributed.checkup.preflight as preflight
preflight.folder_problems = lambda *looks, **about: []
import cli_typer
sys.exit(cli_typer.main())
"""


@pytest.fixture(scope="module")
def lab():
    from lab import Lab

    with Lab(hosts=4, rate=None, shared_home=True) as lab:
        yield lab


def command(runner, workers: list[dict], **settings: object) -> list[str]:
    """Of a run whose hosts file has these workers, and these settings for all of them."""
    line = runner.command("short", "h2", text=SHORT)
    path = runner.folder / "hosts.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"workers": workers} | settings))
    return line


def run(runner, line: list[str]) -> subprocess.CompletedProcess:
    return runner.lab.exec("h1", line, cwd=str(PROJECT), timeout=300)


def all_hosts(lab) -> list[dict]:
    return [{"host": lab[name].address} for name in ("h2", "h3", "h4")]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["distributed-train", "hosts setup", "hosts sync"])
def test_four_hosts_with_one_project_folder_are_refused_by_name(lab, runner, what):
    line = command(runner, all_hosts(lab), project_path="~/one")
    options = line[line.index("--hosts") :]
    if what == "hosts setup":
        line = [*line[:2], *what.split(), *options]
    elif what == "hosts sync":
        line = [*line[:2], *what.split(), "short", *line[line.index("--config") :]]
    began = time.monotonic()
    done = run(runner, line)
    assert done.returncode == 5 and time.monotonic() - began < 60, done.stdout + done.stderr
    shared = ", ".join(f"{host['host']} (/root/one)" for host in all_hosts(lab))
    assert f"{shared}: these folders are the same" in done.stderr, done.stderr
    assert '"project_path": "~/multimac-whisper-{host}"' in done.stderr
    assert not (lab["h2"].home / "one").exists() and not list(lab["h2"].home.glob(".multimac-*"))
    assert runner.run_dir is None


@pytest.mark.slow
def test_workers_in_the_masters_own_checkout_are_refused(lab, runner):
    done = run(runner, command(runner, all_hosts(lab), project_path=str(PROJECT)))
    names = ", ".join(f"{host.address} ({PROJECT})" for host in lab.hosts.values())
    assert done.returncode == 5 and f"{names}: these folders are the same" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_machine_with_two_names_is_refused_and_trains_with_two_folders(lab, runner):
    (lab["h1"].home / ".ssh" / "config").write_text(f"Host twin\n  HostName {lab['h2'].address}\n")
    workers = [{"host": lab["h2"].address}, {"host": "twin"}]
    try:
        done = run(runner, command(runner, workers, project_path="~/of-two"))
        assert done.returncode == 5 and f"{lab['h2'].address} (/root/of-two), twin (/root/of-two)" in done.stderr
        done = run(runner, command(runner, workers, project_path="~/of-{host}"))
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        (lab["h1"].home / ".ssh" / "config").unlink()
    assert load_model(runner.run_dir / "final") and (lab["h2"].home / "of-twin" / "distributed").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True])
def test_a_model_stays_in_a_shared_folder_even_where_the_check_is_passed_over(lab, runner, lost):
    """The folder of the master's runs is that of the workers' runs. lost: the master's own rank, so a host saves."""
    line = command(runner, all_hosts(lab), project_path=str(runner.folder))
    done = run(runner, line)
    assert done.returncode == 5 and f"({runner.folder})" in done.stderr, done.stdout + done.stderr
    unchecked = [sys.executable, "-c", UNCHECKED, *line[2:]]
    process = lab.popen("h1", unchecked, cwd=str(PROJECT))
    while lost and not runner.events("step"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    if lost:
        lab.kill("h1", "distributed.worker.main")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert load_model(runner.run_dir / "final")
    assert not list(runner.run_dir.glob("final-*")) and not (runner.run_dir / "checkpoints").exists()
    shutil.rmtree(runner.folder / ".multimac")
