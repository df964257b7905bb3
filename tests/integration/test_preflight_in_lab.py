"""The preflight on lab hosts: 100 Mbit/s, half a core each, firewalls, cut links."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path

import pytest
from waiting import wait_until

pytestmark = pytest.mark.lab
PROJECT = Path(__file__).parents[2]
SCRIPT = """
import dataclasses, json, sys
from distributed.plan.hosts_file import load_hosts
from distributed.checkup.preflight import preflight

with preflight(None, load_hosts(sys.argv[1])) as report:
    problems = [[problem.severity, str(problem)] for problem in report.problems]
    pairs = [dataclasses.asdict(pair) for pair in report.pairs]
    print(json.dumps({"seconds": report.seconds, "problems": problems, "pairs": pairs, "summary": report.summary()}))
"""
AGENT = "multimac agent"


@pytest.fixture(scope="module")
def lab():
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("the lab needs Linux and root")
    from lab import Lab

    with Lab(hosts=4, cpus=0.5, rate="100mbit", shared_home=True) as lab:
        yield lab


@pytest.fixture
def checked(runner):
    """Runs the preflight on h1 for h1 and the named workers; `changes` go into their entries of the hosts file."""

    def check(*names: str, **changes: dict) -> dict:
        path = hosts_file(runner, *names, **changes)
        command = [sys.executable, "-c", SCRIPT, str(path)]
        env = {"PYTHONPATH": f"{PROJECT}:{PROJECT}/gym"}
        done = runner.lab.exec("h1", command, env=env, cwd=str(PROJECT), timeout=60)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        report["errors"] = [text for severity, text in report["problems"] if severity == "error"]
        assert report["seconds"] < 15
        return report

    return check


def hosts_file(runner, *names: str, **changes: dict) -> Path:
    path = runner.hosts(*names)
    values = json.loads(path.read_text())
    for entry, name in zip(values["workers"], names, strict=True):
        entry |= changes.get(name, {})
    path.write_text(json.dumps(values))
    return path


def agents(lab, *names: str) -> list:
    return [process for name in names or lab.hosts for process in lab.processes(name, AGENT)]


def wait_until_no_agent_is_left(lab, seconds: float, *names: str) -> None:
    wait_until(lambda: not agents(lab, *names), seconds, tell=lambda: agents(lab, *names))


def filter_input(host: str, rule: str) -> None:
    """A rule of the host's firewall on what comes in; `lab.pass_all` takes it away."""
    from lab.network import NFT_TABLE, add_rules

    hook = "type filter hook input priority 0; policy accept;"
    add_rules(host, f"table inet {NFT_TABLE} {{ chain input {{ {hook} {rule}; }}; }}\n")


def test_healthy_hosts_and_their_links(lab, checked):
    from lab import machine, network

    machine.require(network.LIMITED_LINKS)
    report = checked("h2", "h3", "h4")
    assert report["errors"] == []
    addresses = [host.address for host in lab.hosts.values()]
    pairs = {(pair["source"], pair["target"]): pair for pair in report["pairs"]}
    assert set(pairs) == set(itertools.permutations(addresses, 2))
    assert all(60 < pair["mbit"] < 115 for pair in pairs.values()), pairs
    assert all(pair["latency_s"] < 0.05 for pair in pairs.values())
    wait_until_no_agent_is_left(lab, 3)


@pytest.mark.slow
def test_three_of_four_hosts_are_wrong_in_three_ways(lab, runner):
    lab.drop("h2")
    changes = {"h3": {"python_env": "/no/such/environment"}, "h4": {"project_path": "/proc/multimac"}}
    path = hosts_file(runner, "h2", "h3", "h4", **changes)
    command = [sys.executable, "cli_typer.py", "hosts", "check", "--hosts", str(path)]
    begin = time.monotonic()
    done = lab.exec("h1", command, cwd=str(PROJECT), env={"COLUMNS": "80"}, timeout=60)
    assert time.monotonic() - begin < 30, done.stdout
    assert done.returncode == 5
    h2, h3, h4 = (lab[name].address for name in ("h2", "h3", "h4"))
    assert f"{h2}: port 22: no answer" in done.stderr
    assert f"{h3}: there is no usable Python at /no/such/environment/bin/python" in done.stderr
    assert f"{h4}: /proc cannot be used for /proc/multimac" in done.stderr
    assert "3 problems" in done.stderr and f"Run: multimac hosts setup --hosts {path}" in done.stderr


@pytest.mark.slow
def test_a_firewall_between_two_workers(lab, checked):
    lab.drop("h2", "h3")
    (said,) = checked("h2", "h3", "h4")["errors"]
    h2, h3 = lab["h2"].address, lab["h3"].address
    assert said.startswith(f"{h2} <-> {h3}: nothing gets through either way")
    assert "firewall" in said


@pytest.mark.slow
def test_packets_that_are_lost_one_way(lab, checked):
    filter_input("h3", f"ip saddr {lab['h2'].address} drop")
    (said,) = checked("h2", "h3")["errors"]
    assert said.startswith(f"{lab['h2'].address} -> {lab['h3'].address}: packets are lost in this direction")


@pytest.mark.slow
def test_a_host_that_lets_nobody_connect_but_by_ssh(lab, checked):
    filter_input("h3", "tcp flags & (syn | ack) == syn tcp dport != 22 drop")
    (said,) = checked("h2", "h3")["errors"]
    h1, h2, h3 = (lab[name].address for name in ("h1", "h2", "h3"))
    assert said.startswith(f"{h1}, {h2} -> {h3}: no answer from {h3} (en0); {h3} -> {h1}, {h2} works")
    assert f"In the firewall of {h3}, allow" in said


@pytest.mark.slow
def test_an_interface_that_the_others_cannot_reach(lab, checked):
    from lab.network import in_namespace

    in_namespace("h3", "ip", "link", "add", "other0", "type", "bridge")
    try:
        in_namespace("h3", "ip", "addr", "add", "10.99.0.1/24", "dev", "other0")
        in_namespace("h3", "ip", "link", "set", "other0", "up")
        (said,) = checked("h2", "h3", h3={"interface": "other0"})["errors"]
    finally:
        in_namespace("h3", "ip", "link", "del", "other0")
    h1, h2, h3 = (lab[name].address for name in ("h1", "h2", "h3"))
    assert said.startswith(f"{h1}, {h2} -> {h3}: ") and "10.99.0.1 (other0)" in said
    assert '"interface"' in said


@pytest.mark.slow
def test_a_cable_pulled_in_the_middle_leaves_nothing_behind(lab, runner):
    command = [sys.executable, "cli_typer.py", "hosts", "check", "--hosts", str(hosts_file(runner, "h2", "h3"))]
    begin = time.monotonic()
    process = lab.popen("h1", command, cwd=str(PROJECT))
    while not agents(lab, "h3"):
        assert process.poll() is None and time.monotonic() < begin + 40, process.communicate()
        time.sleep(0.05)
    lab.link("h3", up=False)
    out, err = process.communicate(timeout=40)  # 11 s on an idle machine
    assert process.returncode == 5 and lab["h3"].address in err, out + err
    wait_until_no_agent_is_left(lab, 3, "h1", "h2")
    lab.kill("h3", AGENT)  # its own alarm, 25 s after it began, is tested on loopback
