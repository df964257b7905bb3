"""The quick checks, and how findings are shown.

Outputs are as macOS's manual pages and published transcripts show them; none was recorded on a Mac of ours.
"""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment

from distributed.checkup import programs
from distributed.checkup.doctor.machine import (
    check_environment,
    check_packages,
    check_ssh_keys,
    check_ssh_server,
    found_rivals,
    guarded,
    judge_device,
    judge_display,
    judge_firewall,
    judge_macos,
    judge_sleep,
    machine_checks,
    shortened,
)
from distributed.checkup.findings import Check, Finding, Severity, examine, exit_status, ok, problem, skipped, warning
from distributed.checkup.look import Look
from distributed.plan.job import resolve
from distributed.ssh.host import Host
from whisper_tuner.config import ConfigFile
from whisper_tuner.errors import DataError, ExitStatus

OK, SKIPPED, WARNING, ERROR = Severity
PROJECT = Path(__file__).parents[4]
TORCH = {"version": "2.13.0", "threads": 2, "cuda": 0, "cuda_memory": 0, "cuda_name": "", "mps": False, "mps_memory": 0}
M2 = programs.Hardware(chip="Apple M2", model="Mac14,2", memory="16 GB")


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
    assert [(f.check, f.severity) for f in findings] == [("data", "error"), ("gpu", "error"), ("rest", "ok")]
    assert (findings[0].what, findings[0].remedy) == ("no clips", "add some")
    assert findings[1].what == "the check itself failed: RuntimeError: MPS backend out of memory"


def test_only_problems_fail():
    assert exit_status([ok("a"), warning("b", "c"), skipped("d")]) == ExitStatus.OK
    assert exit_status([ok("a"), problem("b")]) == ExitStatus.HOST


@pytest.mark.parametrize(
    ("machine", "translated", "hardware", "release", "state", "words"),
    [
        ("arm64", False, M2, "15.5", OK, "macOS 15.5, Apple M2, Mac14,2, 16 GB memory, 8 cores"),
        ("x86_64", None, programs.Hardware(chip="Intel Core i5"), "13.6", ERROR, "an Intel Mac"),
        ("x86_64", True, M2, "15.5", OK, "Apple M2"),  # the row about Python speaks of Rosetta
        ("arm64", False, M2, "13.6", WARNING, "macOS 13.6"),
        ("arm64", False, programs.Hardware(), "15.5", OK, "hardware unknown"),
    ],
)
def test_kinds_of_mac(machine, translated, hardware, release, state, words):
    found = judge_macos(release, machine, translated, hardware, "8 cores")
    assert found.severity is state
    assert words in found.what


def test_packages_outside_of_the_ranges_are_all_named(tmp_path):
    lines = 'dependencies = ["torch>=99", "no-such-package", "numpy>=1"]'
    (tmp_path / "pyproject.toml").write_text(f"[project]\n{lines}\n")
    found = check_packages(tmp_path)
    assert found.severity is ERROR
    assert "torch 2" in found.what and "(needs >=99)" in found.what
    assert "no-such-package is missing" in found.what
    assert "numpy" not in found.what


def test_the_packages_of_this_project_fit():
    assert check_packages().severity is OK


@pytest.mark.parametrize("system", ["darwin", "linux"])
@pytest.mark.parametrize("torch", ["2.13.0", "2.14.1"])
def test_macs_need_the_torch_that_sums_rightly(monkeypatch, system, torch):
    """2.14 mends sums on M1 and M2 and an abort on macOS 27 (pytorch 183535, 197796)."""
    known = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: torch if name == "torch" else known(name))
    there = default_environment() | {"sys_platform": system}
    monkeypatch.setattr("packaging.markers.default_environment", lambda: there)
    found = check_packages()
    assert (found.severity is ERROR) == ((system, torch) == ("darwin", "2.13.0")), found
    assert found.severity is OK or found.what == "torch 2.13.0 (needs <2.15,>=2.14)"


def test_gym_as_a_package_is_a_problem(tmp_path):
    (tmp_path / "gym").mkdir()
    (tmp_path / "gym" / "__init__.py").touch()
    assert "gym/__init__.py" in found_rivals(tmp_path).what
    assert found_rivals(PROJECT).severity is not ERROR


@pytest.fixture
def rows(monkeypatch, tmp_path):
    """The rows of doctor, as if the preflight had found this."""

    def judge(*, job=None, torch: dict | None = TORCH, free=(4e11, 5e11), **facts) -> dict[str, Finding]:
        memory = {"total": 16 * 10**9, "available": 8 * 10**9, "machine": "m"}
        known = {"training": True, "python": [3, 12, 1], "executable": "/env/bin/python", "venv": True}
        look = Look(0, Host(address="this machine"))
        look.facts.facts = known | {"memory": memory, "versions": {}, "rivals": [], "system": "Linux"} | facts
        look.facts.torch = torch
        roots = zip(("/project", "/runs"), free, strict=True)
        look.facts.spaces = [{"root": root, "free": room, "held": 0} for root, room in roots]
        monkeypatch.setattr("distributed.checkup.look.look_here", lambda folders, seconds: look)
        return {finding.check: finding for finding in examine(machine_checks(job, tmp_path / "runs"))}

    return judge


@pytest.mark.parametrize(
    ("row", "changes", "state", "words"),
    [
        ("python", {}, OK, "python"),
        ("disk", {}, OK, "400.0 GB free for /project; 500.0 GB free for /runs"),
        ("disk", {"free": (5e9, 5e11)}, WARNING, "5.0 GB free for /project"),
        ("disk", {"free": (4e11, 5e9)}, WARNING, "5.0 GB free for /runs"),
        ("disk", {"free": (4e11, 5e8)}, ERROR, "500.0 MB free for /runs, but 1.0 GB needed"),
        ("memory", {}, OK, "8.0 GB free of 16.0 GB"),
        ("memory", {"memory": {"total": 8 * 10**9, "available": 10**9}}, WARNING, "only 1.0 GB are free now"),
        ("device", {}, OK, "cpu, threads: 2; torch 2.13.0"),
        ("device", {"torch": None}, ERROR, "torch is not installed"),
    ],
)
def test_what_the_preflight_finds_of_this_machine(rows, row, changes, state, words):
    found = rows(**changes)[row]
    assert (found.severity, words in found.what) == (state, True), found
    assert found.remedy or state is OK


def test_the_needs_of_a_profile_count(rows, tmp_path):
    """Of Whisper large, all of it trained, no 16 GB are enough."""
    (tmp_path / "config.ini").write_text(
        f"[profile:big]\nbase_model = openai/whisper-large-v3\ntrain = {tmp_path}/no.csv\nmethod = full\n"
    )
    found = rows(job=resolve(ConfigFile(tmp_path / "config.ini"), "big"), free=(20e9, 20e9))
    assert found["disk"].severity is ERROR and "needed" in found["disk"].what
    assert found["memory"].severity is not OK and "memory" in found["memory"].what


@pytest.mark.parametrize(
    ("name", "torch", "chip", "state", "words"),
    [
        (
            "mps",
            {"mps": True, "mps_memory": 12 * 10**9},
            "Apple M2",
            OK,
            "mps: 12.0 GB recommended for the GPU; torch 2",
        ),
        ("cpu", {}, "Apple M2", ERROR, "finds no Metal GPU"),
        ("cuda", {"cuda": 1, "cuda_name": "H200", "cuda_memory": 10**9}, None, OK, "cuda: H200, 1.0 GB"),
    ],
)
def test_devices(name, torch, chip, state, words):
    found = judge_device(name, TORCH | torch, chip)
    assert (found.severity, words in found.what) == (state, True), found


def test_a_runs_folder_that_cannot_be_made_is_a_problem(tmp_path):
    (tmp_path / "file").touch()
    [check] = [check for check in machine_checks(None, tmp_path / "file" / "runs") if check.name == "project folder"]
    found = check.look()
    assert (found.severity, f"{tmp_path}/file cannot be used" in found.what) == (ERROR, True), found


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
    assert found.severity is WARNING
    assert "PYTORCH_ENABLE_MPS_FALLBACK=1" in found.what
    assert found.remedy == "unset PYTORCH_ENABLE_MPS_FALLBACK"
    assert found.figures == {"PYTORCH_ENABLE_MPS_FALLBACK": "1", "OMP_NUM_THREADS": "2"}
    assert check_environment({"OMP_NUM_THREADS": "2"}).severity is OK


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
    assert (found.severity, found.what.split(" on ")[0]) == (OK, "SSH-2.0-OpenSSH_9.9")
    assert "no SSH server" in check_ssh_server(answering(b"HTTP/1.1 400\r\n")).what


def test_no_ssh_server_is_a_warning():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert check_ssh_server(port).severity is WARNING


def test_ssh_keys(tmp_path):
    assert "ssh-keygen" in check_ssh_keys(tmp_path, {}).remedy
    key = tmp_path / "id_ed25519"
    key.touch(mode=0o600)
    assert check_ssh_keys(tmp_path, {}).severity is OK
    key.chmod(0o644)
    assert check_ssh_keys(tmp_path, {}).remedy == "Run: chmod 600 ~/.ssh/id_ed25519"


# What macOS's programs say.

HARDWARE = """{"SPHardwareDataType": [{"_name": "hardware_overview", "chip_type": "Apple M2 Pro", "machine_model":
"Mac14,10", "number_processors": "proc 12:0:8:4", "physical_memory": "16 GB", "serial_number": "SECRET"}]}"""
PMSET = """System-wide power settings:
 SleepDisabled\t\t0
Currently in use:
 standby              1
 Sleep On Power Button 1
 hibernatefile        /var/vm/sleepimage
 powernap             1
 disksleep            10
 sleep                {sleep}
 displaysleep         2 (display sleep prevented by Safari)
 tcpkeepalive         1
"""
BATTERY = "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=22806627)\t78%; discharging; 5:05 remaining\n"
MAINS = "Now drawing from 'AC Power'\n"


INTEL = '{"SPHardwareDataType" : [{"cpu_type" : "Quad-Core Intel Core i5", "machine_model" : "Macmini8,1"}]}'
NOTHING = programs.Hardware()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HARDWARE, programs.Hardware(chip="Apple M2 Pro", model="Mac14,10", memory="16 GB")),  # and no serial number
        (INTEL, programs.Hardware(chip="Quad-Core Intel Core i5", model="Macmini8,1")),
        *(
            (text, NOTHING)
            for text in ("", "no json", "{}", '{"SPHardwareDataType": []}', '{"SPHardwareDataType": [3]}')
        ),
    ],
)
def test_hardware(monkeypatch, text, expected):
    monkeypatch.setattr(programs, "output_of", lambda command: text)
    assert programs.hardware() == expected


@pytest.mark.parametrize(
    ("setting", "source", "state", "words"),
    [
        ("0", MAINS, OK, "never sleeps by itself, on mains power"),
        ("30", MAINS, WARNING, "sleeps after 30 min, on mains power"),
        ("0", BATTERY, WARNING, "never sleeps by itself, on battery at 78%"),
        ("0", "Now drawing from 'Battery Power'\n", WARNING, "never sleeps by itself, on battery"),
        (
            "1 (sleep prevented by powerd, sound, sound)",
            "",
            WARNING,
            "sleeps after 1 min (kept awake right now by powerd, sound)",
        ),
    ],
)
def test_sleep(setting, source, state, words):
    found = judge_sleep(PMSET.format(sleep=setting), source, caffeinate=True)
    assert (found.severity, words in found.what) == (state, True)
    assert ("charger" in found.remedy) == ("battery" in words)


def test_sleep_that_is_switched_off_for_the_whole_system_is_never():
    settings = PMSET.format(sleep="10 (sleep prevented by powerd)").replace("\t\t0", "\t\t1")
    assert judge_sleep(settings, MAINS, caffeinate=True).what == "never sleeps by itself, on mains power"


def test_without_caffeinate_a_command_is_named():
    assert "`sudo pmset -c sleep 0`" in judge_sleep(PMSET.format(sleep=1), MAINS, caffeinate=False).remedy


@pytest.mark.parametrize("text", ["", "pmset: unknown option", "Currently in use:\n displaysleep 10\n"])
def test_sleep_that_is_not_told_is_unknown(text):
    found = judge_sleep(text, MAINS, caffeinate=True)
    assert found.severity is WARNING and "pmset" in found.what


@pytest.mark.parametrize(
    ("settings", "state", "words"),
    [
        (PMSET, OK, "sleeps after 2 min (kept on right now by Safari)"),
        (PMSET.replace("displaysleep         2", "displaysleep         0"), WARNING, "the display never sleeps"),
        (" sleep 0\n", OK, "names no display"),
    ],
)
def test_the_display(settings, state, words):
    found = judge_display(settings)
    assert (found.severity, words in found.what) == (state, True), found
    assert ("`pmset displaysleepnow`" in found.remedy) == (state is WARNING)


@pytest.mark.parametrize(
    ("state", "block_all", "expected", "words"),
    [
        ("is disabled. (State = 0)", "Firewall has block all state set to disabled.\n", OK, "off"),
        ("is enabled. (State = 1)", "Firewall has block all state set to disabled.\n", WARNING, "on"),
        ("is enabled. (State = 1)", "Block all DISABLED!\n", WARNING, "on"),
        ("is enabled. (State = 1)", "Firewall has block all state set to enabled.\n", ERROR, "blocks all"),
        ("is enabled. (State = 2)", "", ERROR, "blocks all"),
        ("", "", WARNING, "unknown"),
    ],
)
def test_the_application_firewall(state, block_all, expected, words):
    found = judge_firewall(f"Firewall {state}\n", block_all, "/opt/my python")
    assert (found.severity, words in found.what) == (expected, True)
    if words == "on":
        assert "`sudo /usr/libexec/ApplicationFirewall/socketfilterfw --add '/opt/my python'` and" in found.remedy
        assert "socketfilterfw --unblockapp '/opt/my python'`" in found.remedy


@pytest.mark.parametrize("command", [["/no/such/program"], ["sh", "-c", "echo half; exit 1"]])
def test_a_program_that_is_missing_or_fails_says_nothing(command):
    assert programs.output_of(command) == ""


def test_a_program_that_hangs_says_nothing_and_does_not_hold_us():
    assert programs.said_by(["sleep", "30"], 0.2) == {"status": None, "output": "no end within 0.2 s"}


# The command.


def start_doctor(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, str(PROJECT / "cli_typer.py"), "doctor", *arguments]
    environment = os.environ | {"COLUMNS": "80", "PYTHONPATH": ""}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def run_doctor(*arguments: str) -> tuple[int, str, str]:
    process = start_doctor(*arguments)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def test_plain_doctor_fits_80_columns_and_json_is_only_json(tmp_path):
    plain = start_doctor("--config", str(tmp_path / "config.ini"))  # no hosts file is beside it
    status, out, _ = run_doctor("--hosts", "--json")
    shown, said = plain.communicate(timeout=60)
    assert plain.returncode == 0, shown + said
    assert max(map(len, shown.splitlines())) <= 80
    assert "rival packages" in shown
    table, _, last = shown.rpartition("For several machines")
    assert "`multimac doctor --hosts` on each" in last and not re.search(
        "ssh|Remote Login|network|firewall", table, re.IGNORECASE
    )
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
    deep = ("gradients", "large batch", "vocabulary", "staging", "two ranks", "audio formats")
    assert {name: states[name] for name in deep} == dict.fromkeys(deep, "ok")
