import pytest

from distributed.hosts import interfaces
from distributed.hosts.interfaces import UNFIT, resolve_ipv4, route_to
from whisper_tuner.errors import HostError


def test_loopback_peer_is_reached_over_loopback():
    route = route_to("127.0.0.1")
    assert route.address == "127.0.0.1"
    assert UNFIT.fullmatch(route.interface)


def test_named_interface_wins_and_must_exist():
    loopback = route_to("127.0.0.1").interface
    assert route_to("192.0.2.1", interface=loopback).address == "127.0.0.1"
    with pytest.raises(HostError, match="en77 is not an interface of this machine") as caught:
        route_to("192.0.2.1", interface="en77")
    assert loopback in str(caught.value)


@pytest.mark.parametrize("name", ["lo", "lo0", "utun4", "awdl0", "llw0", "bridge100"])
def test_unfit_interfaces_are_refused(monkeypatch, name):
    monkeypatch.setattr(interfaces, "interface_with", lambda address: name)
    monkeypatch.setattr(interfaces, "resolve_ipv4", lambda peer: "127.0.0.1" if peer == "me" else "10.1.2.3")
    monkeypatch.setattr(interfaces.socket.socket, "connect", lambda *_: None)
    assert route_to("me").interface == name
    with pytest.raises(HostError, match=f"through {name}"):
        route_to("peer")


@pytest.mark.parametrize("name", ["en0", "eth0", "wlan0", "br-1234"])
def test_ordinary_interfaces_are_fit(name):
    assert not UNFIT.fullmatch(name)


def test_names_without_ipv4():
    assert resolve_ipv4("127.0.0.1") == "127.0.0.1"
    with pytest.raises(HostError, match="no IPv4 address"):
        resolve_ipv4("no-such-host.invalid")
