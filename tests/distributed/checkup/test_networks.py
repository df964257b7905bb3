"""Which network hosts train on: hosts answer as their routing tables would."""

import ipaddress
import time

import pytest

from distributed.checkup.links import Links
from distributed.checkup.look import Look
from distributed.checkup.networks import chosen, measured, told
from distributed.ssh.host import Host

WIFI, CABLE, BRIDGE = ("en0", "192.168.1.{}/24"), ("en5", "10.0.0.{}/24"), ("bridge0", "169.254.7.{}/16")
DOCKER = ("br0", "172.17.0.1/16")


class Desk:
    """Each host has the networks it is told. mbit: by interface, how fast one is; 0: it connects nobody.

    routed: interfaces that the routing table leads to. slow: a connection that fails takes all its time.
    """

    def __init__(self, *hosts, mbit, named=("",) * 8, routed=("en0", "en5", "bridge0", "br0")):
        self.mbit, self.routed, self.slow = mbit, routed, False
        self.looks = [
            Look(number, Host(address=f"host{number}", interface=named[number] or None)) for number in range(len(hosts))
        ]
        for look, networks in zip(self.looks, hosts, strict=True):
            own = [(name, ipaddress.ip_interface(text.format(look.number + 1))) for name, text in networks]
            look.session = FakeSession(self, own)

    def train(self, seconds: float = 5.0) -> tuple[Links, str]:
        usual = str(self.looks[0].session.own[0][1].ip)
        networks = measured(self.looks, usual, time.monotonic() + seconds)
        best = chosen(networks)
        return best, told(best, networks[0])


class FakeSession:
    def __init__(self, desk: Desk, own):
        self.desk, self.own, self.asked = desk, own, []

    def send(self, op: str, **request):
        self.asked.append(op)
        return getattr(self, op)(**request)

    def answer(self, answer, op: str, deadline: float):
        return answer

    def call(self, op: str, deadline: float, **request):
        return self.send(op, **request)

    def open(self, peer: str, interface: str, token: str):
        there = ipaddress.ip_address(peer)
        near = [each for each in self.own if there in each[1].network and each[0] in self.desk.routed]
        named = [each for each in self.own if each[0] == interface]
        name, at = (named or near or self.own)[0]
        others = [[other, str(of.ip), of.network.prefixlen] for other, of in self.own if of.network != at.network]
        place = {"address": str(at.ip), "interface": name, "port": hash(name) % 60000, "datagram_port": 2}
        return {**place, "networks": others}

    def connect(self, me: int, peers: list, timeout: float):
        found = []
        for number, address, *_ in peers:
            works = self.mbit_to(address) > 0
            time.sleep(0 if works or not self.desk.slow else timeout)
            found.append([number, {"latency": 0.001} if works else {"failed": "timeout", "errno": None}])
        return {"links": found}

    def mbit_to(self, address: str) -> float:
        return max(
            (self.desk.mbit[name] for name, of in self.own if ipaddress.ip_address(address) in of.network), default=0
        )

    def heard(self):
        return {"heard": []}

    def burst(self, address: str, **request):
        self.sent = self.mbit_to(address)
        return {"sent": 1}

    def burst_from(self, source: int, port: int, deadline: float):
        return {"bytes": int(self.desk.looks[source].session.sent * 1e6 / 8), "seconds": 1.0}


def test_a_pair_on_two_links_takes_the_faster():
    best, line = Desk([WIFI, BRIDGE], [WIFI, BRIDGE], mbit={"en0": 400, "bridge0": 9000}).train()
    assert best.peer == "169.254.7.1" and {place["interface"] for place in best.places.values()} == {"bridge0"}
    assert line == "training uses bridge0 (169.254.7.1), 9000 Mbit/s, and not en0 (192.168.1.1), 400 Mbit/s"


def test_a_thunderbolt_bridge_that_no_route_leads_to_is_told_with_what_helps():
    """Seen on Macs: all of 169.254.0.0/16 is routed by Wi-Fi."""
    best, line = Desk([WIFI, BRIDGE], [WIFI, BRIDGE], mbit={"en0": 400, "bridge0": 9000}, routed=["en0"]).train()
    assert best.peer == "192.168.1.1"
    assert line.startswith("the Thunderbolt Bridge (bridge0) is not used") and "10.10.0.1" in line
    assert Desk([WIFI, BRIDGE], [WIFI], mbit={"en0": 400, "bridge0": 9000}).train()[1] == ""


def test_another_network_that_is_hardly_faster_is_not_worth_a_change():
    best, line = Desk([WIFI, CABLE], [WIFI, CABLE], mbit={"en0": 900, "en5": 940}).train()
    assert (best.peer, line) == ("192.168.1.1", "")


@pytest.mark.parametrize(("first", "second"), [(CABLE, BRIDGE), (BRIDGE, CABLE)])
def test_an_address_that_nobody_assigned_is_not_taken_where_there_is_another(first, second):
    best, _ = Desk([first, second], [first, second], mbit={"en5": 900, "bridge0": 900}).train()
    assert best.peer == "10.0.0.1"


def test_a_network_that_only_some_hosts_have_is_not_tried():
    desk = Desk([WIFI, BRIDGE], [WIFI, BRIDGE], [WIFI], mbit={"en0": 400, "bridge0": 9000})
    assert desk.train()[0].peer == "192.168.1.1"
    assert [look.session.asked.count("connect") for look in desk.looks] == [1, 1, 1]


def test_the_bridge_that_every_machine_has_for_its_containers_is_no_network():
    desk = Desk([WIFI, DOCKER], [WIFI, DOCKER], mbit={"en0": 400, "br0": 9000})
    assert desk.train()[0].peer == "192.168.1.1"


def test_an_interface_that_the_user_named_wins():
    hosts, mbit = ([WIFI, BRIDGE], [WIFI, BRIDGE]), {"en0": 400, "bridge0": 9000}
    assert Desk(*hosts, mbit=mbit, named=("en0", "")).train()[0].peer == "192.168.1.1"
    assert Desk(*hosts, mbit=mbit, named=("", "en0")).train()[0].peer == "192.168.1.1"
    assert Desk(*hosts, mbit=mbit, named=("", "bridge0")).train()[0].peer == "169.254.7.1"


def test_a_network_that_keeps_hosts_apart_is_left_for_one_that_does_not():
    best, line = Desk([WIFI, CABLE], [WIFI, CABLE], mbit={"en0": 0, "en5": 90}).train()
    assert best.peer == "10.0.0.1" and best.problems == []
    assert line.endswith("and not en0 (192.168.1.1), where not all hosts reach each other")


def test_where_nothing_works_the_usual_network_is_explained():
    best, line = Desk([WIFI, CABLE], [WIFI, CABLE], mbit={"en0": 0, "en5": 0}).train()
    assert (best.peer, line) == ("192.168.1.1", "")
    (problem,) = best.problems
    assert "192.168.1.1 (en0)" in problem.what


def test_with_eight_hosts_on_many_networks_there_are_figures_of_the_usual_one_at_least():
    hosts = [[WIFI, CABLE, ("en6", "10.0.6.{}/24"), ("en7", "10.0.7.{}/24")]] * 8
    best, _ = Desk(*hosts, mbit={"en0": 5, "en5": 4, "en6": 3, "en7": 2}, routed=["en0", "en5", "en6", "en7"]).train(
        2.8
    )
    assert len(best.pairs) == 56 and all(pair.mbit == 5 for pair in best.pairs.values())


def test_networks_that_lose_packets_leave_time_for_the_figures_of_the_usual_one():
    hosts = [WIFI, CABLE, ("en6", "10.0.6.{}/24"), ("en7", "10.0.7.{}/24")]
    desk = Desk(hosts, hosts, mbit={"en0": 5, "en5": 0, "en6": 0, "en7": 0}, routed=["en0", "en5", "en6", "en7"])
    desk.slow = True
    begin = time.monotonic()
    best, _ = desk.train(3.0)
    assert time.monotonic() - begin < 3.0 and all(pair.mbit == 5 for pair in best.pairs.values())
