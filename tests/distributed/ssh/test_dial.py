"""Names are looked up anew for each connection, in a resolver that a test fills; connections are real, on loopback."""

import contextlib
import socket
import threading
import time
from dataclasses import replace

import pytest

from distributed.ssh import connection as dialing
from distributed.ssh.connection import Remote, dial
from whisper_tuner.errors import HostError

LINK_LOCAL = "fe80::1c2b:3a4d:5e6f:7081%en0"


@pytest.fixture
def names(monkeypatch):
    """name: its addresses at each look-up, one list after the other; the last one stays."""
    known, asked, real = {}, [], socket.getaddrinfo

    def getaddrinfo(name, port, family=0, kind=0, *more, **options):
        if name not in known:
            return real(name, port, family, kind, *more, **options)
        asked.append((name, family))
        answers = known[name].pop(0) if len(known[name]) > 1 else known[name][0]
        wanted = [a for a in answers if family in (0, socket.AF_INET6 if ":" in a else socket.AF_INET)]
        if not wanted:
            raise socket.gaierror(socket.EAI_NONAME, "nodename nor servname provided, or not known")
        return [(socket.AF_INET6 if ":" in a else socket.AF_INET, kind, 6, "", (a, port)) for a in wanted]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    getaddrinfo.known, getaddrinfo.asked = known, asked
    return getaddrinfo


@contextlib.contextmanager
def full_listener(address="127.0.0.1"):
    """Nobody gets an answer until `drain` has made room: a Mac that a first connection only wakes."""
    with socket.create_server((address, 0), backlog=0) as full, contextlib.ExitStack() as waiting:
        for _ in range(2):
            caller = waiting.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        time.sleep(0.05)

        def drain() -> None:
            for _ in range(2):
                waiting.enter_context(full.accept()[0])

        yield full.getsockname()[1], drain


def test_the_second_connection_finds_a_host_that_the_first_one_has_woken(monkeypatch):
    """The first one's own next packet would come 3 s after its start."""
    monkeypatch.setattr(dialing, "TWICE_S", 1.0)
    with full_listener() as (port, drain):
        threading.Timer(1.1, drain).start()
        begun = time.monotonic()
        dial("127.0.0.1", port, 2.4).close()
        assert time.monotonic() - begun < 1.8


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_a_host_that_is_off_costs_no_more_time_than_before(monkeypatch, seconds):
    monkeypatch.setattr(dialing, "TWICE_S", 1.0)
    with full_listener() as (port, _):
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            dial("127.0.0.1", port, seconds)
        assert seconds - 0.1 < time.monotonic() - begun < seconds + 0.3


def test_a_refusal_is_not_tried_twice(names):
    names.known["mac.local"] = [["127.0.0.1"]]
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        dial("mac.local", port, 10)
    assert len(names.asked) == 1


def test_a_mac_that_has_moved_is_found_where_its_name_leads_now(names, monkeypatch):
    """Also in the middle of one call: right after a wake its name may still lead to the old address."""
    monkeypatch.setattr(dialing, "TWICE_S", 0.5)
    with full_listener() as (port, _), socket.create_server(("127.0.0.2", port)):
        names.known["mac.local"] = [["127.0.0.1"], ["127.0.0.2"]]
        with dial("mac.local", port, 1) as found:
            assert found.getpeername()[0] == "127.0.0.2"


def test_ipv4_is_asked_for_and_each_of_several_addresses_has_its_time(names):
    with full_listener() as (port, _), socket.create_server(("127.0.0.2", port)):
        names.known["mac.local"] = [[LINK_LOCAL, "127.0.0.1", "127.0.0.1", "127.0.0.2"]]
        with dial("mac.local", port, 1) as found:
            assert found.getpeername()[0] == "127.0.0.2"
    assert names.asked == [("mac.local", socket.AF_INET)]


def test_a_local_name_with_link_local_ipv6_only_is_not_known_yet(names):
    names.known["mac.local"] = [[LINK_LOCAL], ["127.0.0.1"]]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(socket.gaierror):
            dial("mac.local", port, 10)
        dial("mac.local", port, 10).close()
    assert {family for _, family in names.asked} == {socket.AF_INET}


def test_ssh_over_ipv6_still_works():
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with server:
        dial("::1", server.getsockname()[1], 2).close()


def test_a_host_with_a_new_address_is_reached_by_name_and_nothing_is_asked(ssh_server, names):
    """Its key is known by its name. The name's old address is not that of another machine's key."""
    kind, blob = ssh_server.host_key
    ssh_server.known_hosts.write_text(f"[mac.local]:{ssh_server.port} {kind} {blob}\n")
    host = replace(ssh_server.host, address="mac.local")
    names.known["mac.local"] = [["127.0.0.1"]]
    Remote.connect(host).close()
    names.known["mac.local"] = [[]]
    with pytest.raises(HostError, match=r"mac\.local is not known"):
        Remote.connect(host)
    names.known["mac.local"] = [["127.0.0.2", "127.0.0.1"]]  # where nobody listens, and its new one
    Remote.connect(host).close()
