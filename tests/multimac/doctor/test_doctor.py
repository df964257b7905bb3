"""The quick checks, and how findings are shown."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from multimac.doctor import macos as mac
from multimac.doctor.checks import Check, State, examine, exit_status, ok, problem, skipped, warning
from multimac.doctor.machine import (
    check_environment,
    check_folders,
    check_packages,
    check_rivals,
    guarded,
    judge_disk,
    judge_mac,
)
from multimac.doctor.services import check_ssh_keys, check_ssh_server, judge_firewall, judge_sleep
from whisper_tuner.errors import DataError, ExitStatus

PROJECT = Path(__file__).parents[3]
M2 = mac.Hardware(chip="Apple M2", model="Mac14,2", memory="16 GB")


def fail(error: Exception):
    raise error


def test_a_check_that_raises_is_a_problem_and_does_not_hide_the_next():
    findings = examine(
        [
            Check("data", lambda: fail(DataError("no clips", remedy="add some"))),
            Check("gpu", lambda: fail(RuntimeError("MPS backend out of memory\nsecond line"))),
            Check("rest", lambda: ok("fine")),
        ]
    )
    assert [(f.name, f.state) for f in findings] == [("data", "problem"), ("gpu", "problem"), ("rest", "ok")]
    assert (findings[0].detail, findings[0].remedy) == ("no clips", "add some")
    assert findings[1].detail == "the check itself failed: RuntimeError: MPS backend out of memory"


def test_only_problems_fail():
    assert exit_status([ok("a"), warning("b", "c"), skipped("d")]) == ExitStatus.OK
    assert exit_status([ok("a"), problem("b")]) == ExitStatus.HOST


@pytest.mark.parametrize(
    ("machine", "translated", "hardware", "release", "state", "words"),
    [
        ("arm64", False, M2, "15.5", State.OK, "macOS 15.5, Apple M2, Mac14,2, 16 GB memory, 8 cores"),
        ("x86_64", None, mac.Hardware(chip="Intel Core i5"), "13.6", State.PROBLEM, "an Intel Mac"),
        ("x86_64", True, M2, "15.5", State.OK, "Apple M2"),  # the row about Python speaks of Rosetta
        ("arm64", False, M2, "13.6", State.WARNING, "macOS 13.6"),
        ("arm64", False, mac.Hardware(), "15.5", State.OK, "hardware unknown"),
    ],
)
def test_kinds_of_mac(machine, translated, hardware, release, state, words):
    found = judge_mac(release, machine, translated, hardware, "8 cores")
    assert found.state is state
    assert words in found.detail


def test_packages_outside_of_the_ranges_are_all_named(tmp_path):
    lines = 'dependencies = ["torch>=99", "no-such-package", "numpy>=1"]'
    (tmp_path / "pyproject.toml").write_text(f"[project]\n{lines}\n")
    found = check_packages(tmp_path)
    assert found.state is State.PROBLEM
    assert "torch 2" in found.detail and "(needs >=99)" in found.detail
    assert "no-such-package is missing" in found.detail
    assert "numpy" not in found.detail


def test_the_packages_of_this_project_fit():
    assert check_packages().state is State.OK


def test_rival_packages_are_named(tmp_path):
    for name in ("distributed", "gym"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    found = check_rivals(path=[str(PROJECT), str(PROJECT / "gym"), str(tmp_path)])
    assert found.state is State.WARNING
    assert f"distributed in {tmp_path}" in found.detail and f"gym in {tmp_path}" in found.detail
    assert "exogym" not in found.detail


def test_a_package_loaded_from_another_clone_is_a_problem(tmp_path):
    found = check_rivals(project=tmp_path, path=[])
    assert found.state is State.PROBLEM
    assert "is loaded from" in found.detail


def test_gym_as_a_package_is_a_problem(tmp_path):
    (tmp_path / "gym").mkdir()
    (tmp_path / "gym" / "__init__.py").touch()
    assert "gym/__init__.py" in check_rivals(project=tmp_path).detail


@pytest.mark.parametrize(("free", "state"), [(5e8, State.PROBLEM), (5e9, State.WARNING), (5e10, State.OK)])
def test_disk(free, state):
    assert judge_disk({Path("/a"): free, Path("/b"): 5e11}).state is state


def test_a_runs_folder_that_cannot_be_made_is_a_problem(tmp_path):
    (tmp_path / "file").touch()
    found = check_folders(tmp_path, tmp_path / "file" / "runs")
    assert found.state is State.PROBLEM
    assert f"{tmp_path}/file" in found.detail
    assert check_folders(tmp_path, tmp_path / "runs" / "new").state is State.OK


def test_folders_that_macos_guards():
    home = Path("/Users/me")
    assert guarded(home / "Documents" / "multimac", home).endswith("Documents")
    assert guarded(Path("/Volumes/USB/multimac"), home) == "/Volumes"
    assert guarded(home / "multimac-whisper", home) == ""


def test_environment_variables_that_bite_are_named_and_others_shown():
    found = check_environment({"PYTORCH_ENABLE_MPS_FALLBACK": "1", "OMP_NUM_THREADS": "2", "HOME": "/x"})
    assert found.state is State.WARNING
    assert "PYTORCH_ENABLE_MPS_FALLBACK=1" in found.detail
    assert found.remedy == "unset PYTORCH_ENABLE_MPS_FALLBACK"
    assert found.figures == {"PYTORCH_ENABLE_MPS_FALLBACK": "1", "OMP_NUM_THREADS": "2"}
    assert check_environment({"OMP_NUM_THREADS": "2"}).state is State.OK


@pytest.fixture
def answering():
    """A port on loopback that answers with a given banner."""
    servers = []

    def serve(banner: bytes) -> int:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)
        threading.Thread(target=lambda: server.accept()[0].sendall(banner), daemon=True).start()
        return server.getsockname()[1]

    yield serve
    for server in servers:
        server.close()


def test_an_ssh_server_is_told_from_another(answering):
    found = check_ssh_server(answering(b"SSH-2.0-OpenSSH_9.9\r\n"))
    assert (found.state, found.detail.split(" on ")[0]) == (State.OK, "SSH-2.0-OpenSSH_9.9")
    assert "no SSH server" in check_ssh_server(answering(b"HTTP/1.1 400\r\n")).detail


def test_no_ssh_server_is_a_warning():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert check_ssh_server(port).state is State.WARNING


def test_ssh_keys(tmp_path):
    assert "ssh-keygen" in check_ssh_keys(tmp_path, {}).remedy
    key = tmp_path / "id_ed25519"
    key.touch(mode=0o600)
    assert check_ssh_keys(tmp_path, {}).state is State.OK
    key.chmod(0o644)
    assert check_ssh_keys(tmp_path, {}).remedy == "chmod 600 ~/.ssh/id_ed25519"


@pytest.mark.parametrize(
    ("sleep", "power", "state", "words"),
    [
        (mac.Sleep(minutes=0), mac.Power(on_battery=False), State.OK, "never sleeps by itself, on mains power"),
        (mac.Sleep(minutes=10), mac.Power(on_battery=False), State.WARNING, "sleeps after 10 min"),
        (mac.Sleep(minutes=0), mac.Power(on_battery=True, percent=40), State.WARNING, "on battery at 40%"),
        (mac.Sleep(minutes=1, held_by=("caffeinate",)), None, State.WARNING, "awake just now by caffeinate"),
        (None, None, State.WARNING, "pmset"),
    ],
)
def test_sleep(sleep, power, state, words):
    found = judge_sleep(sleep, power, caffeinate=True)
    assert found.state is state
    assert words in found.detail


@pytest.mark.parametrize(
    ("state", "expected"),
    [("off", State.OK), ("on", State.WARNING), ("blocks all", State.PROBLEM), (None, State.WARNING)],
)
def test_the_firewall(state, expected):
    assert judge_firewall(state).state is expected


def run_doctor(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROJECT / "cli_typer.py"), "doctor", *arguments]
    environment = os.environ | {"COLUMNS": "80", "PYTHONPATH": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_plain_doctor_fits_80_columns_and_json_is_only_json():
    shown = run_doctor()
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "rival packages" in shown.stdout
    done = run_doctor("--json")
    report = json.loads(done.stdout)
    assert (report["exit_status"], report["deep"]) == (0, False)
    named = {finding["name"]: finding for finding in report["findings"]}
    assert named["packages"]["figures"]["torch"].startswith("2.")
    assert {"system", "python", "disk", "device", "ssh server", "sleep", "firewall"} <= set(named)


def test_an_unknown_profile_is_a_mistake_in_the_call(tmp_path):
    (tmp_path / "config.ini").write_text("[profile:mine]\nbase_model = a/b\ntrain = no.csv\n")
    done = run_doctor("--config", str(tmp_path / "config.ini"), "--profile", "yours")
    assert done.returncode == ExitStatus.CONFIG
    assert "Known: mine" in done.stderr


@pytest.mark.slow
def test_doctor_deep_passes_on_this_machine():
    done = run_doctor("--deep", "--profile", "demo", "--config", str(PROJECT / "config.ini"), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    states = {finding["name"]: finding["state"] for finding in json.loads(done.stdout)["findings"]}
    deep = ("gradients", "large batch", "staging", "two ranks", "audio formats")
    assert {name: states[name] for name in deep} == dict.fromkeys(deep, "ok")
