import ipaddress
import socket
from types import SimpleNamespace
from typing import NamedTuple

import psutil
import pytest

from distributed.hosts import interfaces
from distributed.hosts.interfaces import UNFIT, address_on, other_networks, own_interfaces, resolve_ipv4, route_to
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


@pytest.mark.parametrize("name", ["lo", "lo0", "utun4", "awdl0", "llw0", "bridge100", "bridge1"])
def test_unfit_interfaces_are_refused(monkeypatch, name):
    monkeypatch.setattr(interfaces, "interface_with", lambda address: name)
    monkeypatch.setattr(interfaces, "resolve_ipv4", lambda peer: "127.0.0.1" if peer == "me" else "10.1.2.3")
    monkeypatch.setattr(interfaces.socket.socket, "connect", lambda *_: None)
    assert route_to("me").interface == name
    with pytest.raises(HostError, match=f"through {name}"):
        route_to("peer")


@pytest.mark.parametrize("name", ["en0", "eth0", "wlan0", "br0", "br-1234", "bridge0"])
def test_ordinary_interfaces_are_fit(name):
    assert not UNFIT.fullmatch(name)


def test_names_without_ipv4():
    assert resolve_ipv4("127.0.0.1") == "127.0.0.1"
    with pytest.raises(HostError, match="no IPv4 address"):
        resolve_ipv4("no-such-host.invalid")


class Entry(NamedTuple):
    """As psutil has it."""

    family: int
    address: str
    netmask: str | None


def mac(**interfaces) -> dict[str, list[Entry]]:
    """psutil.net_if_addrs() of a Mac, written from `ifconfig` in public threads: IPv6 comes first."""
    found = {}
    for name, address in {"lo0": "127.0.0.1/8", **interfaces}.items():
        entries = [Entry(socket.AF_INET6, f"fe80::1c5f:7dff:fe00:1%{name}", "ffff:ffff:ffff:ffff::")]
        for own in filter(None, address.split()):
            entries.append(Entry(socket.AF_INET, own.partition("/")[0], str(ipaddress.ip_interface(own).netmask)))
        found[name] = entries
    return found


ON_A_DESK = {
    "en0": "192.168.178.23/24",
    "awdl0": "",
    "llw0": "",
    "utun0": "",
    "utun4": "100.101.102.103/32",
    "bridge0": "169.254.61.8/16",
    "bridge100": "192.168.64.1/24",
    "en5": "",
}


def test_other_networks_of_a_mac(monkeypatch):
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: mac(**ON_A_DESK))
    assert other_networks("192.168.178.23") == [("bridge0", "169.254.61.8", 16)]
    assert other_networks("169.254.61.8") == [("en0", "192.168.178.23", 24)]
    assert own_interfaces()["en0"] == ["192.168.178.23"] and own_interfaces()["awdl0"] == []


def test_a_self_assigned_address_comes_after_others(monkeypatch):
    two = "169.254.61.8/16 10.0.0.1/24"
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: mac(en0="10.9.0.5/24", en7="169.254.1.2/16", bridge0=two))
    assert address_on("bridge0", "peer") == "10.0.0.1"
    assert other_networks("169.254.1.2") == [("en0", "10.9.0.5", 24), ("bridge0", "10.0.0.1", 24)]
    assert other_networks("10.9.0.5") == [("bridge0", "10.0.0.1", 24), ("en7", "169.254.1.2", 16)]


def test_wifi_and_cable_in_one_network_are_one_way(monkeypatch):
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: mac(en0="10.0.0.5/24", en7="10.0.0.6/24"))
    assert other_networks("10.0.0.5") == []


def test_networks_of_containers_and_virtual_machines_are_left_out(monkeypatch):
    inner = {"docker0": "172.17.0.1/16", "virbr0": "192.168.122.1/24", "br-7f3a": "172.18.0.1/16"}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: mac(eth0="10.0.0.5/24", br0="10.1.0.5/24", **inner))
    assert other_networks("10.0.0.5") == [("br0", "10.1.0.5", 24)]


VPNS = [("utun4", ""), ("wg-h1", ""), ("tailscale0", ""), ("office", "up,pointopoint")]


@pytest.mark.parametrize(("name", "flags"), VPNS)
def test_a_vpn_is_not_left_for_a_faster_network(monkeypatch, name, flags):
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: mac(en0="10.0.0.5/24", **{name: "100.64.0.1/24"}))
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: SimpleNamespace(flags=flags)})
    assert other_networks("100.64.0.1") == other_networks("10.0.0.5") == other_networks("127.0.0.1") == []


PORTS = """
Hardware Port: Ethernet Adapter (en4)
Device: en4
Ethernet Address: 5e:e9:1e:aa:bb:01

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 36:11:22:33:44:00

Hardware Port: Wi-Fi
Device: en0
Ethernet Address: 5c:e9:1e:aa:bb:02

Hardware Port: iPhone USB
Device: en8
Ethernet Address: N/A

VLAN Configurations
===================
"""


def test_a_mac_names_its_links(monkeypatch, tmp_path):
    (tmp_path / "ports").write_text(PORTS)
    monkeypatch.setattr(interfaces, "HARDWARE_PORTS", ["cat", str(tmp_path / "ports")])
    monkeypatch.setattr(interfaces.platform, "system", lambda: "Darwin")
    expected = {"en4": "Ethernet", "bridge0": "Thunderbolt", "en0": "Wi-Fi", "en8": "iPhone USB"}
    assert interfaces.kinds_of_links() == expected
    monkeypatch.setattr(interfaces, "HARDWARE_PORTS", [str(tmp_path / "gone")])
    assert interfaces.kinds_of_links() == {}
