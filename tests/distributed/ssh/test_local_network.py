"""macOS keeps a Python from the local network: connect fails with errno 65, though Apple's own nc gets through."""

import socket
import sys

import pytest

from distributed.hosts.agent.links import Links
from distributed.ssh import local_network
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host
from distributed.ssh.local_network import DENIED, is_denied
from whisper_tuner.errors import HostError

NO_ROUTE = OSError(65, "No route to host")
NC = """#!/bin/sh
echo "$*" >> "$0.asked"
exit {status}
"""


@pytest.fixture
def mac(monkeypatch, tmp_path):
    """A Mac whose Python is denied; returns what makes its nc connect, or fail, and tells how it was called."""
    nc = tmp_path / "nc"
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(local_network, "NC", str(nc))

    def connect(*_, **more):
        raise NO_ROUTE

    monkeypatch.setattr(socket, "create_connection", connect)

    def make(status: int):
        nc.write_text(NC.format(status=status))
        nc.chmod(0o755)
        return tmp_path / "nc.asked"

    return make


def test_errno_65_is_a_denial_where_apples_own_program_connects(mac):
    asked = mac(0)
    assert is_denied(NO_ROUTE, "192.168.1.30", 22)
    assert asked.read_text() == "-z -G 2 192.168.1.30 22\n"


@pytest.mark.parametrize("error", [OSError(61, "Connection refused"), TimeoutError()])
def test_other_errors_are_no_denial(mac, error):
    asked = mac(0)
    assert not is_denied(error, "192.168.1.30", 22) and not asked.exists()


def test_a_network_that_is_really_down_is_no_denial(mac):
    mac(1)
    assert not is_denied(NO_ROUTE, "192.168.1.30", 22)


def test_a_missing_nc_is_no_denial(mac):
    assert not is_denied(NO_ROUTE, "192.168.1.30", 22)


def test_nothing_is_asked_on_linux(mac, monkeypatch):
    asked = mac(0)
    monkeypatch.setattr(sys, "platform", "linux")
    assert not is_denied(NO_ROUTE, "192.168.1.30", 22)
    assert not asked.exists()


def test_ssh_tells_the_denial_and_the_ways_out(ssh_server, mac):
    mac(0)
    with pytest.raises(HostError) as caught:
        Remote.connect(Host(address="127.0.0.1", port=ssh_server.port))
    said = str(caught.value)
    assert "does not let this Python use the local network (errno 65)" in said
    assert "Terminal.app" in said and "`ssh localhost`" in said and "Local Network" in said
    mac(1)
    with pytest.raises(HostError, match="No route to host"):
        Remote.connect(Host(address="127.0.0.1", port=ssh_server.port))


def test_the_agent_tells_it_of_each_connection(mac):
    mac(0)
    links = Links(print)
    assert links.ping(0, "192.0.2.30", 4321, 4321, 1.0) == {"failed": DENIED, "errno": 65}
    mac(1)
    assert links.ping(0, "192.0.2.30", 4321, 4321, 1.0) == {"failed": "No route to host", "errno": 65}
