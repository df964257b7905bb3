"""Hosts with more than one address: two links between them, and an interface whose IPv6 address comes first."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import cable, faults, network
from lab.keys import ENVIRONMENT, PRIVATE
from waiting import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.slow]
PROJECT = Path(__file__).parents[2]
SHORT = "[distributed:short]\nbase_profile = tiny\ncommunication_interval = 3\nmax_steps = 6\n"
LONG = "[distributed:long]\nbase_profile = tiny\nstrategy = allreduce\nepochs = 1000\n"


def addresses_in_use(lab, *hosts: str) -> set[str]:
    """Where ranks, the store and groups of gloo's listen."""
    ports = [
        port for host in hosts for port in lab[host].listeners() if "distributed." in " ".join(port.process.command)
    ]
    return {port.address for port in ports if not port.loopback}


def test_a_pair_on_two_links_takes_the_faster(lab, runner):
    lab.set_rate("h1", "20mbit")
    try:
        with cable.cable(lab, ["h1", "h2"]):
            process = runner.start("long", "h2", text=LONG)
            assert addresses_in_use(lab, "h1", "h2") == {cable.address(lab, "h1"), cable.address(lab, "h2")}
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=60)
            checked = lab.exec("h1", check(runner.hosts("h2")), cwd=str(PROJECT), timeout=60)
    finally:
        lab.set_rate("h1", None)
    assert f"training uses en1 ({cable.address(lab, 'h1')}), " in out, out + err
    assert f"and not en0 ({lab['h1'].address}), " in out
    assert json.loads((runner.run_dir / "run.json").read_text())["address"] == cable.address(lab, "h1")
    assert "training uses en1" in checked.stdout and checked.returncode == 0, checked.stdout + checked.stderr


def test_a_slower_second_link_and_one_that_a_third_host_lacks_are_left_alone(lab, runner):
    for with_it, hosts, rate in ((["h1", "h2"], ["h2"], "10mbit"), (["h1", "h2"], ["h2", "h3"], None)):
        lab.set_rate("h1", "50mbit")
        try:
            with cable.cable(lab, with_it, rate):
                done = lab.exec("h1", check(runner.hosts(*hosts)), cwd=str(PROJECT), timeout=60)
        finally:
            lab.set_rate("h1", None)
        assert done.returncode == 0 and "training uses" not in done.stdout, done.stdout + done.stderr


def test_the_faster_link_goes_away(lab, runner):
    """Its addresses stay. The run goes on with whom it has, and takes the other one back by the slower link."""
    lab.set_rate("h1", "20mbit")
    try:
        with cable.cable(lab, ["h1", "h2"]):
            process = runner.start("long", "h2", text=LONG)
            cable.set_cable("h2", up=False)
            wait_until(lambda: runner.events("apart"), 40, tell=lambda: runner.events("warning"))
            apart = time.time()
            wait_until(lambda: runner.events("reached") and together_since(runner, apart), 60)
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=60)
    finally:
        lab.set_rate("h1", None)
    assert "cannot reach each other, though this machine reaches them" in out, out + err
    addresses = cable.address(lab, "h1"), lab["h1"].address
    assert "not all hosts reach each other by {}: they meet at {} now".format(*addresses) in out


@pytest.mark.parametrize("host", ["h1", "h2"])
def test_a_cable_that_takes_its_address_with_it_as_on_a_mac_is_left_for_the_slower_link(lab, runner, host):
    """No SSH connection breaks: nobody is lost, but the group's connections are dead."""
    lab.set_rate("h1", "20mbit")
    try:
        with cable.cable(lab, ["h1", "h2"]):
            process = runner.start("long", "h2", text=LONG)
            wait_until(lambda: len(runner.events("commit")) > 2, 40)
            cable.lose_address(lab, host)
            begun = time.time()
            wait_until(lambda: together_since(runner, begun + 2), 60, tell=lambda: runner.events("warning"))
            seconds = time.time() - begun
            print(f"{seconds:.1f} s until the next round of both")
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=60)
    finally:
        lab.set_rate("h1", None)
    assert seconds < 40, out + err


def together_since(runner, when: float) -> list[dict]:
    rounds = runner.events("commit")
    return [event for event in rounds if event["time"] > when and len(event["samples"]) == 2]


def check(hosts: Path) -> list[str]:
    return [sys.executable, "cli_typer.py", "hosts", "check", "--hosts", str(hosts)]


# As on a Mac, an interface's IPv6 address, good for this link only, stands before its IPv4 one. Linux lists IPv4 first.
IPV6_FIRST = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <stddef.h>

int getifaddrs(struct ifaddrs **first) {
    int (*real)(struct ifaddrs **) = dlsym(RTLD_NEXT, "getifaddrs");
    int status = real(first);
    struct ifaddrs *all = status ? NULL : *first, *six = NULL, *rest = NULL, **end6 = &six, **end = &rest;
    for (; all; all = all->ifa_next) {
        int is_six = all->ifa_addr && all->ifa_addr->sa_family == AF_INET6;
        *(is_six ? end6 : end) = all;
        if (is_six) end6 = &all->ifa_next; else end = &all->ifa_next;
    }
    *end = NULL;
    *end6 = rest;
    if (!status) *first = six;
    return status;
}

void freeifaddrs(struct ifaddrs *all) {}  // glibc frees one block, which begins at what was first
"""
BY_NAME = """
import psutil
from torch.distributed import ProcessGroupGloo
device = ProcessGroupGloo.create_device(interface="en0")
print([at.laddr.ip for at in psutil.Process().net_connections() if at.status == "LISTEN"])
"""


@contextlib.contextmanager
def like_a_mac(lab, folder: Path, *hosts: str) -> Iterator[dict[str, str]]:
    """Yields the variables for what the test itself starts; `hosts` have them in all that comes over SSH."""
    source, library = folder / "first.c", PRIVATE / "first.so"
    source.write_text(IPV6_FIRST)
    built = folder / "first.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(built), str(source), "-ldl"], check=True)
    variables = {"LD_PRELOAD": str(library), "GLOO_SOCKET_IFNAME": "en0"}
    with contextlib.ExitStack() as undo:
        for host in ("h1", *hosts):
            shutil.copy(built, lab[host].path(library))
        for host in hosts:
            settings = lab[host].path(ENVIRONMENT)
            settings.write_text(f"SetEnv {' '.join(f'{name}={value}' for name, value in variables.items())}\n")
            undo.callback(faults.reload_sshd, lab[host])
            undo.callback(settings.unlink)
            faults.reload_sshd(lab[host])
        yield variables


@pytest.mark.skipif(not shutil.which("cc"), reason="not installed: a C compiler")
def test_hosts_whose_interface_lists_an_ipv6_address_first_train(lab, runner, tmp_path):
    if not network.in_namespace("h1", "ip", "-6", "-o", "addr", "show", "dev", network.INTERFACE):
        pytest.skip("this machine has no IPv6")
    with like_a_mac(lab, tmp_path, "h2") as variables:
        named = lab.exec("h1", [sys.executable, "-c", BY_NAME], env=variables, timeout=60)
        assert "fe80::" in named.stdout, named.stdout + named.stderr  # where gloo would listen by the interface's name
        command = runner.command("short", "h2", text=SHORT)
        done = lab.exec("h1", command, env=variables, cwd=str(PROJECT), timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(runner.events("done")) == 2
