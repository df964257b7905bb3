"""Machines that are found, and what is told of them. The outputs of dns-sd are a recording: only Macs have it."""

import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

from loopback_sshd import SshServer, keygen
from rich.console import Console
from zeroconf import ServiceInfo, Zeroconf

from distributed.hosts import discovery
from distributed.hosts.discovery import IN_FILE, Candidate, Seen, State, aliases, announced, find, known_hosts, look
from distributed.ssh.host import Host
from multimac.commands.pair import show

BROWSE = """\
Browsing for _ssh._tcp.local.
DATE: ---Sat 28 Nov 2026---
15:24:08.123  ...STARTING...
Timestamp     A/R    Flags  if Domain               Service Type         Instance Name
15:24:08.456  Add        3   4 local.               _ssh._tcp.           Anna’s Mac mini
15:24:08.457  Add        3   4 local.               _ssh._tcp.           Büro
15:24:08.457  Add        2   8 local.               _ssh._tcp.           Büro
15:24:08.458  Add        2   4 local.               _ssh._tcp.           gone
15:24:09.001  Rmv        0   4 local.               _ssh._tcp.           gone
"""
LOOK_UP = """\
Lookup {name}._ssh._tcp.local
DATE: ---Sat 28 Nov 2026---
15:24:10.001  ...STARTING...
15:24:10.050  {name}._ssh._tcp.local. can be reached at {server}.local.:{port} (interface 4)
"""


def test_what_a_mac_announces_is_read_from_dns_sd(tmp_path, monkeypatch):
    program = tmp_path / "dns-sd"
    answers = {"Anna’s Mac mini": ("Annas-Mac-mini", 22), "Büro": ("Buro", 2222)}
    lines = [f'"{name}") cat "{tmp_path / server}";;' for name, (server, _) in answers.items()]
    for name, (server, port) in answers.items():
        (tmp_path / server).write_text(LOOK_UP.format(name=name, server=server, port=port))
    (tmp_path / "browse").write_text(BROWSE)
    case = f'if [ "$1" = -B ]; then cat "{tmp_path / "browse"}"; else case "$2" in {" ".join(lines)} esac; fi'
    program.write_text(f"#!/bin/sh\n{case}\nexec sleep 60\n")  # it goes on until it is stopped
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(discovery.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(
        discovery, "_addresses", lambda name: {"Annas-Mac-mini.local": ("10.0.0.7", "fe80::7")}.get(name, ())
    )
    anna, office = announced(0.5)
    assert anna == Candidate(name="Annas-Mac-mini.local", addresses=("10.0.0.7", "fe80::7"), label="Anna’s Mac mini")
    assert (office.name, office.port, office.addresses) == ("Buro.local", 2222, ())


def test_twenty_machines_that_announce_themselves(monkeypatch):
    """With real mDNS on this machine; their addresses are in a network that is not here."""
    monkeypatch.setattr(discovery, "_lines", lambda path: [])
    with Zeroconf() as announcer:
        for number in range(20):
            info = ServiceInfo(
                "_ssh._tcp.local.",
                f"Mac {number}’s._ssh._tcp.local.",
                port=22,
                server=f"test-{number}.local.",
                addresses=[socket.inet_aton(f"10.99.0.{number + 1}")],
            )
            announcer.register_service(info, cooperating_responders=True)
        began = time.monotonic()
        found = {one.label: one for one in find() if one.label.startswith("Mac ")}
        seconds = time.monotonic() - began
    assert len(found) == 20 and found["Mac 3’s"].addresses == ("10.99.0.4",)
    assert found["Mac 3’s"].name == "10.99.0.4"  # the system cannot resolve test-3.local
    assert seconds < 10  # 3 on a machine with nothing else to do


def test_a_name_that_is_none_of_this_service_is_passed_over(monkeypatch):
    from zeroconf import ServiceBrowser

    def told(listener, service, handlers):
        handlers[0](name="x._http._tcp.local.")
        return browser(listener, service, handlers=handlers)

    browser = ServiceBrowser
    monkeypatch.setattr("zeroconf.ServiceBrowser", told)
    assert "x" not in {one.label for one in announced(0.1)}


def test_names_that_ssh_has_been_told_of(tmp_path):
    config, known = tmp_path / "config", tmp_path / "known_hosts"
    config.write_text("Host mini studio\n  User anna\nhost=desk\nHost * !x w?\n#Host no\n")
    known.write_text(
        "10.0.0.7,mini.local ssh-ed25519 A\n[10.0.0.8]:2222 ssh-ed25519 A\n|1|hashed= ssh-ed25519 A\n"
        "@revoked old ssh-ed25519 A\ngithub.com ssh-ed25519 A\n# comment\n\n"
    )
    assert aliases(config) == ["mini", "studio", "desk"]
    assert known_hosts(known) == ["10.0.0.7", "mini.local"]
    assert aliases(tmp_path / "none") == known_hosts(tmp_path) == []


def test_each_machine_once_without_this_one(ssh_server: SshServer, tmp_path, monkeypatch):
    """By the name of the hosts file, then of ~/.ssh/config; one behind a jump or in the internet is not looked for."""
    ssh_server.configure(
        "Host mini\n  HostName 10.99.0.7\nHost far\n  HostName 8.8.8.8\n"
        "Host behind\n  HostName 10.99.0.9\n  ProxyJump mini\n"
        "Host self\n  HostName 127.0.0.1\nHost other-port\n  HostName 10.99.0.7\n  Port 2222\n"
    )
    monkeypatch.setattr(discovery, "CONFIG", ssh_server.config)
    known = tmp_path / "known"
    known.write_text("10.99.0.7 ssh-ed25519 A\n10.99.0.8 ssh-ed25519 A\n")
    monkeypatch.setattr(discovery, "KNOWN_HOSTS", known)
    mdns = [
        Candidate(name="Mini.local", addresses=("10.99.0.7", "fd00::7"), label="Anna’s"),
        Candidate(name="new.local", addresses=("10.99.0.5",)),
    ]
    monkeypatch.setattr(discovery, "announced", lambda seconds: mdns)
    found = {one.name: (one.port, one.label, one.told_by) for one in find([Host(address="10.99.0.8")])}
    assert found == {
        "10.99.0.8": (22, "", "the hosts file"),
        "mini": (22, "Anna’s", str(ssh_server.config)),
        "other-port": (2222, "", str(ssh_server.config)),
        "new.local": (22, "", "announced"),
    }


def test_two_machines_under_one_name_go_by_their_addresses(monkeypatch):
    two = [Candidate(name="mini.local", addresses=(address,)) for address in ("10.99.0.5", "10.99.0.6")]
    monkeypatch.setattr(discovery, "_lines", lambda path: [])
    monkeypatch.setattr(
        discovery, "announced", lambda seconds: [*two, Candidate(name="b.local", addresses=("10.99.0.7",))]
    )
    assert [one.name for one in find()] == ["10.99.0.5", "10.99.0.6", "b.local"]


def test_what_a_stranger_announces_can_do_no_harm(monkeypatch):
    hostile = ["-oProxyCommand=touch", "x y", "a;b", "$(x)", "ü.local", "", "a@b"]
    strange = [Candidate(name=name, addresses=("10.99.0.5",)) for name in hostile]
    good = Candidate(name="mini.local", addresses=("10.99.0.6",), label="[red]\x1b[2Jmini[/]\n")
    monkeypatch.setattr(discovery, "_lines", lambda path: [])
    monkeypatch.setattr(discovery, "announced", lambda seconds: [*strange, good])
    [found] = find()
    assert found.name == "mini.local" and "\x1b" not in found.label
    console = Console(record=True, width=200)
    show(console, [Seen(candidate=found, state=State.NEW)])
    assert "[red]" in console.export_text()


def test_what_is_missing_before_a_machine_can_train(ssh_server: SshServer):
    """No environment there; none of ours; opened by no key; not known, then it is not spoken to; another key; gone."""
    candidate = Candidate(name="127.0.0.1", addresses=("127.0.0.1",), port=ssh_server.port)

    def seen():
        [one] = look([candidate])
        return one.state, one.about

    ssh_server.configure(f"Host 127.0.0.1\n  IdentityFile {ssh_server.key}\n  IdentitiesOnly yes\n")
    state, about = seen()
    assert state is State.PAIRED and about.startswith("Linux ") and about.endswith(" GB")
    ssh_server.configure()
    assert seen()[0] is State.LOCKED
    told = replace(ssh_server.host, python_env=sys.executable)  # with the key of its hosts file
    [ready] = look([candidate], [told])
    assert ready.state is State.READY
    [bare] = look([replace(candidate, told_by=IN_FILE)], [ssh_server.host])
    assert bare.state is State.PAIRED
    console = Console(record=True, width=200)
    show(console, [ready, bare, replace(bare, candidate=candidate)])
    rows = [line for line in console.export_text().splitlines() if "127.0.0.1" in line]
    assert [row.partition("GB")[2].strip("; │") for row in rows] == [
        "",
        "multimac hosts setup",
        f"multimac hosts pair 127.0.0.1 --port {ssh_server.port}",
    ]
    ssh_server.known_hosts.write_text("")
    log = (ssh_server.folder / "log").read_text()
    assert seen() == (State.NEW, "") and (ssh_server.folder / "log").read_text() == log
    other = keygen(ssh_server.folder / "other")
    ssh_server.known_hosts.write_text(f"[127.0.0.1]:{ssh_server.port} {Path(f'{other}.pub').read_text()}")
    assert seen()[0] is State.CHANGED
    ssh_server.trust()
    ssh_server.stop()
    assert seen()[0] is State.SILENT
    [six] = look([replace(candidate, addresses=("fd00::7",), name="fd00::7", port=22)])
    assert "no IPv4 address, which training needs" in six.about
