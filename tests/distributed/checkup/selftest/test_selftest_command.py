"""The command as its owner calls it, with a host behind a real sshd; of the checks only the quick ones."""

from __future__ import annotations

import dataclasses
import json

import loopback_sshd
import pytest

import cli_typer
from distributed.checkup.selftest import run
from multimac.commands import selftest as command

QUICK = ("ssh", "code", "interfaces", "own address", "connect", "process group")
# A login shell that stays between sshd and the command; `&` alone would take its stdin away.
STAYS = """ForceCommand exec 3<&0; /bin/sh -c "$SSH_ORIGINAL_COMMAND" <&3 & wait $!\n"""


@pytest.fixture
def selftest(tmp_path, monkeypatch, capsys):
    """Runs `multimac selftest` with these arguments: its status, what it printed, its report."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str, checks=QUICK) -> tuple[int, str, dict]:
        monkeypatch.setattr(command, "CHECKS", [check for check in run.CHECKS if check.name in checks])
        out = tmp_path / "report.json"
        status = cli_typer.main(["selftest", "--out", str(out), *arguments])
        said = capsys.readouterr()
        return status, said.out + said.err, json.loads(out.read_text()) if out.exists() else {}

    return call


@pytest.fixture
def hosts(tmp_path, ssh_server):
    def write(**changes) -> str:
        path = tmp_path / "hosts.json"
        path.write_text(json.dumps({"master": "localhost", "workers": [{**ssh_server.worker, **changes}]}))
        return str(path)

    return write


def verdicts(report: dict) -> dict[str, str]:
    return {row["name"]: row["verdict"] for row in report["rows"]}


def test_alone_and_as_json_and_nothing_else(tmp_path, monkeypatch, capsys):
    checks = [check for check in run.CHECKS if check.name in ("ssh", "code", "own address", "process group")]
    monkeypatch.setattr(command, "CHECKS", checks)
    out = tmp_path / "report.json"
    assert cli_typer.main(["selftest", "--out", str(out), "--json"]) == 0
    said, report = capsys.readouterr(), json.loads(out.read_text())
    assert json.loads(said.out) == report and "process group" in said.err and "A is localhost" in said.err
    assert report["complete"] and report["hosts"] == 1 and set(verdicts(report).values()) == {"pass"}


def test_with_a_host_over_ssh(selftest, hosts, ssh_server):
    status, said, report = selftest("--hosts", hosts())
    assert status == 0, said
    assert verdicts(report)["process group, B"] == verdicts(report)["group kill, B"] == "pass"
    assert str(ssh_server.folder) not in json.dumps(report)


@pytest.mark.slow
def test_a_shell_that_does_not_exec(selftest, hosts, ssh_server, monkeypatch):
    ssh_server.stop()
    monkeypatch.setattr(loopback_sshd, "CONFIG", loopback_sshd.CONFIG + STAYS)
    ssh_server.start()
    status, said, report = selftest("--hosts", hosts(), checks=("ssh", "code", "process group"))
    assert status == 5, said
    assert verdicts(report)["process group, B"] == verdicts(report)["group kill, B"] == "fail"
    assert verdicts(report)["process group, A"] == "pass"


def test_a_host_that_does_not_answer_leaves_the_others_their_turn(selftest, hosts):
    status, said, report = selftest("--hosts", hosts(ssh_port=9), checks=("ssh", "interfaces"))
    assert status == 5 and "ssh, B" in said
    assert verdicts(report)["ssh, B"] == "fail" and verdicts(report)["interfaces"] == "pass"


def test_what_the_ssh_configuration_knows_of_a_host_is_not_told(selftest, tmp_path, ssh_server):
    ssh_server.configure("Host mini\n  HostName bertrams-mac.invalid\n  User bertram\n  ProxyJump carla@gate.invalid\n")
    (tmp_path / "mini.json").write_text('{"master": "localhost", "workers": ["mini"]}')
    status, _, report = selftest("--hosts", str(tmp_path / "mini.json"), checks=("ssh", "interfaces"))
    assert status == 5 and verdicts(report)["ssh, B"] == "fail"
    assert not [name for name in ("bertram", "carla", "gate", "mini") if name in json.dumps(report)]


def test_a_host_that_takes_no_code_is_left_out(selftest, hosts):
    status, _, report = selftest("--hosts", hosts(project_path="/proc/multimac"), checks=("ssh", "code", "interfaces"))
    assert status == 5
    assert verdicts(report)["code, B"] == "fail" and verdicts(report)["interfaces"] == "pass"


def test_not_the_master_of_the_hosts_file(selftest, tmp_path):
    (tmp_path / "away.json").write_text('{"master": "192.0.2.9", "workers": []}')
    status, said, report = selftest("--hosts", str(tmp_path / "away.json"))
    assert status == 5 and list(verdicts(report)) == ["ssh"]
    assert "is not this machine" in said and "192.0.2.9" not in json.dumps(report)


@pytest.mark.parametrize("out", ["no/report.json", ".", "/proc/report.json"])
def test_nowhere_to_write(selftest, tmp_path, out):
    """It is said at once, not after five minutes."""
    status, said, report = selftest("--out", str(tmp_path / out))
    assert status == 3 and "Name another file with --out" in said and "ssh" not in said and not report


@pytest.mark.slow
def test_a_demo_that_is_broken_off_leaves_nothing_on_the_host(selftest, hosts, ssh_server, monkeypatch):
    def cut(check):
        return dataclasses.replace(check, limit_s=6) if check.name == "demo" else check

    monkeypatch.setattr(run, "CHECKS", [cut(check) for check in run.CHECKS])
    monkeypatch.setattr(run, "ROUNDS", 1000)  # no machine is fast enough
    status, said, _ = selftest("--hosts", hosts(), checks=("ssh", "code", "own address", "demo"))
    assert status == 5 and "no end within 6 s" in said
    assert (ssh_server.folder / "project" / "runs").is_dir(), "the run had begun there"
    assert not list((ssh_server.folder / "project" / "runs").iterdir())


def test_ctrl_c_keeps_what_is_known(selftest, monkeypatch):
    one = run._one

    def interrupted(desk, check):
        if check.name == "interfaces":
            raise KeyboardInterrupt
        return one(desk, check)

    monkeypatch.setattr(run, "_one", interrupted)
    status, said, report = selftest(checks=("ssh", "interfaces"))
    assert status == 130 and "stopped" in said
    assert not report["complete"] and list(verdicts(report)) == ["ssh"]
