"""The self-test over lab hosts: the whole command, and Ctrl-C in the middle of it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from distributed.checkup.selftest.run import as_row, rows_of

pytestmark = [pytest.mark.lab, pytest.mark.slow]
PROJECT = Path(__file__).parents[2]
PROBE = "distributed.checkup.probes.probe"


def command(runner, *names: str) -> list[str]:
    report = str(runner.folder / "report.json")
    return [sys.executable, "cli_typer.py", "selftest", "--hosts", str(runner.hosts(*names)), "--out", report]


def written(runner) -> dict:
    return json.loads((runner.folder / "report.json").read_text())


def probes(lab) -> list:
    return [process for name in lab.hosts for process in lab.processes(name, PROBE)]


def test_selftest_passes_on_three_hosts_and_its_report_names_nobody(lab, runner):
    done = lab.exec("h1", command(runner, "h2", "h3"), cwd=str(PROJECT), timeout=400)
    report = written(runner)
    wrong = [row for row in report["rows"] if row["verdict"] == "fail"]
    assert done.returncode == 0 and not wrong, done.stdout + done.stderr
    assert report["complete"] and report["hosts"] == 3
    names = " ".join(row["name"] for row in report["rows"])
    for expected in (
        "ssh, B",
        "connect A -> B",
        "connect B -> A",
        "gloo A <-> B",
        "killed peer",
        "demo",
        "doctor: staging",
    ):
        assert expected in names
    said = json.dumps(report)
    secrets = [host.address for host in lab.hosts.values()] + [socket.gethostname(), str(PROJECT), str(runner.folder)]
    assert not [secret for secret in secrets if secret in said]
    replayed = [as_row(row)["meaning"] for entry in report["checks"] for row in rows_of(entry)]
    assert replayed == [row["meaning"] for row in report["rows"]]
    runner.wait_until_nothing_is_left(10)
    assert not probes(lab)
    assert not list((lab["h2"].home / "project-h2" / "runs").glob("*selftest*"))


def test_ctrl_c_ends_it_on_all_hosts_and_writes_what_is_known(lab, runner):
    process = lab.popen("h1", command(runner, "h2"), cwd=str(PROJECT))
    wait_until(lambda: lab.processes("h2", PROBE), 60)
    lab["h1"].signal(signal.SIGINT, "cli_typer.py")
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, out + err
    assert "Traceback" not in out + err
    assert not written(runner)["complete"]
    assert [row["name"] for row in written(runner)["rows"]][:2] == ["ssh, A", "ssh, B"]
    wait_until(lambda: not probes(lab), 10, tell=lambda: probes(lab))


def test_a_firewall_between_the_hosts_fails_the_checks_of_the_network(lab, runner):
    from lab.network import NFT_TABLE, add_rules

    rule = "type filter hook input priority 0; policy accept; tcp flags & (syn | ack) == syn tcp dport != 22 drop;"
    add_rules("h2", f"table inet {NFT_TABLE} {{ chain input {{ {rule} }}; }}\n")
    process = lab.popen("h1", command(runner, "h2"), cwd=str(PROJECT))
    try:
        wait_until(lambda: "connect B -> A" in said_by(process), 150)
    finally:
        lab["h1"].signal(signal.SIGINT, "cli_typer.py")
        process.communicate(timeout=30)
    verdicts = {row["name"]: row["verdict"] for row in written(runner)["rows"]}
    assert verdicts["hosts check"] == verdicts["connect A -> B"] == "fail"
    assert verdicts["connect B -> A"] == "pass"


SAID: list[str] = []


def said_by(process: subprocess.Popen) -> str:
    SAID.append(process.stdout.readline())
    return "".join(SAID)
