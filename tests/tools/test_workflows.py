"""The workflows of .github run nowhere here: their shell does, with a Mac's programs and a real sshd."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from bsd_tools import bsd_tools

import cli_typer
from distributed.checkup.selftest import run
from distributed.plan.hosts_file import load_hosts
from multimac.commands import selftest as command

PROJECT = Path(__file__).parents[2]
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (PROJECT / ".github" / "workflows").glob("*.yml")}
JOBS = [job for workflow in WORKFLOWS.values() for job in workflow["jobs"].values()]
STEPS = {
    f"{name}: {step['name']}": step["run"]
    for name, workflow in WORKFLOWS.items()
    for job in workflow["jobs"].values()
    for step in job["steps"]
    if "run" in step
}
BASH = [shutil.which("bash"), "--noprofile", "--norc", "-eo", "pipefail", "-c"]


def test_they_may_do_little_and_end():
    for workflow in WORKFLOWS.values():
        assert workflow["permissions"] == {"contents": "read"} and workflow["concurrency"]
    assert JOBS and all(job["timeout-minutes"] <= 120 for job in JOBS)
    uses = [step["uses"] for job in JOBS for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", used) for used in uses)


@pytest.mark.parametrize("step", STEPS)
def test_every_step_is_shell_and_what_it_calls_exists(step, capsys):
    assert subprocess.run([*BASH[:-1], "-n", "-c", STEPS[step]]).returncode == 0
    for arguments in re.findall(r"cli_typer\.py ([^|\n]+)", STEPS[step]):
        assert cli_typer.main([*arguments.split(), "--help"]) == 0, arguments
    targets = re.findall(r"^[a-z-]+(?=:)", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^make (\S+)", STEPS[step], re.MULTILINE)) <= set(targets)


@pytest.fixture
def mac(tmp_path, ssh_server, monkeypatch):
    """Runs a step of mac.yml in a folder, with a Mac's programs; Remote Login is a real sshd on another port."""
    home, clone, tools = tmp_path / "home", tmp_path / "clone", bsd_tools(tmp_path / "tools")
    (home / ".ssh").mkdir(parents=True)
    clone.mkdir()
    (clone / ".venv").symlink_to(sys.prefix)
    (tools / "ssh-keygen").symlink_to(shutil.which("ssh-keygen"))
    known = f"-p {ssh_server.port}"
    for name, words in {"ssh": f"{known} -o UserKnownHostsFile={home}/.ssh/known_hosts", "ssh-keyscan": known}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {shutil.which(name)} {words} "$@"\n')
        (tools / name).chmod(0o755)
    (tools / "sudo").write_text("#!/bin/sh\ntrue\n")  # launchctl and systemsetup: only a Mac has them
    (tools / "sudo").chmod(0o755)
    (ssh_server.folder / "authorized_keys").unlink()
    (ssh_server.folder / "authorized_keys").symlink_to(home / ".ssh" / "authorized_keys")
    ssh_server.known_hosts = home / ".ssh" / "known_hosts"
    ssh_server.configure(f"Host 127.0.0.1\n  Port {ssh_server.port}")
    monkeypatch.setenv("HOME", str(home))
    env = {"HOME": str(home), "PATH": str(tools), "GITHUB_ENV": str(clone / "env")}

    def step(name: str) -> None:
        subprocess.run([*BASH, STEPS[f"mac.yml: {name}"]], cwd=clone, env=env, check=True)
        if (clone / "env").exists():
            env.update(line.split("=") for line in (clone / "env").read_text().splitlines())

    step.clone = clone
    return step


@pytest.mark.slow
def test_a_mac_becomes_a_second_host_of_its_own(mac, ssh_server, monkeypatch, capsys):
    mac("The CPU, where the GPU computes nothing")
    mac("Remote Login to itself")
    mac("This Mac as a second host, with a folder of its own")
    hosts = load_hosts(mac.clone / "distributed_hosts.json")
    [worker] = hosts.workers
    assert worker.project_path != hosts.master.project_path and worker.device == hosts.master.device == "cpu"

    second = ssh_server.folder / "home" / "multimac-second"
    second.mkdir()
    (second / ".venv").symlink_to(sys.prefix)  # as `hosts setup` would make it
    quick = ("ssh", "code", "own address", "connect")
    monkeypatch.setattr(command, "CHECKS", [check for check in run.CHECKS if check.name in quick])
    files = {"hosts": mac.clone / "distributed_hosts.json", "out": mac.clone / "report.json"}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert cli_typer.main(["selftest", *options]) == 0, capsys.readouterr()
    assert json.loads(files["out"].read_text())["hosts"] == 2
    assert (second / "distributed" / "worker" / "main.py").exists()
