"""Each check on this machine for real: it passes, and fails when its fault is put in.

What needs another machine is done by two places that are both this one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from waiting import wait_until

from distributed.checkup.findings import Finding, Severity
from distributed.checkup.probes import system
from distributed.checkup.probes.probe import PROBE
from distributed.checkup.selftest import machine, network, run
from distributed.checkup.selftest.asking import Desk, Place
from distributed.hosts import host_process
from distributed.ssh.host import Host, Hosts
from distributed.ssh.machine import LocalMachine, LocalProcess

PASS, FAIL = Severity.OK, Severity.ERROR
CHECK = {check.name: check for check in [*run.CHECKS, run.LID]}
LOOPBACK = "127.0.0.1"
ALONE = Hosts(master=Host(address="localhost"), workers=())
BEHIND = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True).wait()"
PAIR = Hosts(master=Host(address="localhost"), workers=(Host(address="twin"),))


@pytest.fixture
def desk() -> Desk:
    """Two places, A and B, on loopback."""
    pair = zip("AB", PAIR.all, strict=True)
    places = [Place(letter=letter, host=host, machine=LocalMachine(), address=LOOPBACK) for letter, host in pair]
    return Desk(hosts=PAIR, places=places)


def rows(desk: Desk, name: str, **changes) -> list[Finding]:
    [entry] = run.run(desk, [dataclasses.replace(CHECK[name], **changes)])
    return run.rows_of(entry)


def fails(found: list[Finding], words: str) -> None:
    assert [row for row in found if row.severity is FAIL and words in row.what], found


def passes(found: list[Finding]) -> None:
    assert found and {row.severity for row in found} == {PASS}, found


def test_a_probe_that_crashes_is_a_row(desk):
    desk.places = desk.places[1:]
    fails(rows(desk, "kill of a zombie", ask=lambda asks: asks.ask_all("network.listen")), "B: KeyError: 'address'")


def test_names(desk):
    desk.hosts = ALONE
    passes(rows(desk, "names"))
    desk.hosts = Hosts(master=Host(address="no-such-host.invalid"), workers=())
    fails(rows(desk, "names"), "no-such-host.invalid: ")


def test_connections(desk, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    real = network.Asked.next

    def elsewhere(self, *kinds: str, timeout: float | None = None) -> dict:
        event = real(self, *kinds, timeout=timeout)
        return {**event, "port": port} if event["type"] == "listening" else event

    monkeypatch.setattr(network.Asked, "next", elsewhere)
    fails(rows(desk, "connect"), "Connection refused")
    # An nc that connects where Python does not.
    (tmp_path / "nc").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "nc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fails(rows(desk, "connect"), "but nc connects: something blocks this Python")


def test_the_process_whose_parent_is_gone_ends_with_its_asker():
    """It is in a group of its own, and would not be killed with the others."""
    begin = [*PROBE, "network.orphan"]
    process = subprocess.Popen(begin, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    about = {"targets": [], "parent": os.getpid(), "life_s": 30}  # it waits 5 s for this process to be gone
    process.stdin.write(json.dumps(about).encode() + b"\n")
    process.stdin.flush()
    time.sleep(1.0)
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(2.0) == 1


@pytest.mark.slow
def test_gloo_with_an_address_that_nobody_has(desk, monkeypatch):
    monkeypatch.setattr(network, "GLOO_S", 4.0)
    desk.places[1].address = "192.0.2.1"  # nobody's
    fails(rows(desk, "gloo"), "ranks would not find each other")


def test_gloo_alone_is_two_processes(desk):
    desk.places = desk.places[:1]
    passes(rows(desk, "gloo"))


@pytest.mark.slow
def test_a_killed_peer(desk, monkeypatch):
    monkeypatch.setattr(network, "KILLED_S", 2.0)
    monkeypatch.setattr(network, "NOTICE_S", 1.0)
    passes(rows(desk, "killed peer"))
    started: list[LocalProcess] = []
    kill = LocalProcess.kill
    # Nobody dies, so there is nothing to notice.
    monkeypatch.setattr(LocalProcess, "kill", lambda self: started.append(self))
    fails(rows(desk, "killed peer"), "no word within 3 s")
    for process in started:
        kill(process)


@pytest.mark.slow
def test_a_silent_peer(desk, monkeypatch):
    monkeypatch.setattr(network, "OPERATION_S", 1.0)
    desk.places = desk.places[:1]
    passes(rows(desk, "silent peer"))


def test_what_a_run_asks_of_the_system(desk):
    desk.places = desk.places[:1]
    found = rows(desk, "services")
    passes(found[:2])
    assert found[2].severity is Severity.SKIPPED, "not a Mac"
    assert not list(Path.cwd().glob(".selftest-*"))


def test_too_few_open_files(monkeypatch):
    monkeypatch.setattr(system, "allow_open_files", lambda: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        answer = system.services({})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    found = run.rows_of({"check": "services", "answers": [{"host": "A", "answer": answer}]})
    fails(found, "a run that loses hosts often may need more")


def test_process_groups(desk, monkeypatch):
    passes(rows(desk, "process group"))
    monkeypatch.setattr(LocalProcess, "kill", lambda self: os.kill(self.pid, signal.SIGKILL))  # and not its group
    fails(rows(desk, "process group"), "1 of 2 processes outlived")


@pytest.mark.slow
def test_a_shell_that_stays_before_the_command(desk, monkeypatch):
    """As one that does not exec: the group is that of the shell's parent."""
    start = LocalMachine.start

    def behind_a_shell(self, command, **more):
        return start(self, [sys.executable, "-c", BEHIND, *command], **more)

    monkeypatch.setattr(LocalMachine, "start", behind_a_shell)
    fails(rows(desk, "process group"), "not in the group that it reported")


def test_a_zombie(desk, monkeypatch):
    passes(rows(desk, "kill of a zombie"))

    def refuse(group: int, number: int) -> None:
        raise OSError(errno.EINVAL, "by hand")

    monkeypatch.setattr(system.os, "killpg", refuse)
    answer = {"host": "A", "answer": system.zombie({})}
    fails(run.rows_of({"check": "kill of a zombie", "answers": [answer]}), "EINVAL")


@pytest.mark.slow
def test_the_import_of_torch(desk, tmp_path, monkeypatch):
    """The fault: a torch whose import keeps the interpreter to itself."""
    desk.places = desk.places[:1]
    (tmp_path / "torch.py").write_text("import ctypes\nctypes.PyDLL(None).usleep(900_000)\n")
    path = {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}:{Path.cwd() / 'gym'}"}
    monkeypatch.setattr(host_process, "environment", lambda project: path)
    passes(rows(desk, "import of torch"))
    monkeypatch.setattr(machine, "Timeouts", lambda: type("Short", (), {"silence_importing_s": 0.8}))
    fails(rows(desk, "import of torch"), "counts as lost")


@pytest.mark.slow
def test_arithmetic_and_one_that_differs(desk):
    def unlike(asks):
        return asks.on_all(lambda place: asks.ask(place, "compute.arithmetic", seed="AB".index(place.letter)))

    passes(rows(desk, "arithmetic"))
    fails(rows(desk, "arithmetic", ask=unlike), "B: another result")


def test_rows_of_doctor_and_a_doctor_that_breaks(desk, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "PROJECT", tmp_path)
    found = {"name": "device", "state": "problem", "detail": "no GPU", "remedy": "", "figures": {}}
    (tmp_path / "cli_typer.py").write_text(f"import json\nprint(json.dumps({{'findings': [{found}]}}, indent=1))\n")
    fails(rows(desk, "doctor"), "no GPU")
    (tmp_path / "cli_typer.py").write_text("raise SystemExit('broken')")
    fails(rows(desk, "doctor"), "doctor ended with status 1: broken")


@pytest.mark.slow
def test_what_the_hosts_file_trains_on_is_what_is_checked(desk, tmp_path, monkeypatch):
    absent = "cuda" if torch.backends.mps.is_available() else "mps"
    desk.hosts = dataclasses.replace(PAIR, master=dataclasses.replace(PAIR.master, device=absent))
    desk.places = [dataclasses.replace(desk.places[0], host=desk.hosts.master)]
    fails(rows(desk, "arithmetic", limit_s=180), f"device {absent}")  # torch is to be loaded
    monkeypatch.setattr(machine, "PROJECT", tmp_path)
    (tmp_path / "cli_typer.py").write_text("import os\nraise SystemExit('on ' + os.environ['EXOGYM_DEVICE'])")
    fails(rows(desk, "doctor"), f"on {absent}")


def test_the_demo_whose_launcher_vanishes(desk, monkeypatch):
    desk.hosts, desk.places = ALONE, desk.places[:1]
    vanishing = partial(subprocess.Popen, "echo gone > launcher.log", shell=True)
    monkeypatch.setattr(run, "start_launcher", lambda run_dir: vanishing(cwd=run_dir))
    fails(rows(desk, "demo"), "the launcher ended without saying why: gone")


@pytest.mark.slow
def test_the_demo(desk):
    desk.hosts, desk.places = ALONE, desk.places[:1]
    passes(rows(desk, "demo"))


@pytest.mark.slow
def test_a_host_that_sleeps_under_its_lid_and_one_that_stays_away(desk, monkeypatch):
    desk.places = desk.places[:1]
    monkeypatch.setattr(machine, "WATCH_S", 4.0)
    monkeypatch.setattr(machine, "SILENCE_S", 1.5)
    stopped: list[int] = []
    start = LocalMachine.start

    def asleep(self, command, **more):
        process = start(self, command, **more)
        stopped.append(process.pid)
        for after, number in ((1.5, signal.SIGSTOP), *([(4.0, signal.SIGCONT)] if wakes else [])):
            threading.Timer(after, os.kill, (process.pid, number)).start()
        return process

    monkeypatch.setattr(LocalMachine, "start", asleep)
    wakes = True
    [row] = rows(desk, "lid")
    assert row.severity is PASS and "silent from" in row.what and "the connection survived" in row.what, row
    wakes = False
    monkeypatch.setattr(machine, "BACK_S", 1.0)
    fails(rows(desk, "lid"), "it has not come back")


@pytest.mark.slow
def test_a_check_that_hangs_is_ended_and_leaves_nothing(desk):
    began = time.monotonic()
    listen = {"ask": lambda asks: asks.ask_all("network.listen", address="127.0.0.1"), "limit_s": 3}
    fails(rows(desk, "kill of a zombie", **listen), "no end within 3 s")
    assert time.monotonic() - began < 10
    wait_until(lambda: not listeners(), 5, tell=listeners)


def listeners() -> list[int]:
    """Of this process: other tests have their own at the same time."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "network.listen" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


def test_what_is_written_gives_the_same_rows_again(desk):
    entries = list(run.run(desk, [CHECK["system"], CHECK["interfaces"], CHECK["connect"]]))
    for entry in entries:
        passes(run.rows_of(entry))
    report = json.loads(json.dumps(run.report_of(PAIR, entries, whole=True)))
    replayed = [run.as_row(row) for entry in report["checks"] for row in run.rows_of(entry)]
    assert json.loads(json.dumps(replayed)) == report["rows"] and report["exit_status"] == 0


def private() -> list[str]:
    """What must not be in a report of this machine; root and localhost tell nothing."""
    addresses = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return [socket.gethostname(), str(Path.cwd()), str(Path(sys.executable)), *(a for a in addresses if len(a) > 6)]


def leaks(desk: Desk) -> list[str]:
    entries = list(run.run(desk, [CHECK["system"], CHECK["interfaces"], CHECK["own address"]]))
    said = json.dumps(run.report_of(PAIR, entries, whole=True))
    return [secret for secret in private() if secret in said]


def test_a_report_of_this_machine_names_nobody_unless_the_sanitizer_is_off(desk, monkeypatch):
    assert leaks(desk) == []
    monkeypatch.setattr(desk.sanitizer, "clean", lambda value: value)
    assert leaks(desk)
