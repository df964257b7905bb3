"""The quick checks, and how findings are shown."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from distributed.plan.job import resolve
from distributed.preflight.look import Look
from distributed.preflight.report import HostFacts
from distributed.ssh.host import Host
from multimac.doctor import macos
from multimac.doctor.checks import Check, State, examine, exit_status, ok, problem, skipped, warning
from multimac.doctor.machine import (
    ThisMachine,
    check_environment,
    check_packages,
    guarded,
    judge_device,
    judge_macos,
    rival_files,
    shortened,
)
from multimac.doctor.services import check_ssh_keys, check_ssh_server, judge_firewall, judge_sleep
from whisper_tuner.config import ConfigFile
from whisper_tuner.errors import DataError, ExitStatus

PROJECT = Path(__file__).parents[3]
TORCH = {"version": "2.13.0", "threads": 2, "cuda": 0, "cuda_memory": 0, "cuda_name": "", "mps": False, "mps_memory": 0}
M2 = macos.Hardware(chip="Apple M2", model="Mac14,2", memory="16 GB")


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
        ("x86_64", None, macos.Hardware(chip="Intel Core i5"), "13.6", State.PROBLEM, "an Intel Mac"),
        ("x86_64", True, M2, "15.5", State.OK, "Apple M2"),  # the row about Python speaks of Rosetta
        ("arm64", False, M2, "13.6", State.WARNING, "macOS 13.6"),
        ("arm64", False, macos.Hardware(), "15.5", State.OK, "hardware unknown"),
    ],
)
def test_kinds_of_mac(machine, translated, hardware, release, state, words):
    found = judge_macos(release, machine, translated, hardware, "8 cores")
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


def test_a_package_loaded_from_another_clone_is_a_problem(tmp_path):
    found = rival_files(tmp_path)
    assert found.state is State.PROBLEM
    assert "is loaded from" in found.detail


def test_gym_as_a_package_is_a_problem(tmp_path):
    (tmp_path / "gym").mkdir()
    (tmp_path / "gym" / "__init__.py").touch()
    assert "gym/__init__.py" in rival_files(tmp_path).detail
    assert rival_files(PROJECT) is None


def this_machine(tmp_path, *, torch: dict = TORCH, free: float = 5e11, **facts) -> ThisMachine:
    """As if the preflight had found this."""
    memory = {"total": 16 * 10**9, "available": 8 * 10**9, "machine": "m"}
    known = {"training": True, "python": [3, 12, 1], "executable": "/env/bin/python", "venv": True, "memory": memory}
    here = ThisMachine(None, tmp_path / "runs")
    here.look = Look(0, HostFacts(host=Host(address="this machine")))
    here.look.session = contextlib.nullcontext()
    here.look.session.close = lambda: None
    here.look.facts.facts = known | {"versions": {"torch": "2.13.0"}, "rivals": [], "system": "Linux"} | facts
    here.look.facts.torch = torch
    here.look.spaces = [{"root": "/a", "free": 5e11, "held": 0}, {"root": "/b", "free": free, "held": 0}]
    here.look.facts.space = here.look.spaces[-1]
    return here


@pytest.mark.parametrize(
    ("row", "changes", "state", "words"),
    [
        ("python", {}, State.OK, "python"),
        ("python", {"python": [3, 9, 6]}, State.PROBLEM, "Python 3.9.6 at /env/bin/python; needs >=3.11"),
        ("rivals", {"rivals": [["exogym", "/site", True]]}, State.PROBLEM, "another exogym would be loaded: /site"),
        ("rivals", {"rivals": [["exogym", "/site", False]]}, State.WARNING, "another exogym is installed in /site"),
        ("disk", {}, State.OK, "500.0 GB free for /a; 500.0 GB free for /b"),
        ("disk", {"free": 5e9}, State.WARNING, "5.0 GB free for /b"),
        ("disk", {"free": 5e8}, State.PROBLEM, "500.0 MB free for /b, but 1.0 GB needed"),
        ("memory", {}, State.OK, "8.0 GB free of 16.0 GB"),
        ("memory", {"memory": {"total": 8 * 10**9, "available": 10**9}}, State.WARNING, "only 1.0 GB are free now"),
        ("device", {}, State.OK, "cpu, threads: 2; torch 2.13.0"),
        ("device", {"torch": {"failed": "no libgomp"}}, State.PROBLEM, "torch does not load: no libgomp"),
        ("device", {"torch": {"late": True}}, State.WARNING, "importing torch took too long"),
        ("device", {"torch": None, "versions": {}}, State.PROBLEM, "torch is not installed"),
    ],
)
def test_what_the_preflight_finds_of_this_machine(tmp_path, row, changes, state, words):
    found = getattr(this_machine(tmp_path, **changes), row)()
    assert (found.state, words in found.detail) == (state, True), found
    assert found.remedy or state is State.OK


def test_the_needs_of_a_profile_count(tmp_path):
    """Of Whisper large, all of it trained, no 16 GB are enough."""
    (tmp_path / "config.ini").write_text(
        f"[profile:big]\nbase_model = openai/whisper-large-v3\ntrain = {tmp_path}/no.csv\nmethod = full\n"
    )
    here = this_machine(tmp_path, free=20e9)
    here.job = resolve(ConfigFile(tmp_path / "config.ini"), "big")
    assert here.disk().state is State.PROBLEM and "needed" in here.disk().detail
    assert here.memory().state is not State.OK and "memory" in here.memory().detail


@pytest.mark.parametrize(
    ("name", "torch", "chip", "state", "words"),
    [
        ("mps", {"mps": True, "mps_memory": 12 * 10**9}, "Apple M2", State.OK, "mps: 12.0 GB recommended"),
        ("mps", {"mps": True, "mps_memory": 12 * 10**9}, "Apple M2", State.OK, "pytorch 177116"),
        ("mps", {"mps": True, "mps_memory": 12 * 10**9}, "Apple M4", State.OK, "for the GPU; torch 2.13.0"),
        ("cpu", {}, "Apple M2", State.PROBLEM, "finds no Metal GPU"),
        ("cuda", {"cuda": 1, "cuda_name": "H200", "cuda_memory": 10**9}, None, State.OK, "cuda: H200, 1.0 GB"),
    ],
)
def test_devices(name, torch, chip, state, words):
    found = judge_device(name, TORCH | torch, chip)
    assert (found.state, words in found.detail) == (state, True), found


def test_a_runs_folder_that_cannot_be_made_is_a_problem(tmp_path):
    (tmp_path / "file").touch()
    here = ThisMachine(None, tmp_path / "file" / "runs")
    found = here.folders()
    assert (found.state, f"{tmp_path}/file cannot be used" in found.detail) == (State.PROBLEM, True), found
    here.look.session.close()


def test_paths_do_not_tell_the_users_name():
    home = Path.home()
    assert shortened(f"5 GB free for {home}/runs; /data{home}/x") == f"5 GB free for ~/runs; /data{home}/x"


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
        (macos.Sleep(minutes=0), macos.Power(on_battery=False), State.OK, "never sleeps by itself, on mains power"),
        (macos.Sleep(minutes=10), macos.Power(on_battery=False), State.WARNING, "sleeps after 10 min"),
        (macos.Sleep(minutes=0), macos.Power(on_battery=True, percent=40), State.WARNING, "on battery at 40%"),
        (macos.Sleep(minutes=1, held_by=("caffeinate",)), None, State.WARNING, "awake just now by caffeinate"),
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


def start_doctor(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, str(PROJECT / "cli_typer.py"), "doctor", *arguments]
    environment = os.environ | {"COLUMNS": "80", "PYTHONPATH": ""}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def run_doctor(*arguments: str) -> tuple[int, str, str]:
    process = start_doctor(*arguments)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def test_plain_doctor_fits_80_columns_and_json_is_only_json():
    plain = start_doctor()
    status, out, _ = run_doctor("--json")
    shown, said = plain.communicate(timeout=60)
    assert plain.returncode == 0, shown + said
    assert max(map(len, shown.splitlines())) <= 80
    assert "rival packages" in shown
    report = json.loads(out)
    assert (status, report["exit_status"], report["deep"]) == (0, 0, False)
    named = {finding["name"]: finding for finding in report["findings"]}
    assert named["packages"]["figures"]["torch"].startswith("2.")
    assert {"system", "python", "disk", "device", "ssh server", "sleep", "firewall"} <= set(named)


def test_an_unknown_profile_is_a_mistake_in_the_call(tmp_path):
    (tmp_path / "config.ini").write_text("[profile:mine]\nbase_model = a/b\ntrain = no.csv\n")
    status, _, said = run_doctor("--config", str(tmp_path / "config.ini"), "--profile", "yours")
    assert (status, "Known: mine" in said) == (ExitStatus.CONFIG, True)


@pytest.mark.slow
def test_doctor_deep_passes_on_this_machine():
    status, out, said = run_doctor("--deep", "--profile", "demo", "--config", str(PROJECT / "config.ini"), "--json")
    assert status == 0, out + said
    states = {finding["name"]: finding["state"] for finding in json.loads(out)["findings"]}
    deep = ("gradients", "large batch", "staging", "two ranks", "audio formats")
    assert {name: states[name] for name in deep} == dict.fromkeys(deep, "ok")
