"""What failed connections are called, how fast the others are, which network hosts train on, and groups of gloo's.

Hosts answer as they, their routing tables and their firewalls would.
"""

import ipaddress
import itertools
import re
import time

import pytest

from distributed.checkup.findings import Severity
from distributed.checkup.links import Links, chosen, form_groups, measured, told, tournament
from distributed.checkup.look import Look
from distributed.ssh.host import Host
from distributed.ssh.local_network import DENIED
from whisper_tuner.errors import ExitStatus, HostError

ERROR, WARNING = Severity.ERROR, Severity.WARNING
NAMES = ["ada", "ben", "cleo", *(f"host{number}" for number in range(3, 8))]
SILENT = {"failed": "timeout", "errno": None}
WIFI, CABLE, BRIDGE = ("en0", "192.168.1.{}/24"), ("en5", "10.0.0.{}/24"), ("bridge0", "169.254.7.{}/16")
SIXTH, SEVENTH, DOCKER = ("en6", "10.0.6.{}/24"), ("en7", "10.0.7.{}/24"), ("br0", "172.17.0.1/16")


class Desk:
    """Each host has the networks it is told. mbit: by interface, how fast one is; 0: it connects nobody.

    named: interfaces of the hosts file. routed: those that the routing table leads to. failing: by pair of numbers, how
    TCP fails; lost: pairs whose datagrams do not arrive. slow: a connection that fails takes all its time.
    """

    def __init__(self, *hosts, mbit=None, named=("",) * 8, routed=None, failing=(), lost=()):
        self.mbit, self.routed, self.slow = mbit or {"en0": 100}, routed, False
        self.failing, self.lost, self.gloo = dict(failing), set(lost), ""
        self.looks: list[Look] = []
        for number, networks in enumerate(hosts or [[WIFI]] * 3):
            self.looks.append(Look(number, Host(address=NAMES[number], interface=named[number] or None)))
            own = [(name, ipaddress.ip_interface(text.format(number + 1))) for name, text in networks]
            self.looks[-1].session = FakeSession(self, number, own)

    def usual(self) -> Links:
        """The links of the first network, measured."""
        links = Links(self.looks, "192.168.1.1", time.monotonic() + 10, "token")
        links.connect()
        links.measure(links.deadline)
        links.warn_of_slow_ones()
        return links

    def train(self, seconds: float = 5.0) -> tuple[Links, str]:
        first = str(self.looks[0].session.own[0][1].ip)
        networks = measured(self.looks, first, time.monotonic() + seconds)
        best = chosen(networks)
        return best, told(best, networks[0])


class FakeSession:
    def __init__(self, desk: Desk, number: int, own):
        self.desk, self.number, self.own, self.asked = desk, number, own, []

    def send(self, op: str, **request):
        self.asked.append(op)
        return getattr(self, op)(**request)

    def answer(self, answer, op: str, deadline: float):
        if isinstance(answer, HostError):
            raise answer
        return answer

    def call(self, op: str, deadline: float, **request):
        return self.answer(self.send(op, **request), op, deadline)

    def open(self, peer: str, interface: str, token: str):
        if interface == "gone":
            return HostError(NAMES[self.number], "the process is gone")
        there, routed = ipaddress.ip_address(peer), self.desk.routed
        near = [each for each in self.own if there in each[1].network and (routed is None or each[0] in routed)]
        named = [each for each in self.own if each[0] == interface]
        if interface and not named:
            return {"wrong": f"{peer}: {interface} is not an interface of this machine\n  Its interfaces: lo."}
        name, at = (named or near or self.own)[0]
        others = [[other, str(of.ip), of.network.prefixlen] for other, of in self.own if of.network != at.network]
        place = {"address": str(at.ip), "interface": name, "port": hash(name) % 60000, "datagram_port": 2}
        return {**place, "networks": others}

    def connect(self, me: int, peers: list, timeout: float):
        found = [[99, SILENT]]  # of a host that nobody has asked for
        for number, address, *_ in peers:
            works = self.mbit_to(address) > 0
            time.sleep(0 if works or not self.desk.slow else timeout)
            found.append([number, self.desk.failing.get((me, number), {"latency": 0.001} if works else SILENT)])
        return {"links": found}

    def mbit_to(self, address: str) -> float:
        there = ipaddress.ip_address(address)
        return max((self.desk.mbit[name] for name, of in self.own if there in of.network), default=0)

    def heard(self):
        every = range(len(self.desk.looks))
        return {"heard": [source for source in every if (source, self.number) not in self.desk.lost]}

    def burst(self, address: str, **request):
        self.sent = self.mbit_to(address)
        return {"sent": 1}

    def burst_from(self, source: int, port: int, deadline: float):
        return {"bytes": int(self.desk.looks[source].session.sent * 1e6 / 8), "seconds": 1.0}

    def begin_groups(self, me: int, address: str, peers: list, seconds: float):
        return {"told": [[peer, "0/0", "where it listens"] for peer in peers]}

    def form_groups(self, told: list, seconds: float):
        return {"groups": [[peer, self.desk.gloo] for peer, *_ in told]}


def said(failing, *lost) -> str:
    """The one problem of three hosts."""
    (problem,) = Desk(failing=failing, lost=lost).usual().problems
    return str(problem)


def test_healthy_links_are_measured():
    links = Desk().usual()
    assert (len(links.pairs), links.problems) == (6, [])
    assert all(pair.failed is None and pair.mbit == pytest.approx(100.0) for pair in links.pairs.values())
    assert links.is_whole and links.slowest_mbit == pytest.approx(100.0)


def test_a_firewall_between_two_hosts():
    pair, back = (0, 1), (1, 0)
    both = {pair: SILENT, back: SILENT}
    problem = said(both, pair, back)
    assert problem.startswith("ada <-> ben: nothing gets through either way (192.168.1.1 (en0), 192.168.1.2 (en0))")
    assert "In the firewall of ada and ben, allow" in problem
    assert said(both).startswith("ada <-> ben: TCP fails both ways, although datagrams arrive")
    problem = said(both, back)
    assert problem.startswith("ben -> ada: packets are lost in this direction; in the other they arrive")
    assert "Let ada accept packets from ben" in problem


def test_a_mac_is_told_how_its_firewall_lets_that_python_pass():
    desk = Desk(failing={(0, 1): SILENT, (2, 1): SILENT})
    desk.looks[1].facts.facts = {"system": "Darwin", "program": "/opt/Python.app/Contents/MacOS/Python"}
    (problem,) = map(str, desk.usual().problems)
    allow = "socketfilterfw --add /opt/Python.app/Contents/MacOS/Python` and `sudo "
    assert "On ben (with an administrator's password): `sudo /usr/libexec" in problem and allow in problem
    assert "ufw" not in problem


@pytest.mark.parametrize(
    ("failed", "errno", "words", "remedy"),
    [
        ("timeout", None, "no answer from 192.168.1.3 (en0)", "In the firewall of cleo, allow"),
        ("refused", 61, "192.168.1.3 (en0) refuses the connection", "Name the right interface of cleo"),
        ("No route to host", 65, "no route to 192.168.1.3 (en0) (No route to host)", "Local Network."),
        ("broken", None, "192.168.1.3 (en0): broken", "Name the right interface of cleo"),
    ],
)
def test_one_host_that_the_others_do_not_reach(failed, errno, words, remedy):
    result = {"failed": failed, "errno": errno}
    problem = said({(0, 2): result, (1, 2): result})
    assert problem.startswith(f"ada, ben -> cleo: {words}; cleo -> ada, ben works\n") and remedy in problem


def test_a_host_whose_python_may_not_use_the_local_network_is_told_once():
    denied = {"failed": DENIED, "errno": 65}
    problem = said({(0, 1): denied, (0, 2): denied})
    assert problem.startswith(f"ada: {DENIED}: it reaches none of ben, cleo\n  Start from Terminal.app")


def test_a_slow_link_is_a_warning():
    links = Desk(mbit={"en0": 3}).usual()
    assert {problem.severity for problem in links.problems} == {WARNING}
    assert "ada -> ben: only 3.0 Mbit/s" in [problem.what for problem in links.problems]


def test_a_wrong_interface_and_a_host_that_is_lost_leave_the_others_their_links():
    links = Desk(named=("", "nope0", "")).usual()
    (problem,) = links.problems
    assert (problem.severity, problem.status) == (ERROR, ExitStatus.CONFIG)
    assert "nope0 is not an interface" in problem.what and problem.remedy == "Its interfaces: lo."
    assert {(pair.source, pair.target) for pair in links.pairs.values()} == {("ada", "cleo"), ("cleo", "ada")}
    links = Desk(named=("", "", "gone")).usual()
    assert len(links.pairs) == 2 and not links.is_whole
    assert "its links could not be tested: the process is gone" in links.problems[0].what


@pytest.mark.parametrize("count", range(2, 8))
def test_tournament_holds_every_ordered_pair_once_and_disjoint_ones_together(count):
    turns = tournament(range(count))
    assert sorted(pair for turn in turns for pair in turn) == sorted(itertools.permutations(range(count), 2))
    assert all(len({host for pair in turn for host in pair}) == 2 * len(turn) for turn in turns)


# Which network.

BOTH, RATES = [WIFI, BRIDGE], {"en0": 400, "bridge0": 9000}


def test_a_pair_on_two_links_takes_the_faster():
    best, line = Desk(BOTH, BOTH, mbit=RATES).train()
    assert best.peer == "169.254.7.1" and {place["interface"] for place in best.places.values()} == {"bridge0"}
    assert line == "training uses bridge0 (169.254.7.1), 9000 Mbit/s, and not en0 (192.168.1.1), 400 Mbit/s"


def test_a_thunderbolt_bridge_that_no_route_leads_to_is_told_with_what_helps():
    """Seen on Macs: all of 169.254.0.0/16 is routed by Wi-Fi."""
    best, line = Desk(BOTH, BOTH, mbit=RATES, routed=["en0"]).train()
    assert best.peer == "192.168.1.1"
    assert line.startswith("the Thunderbolt Bridge (bridge0) is not used") and "10.10.0.1" in line
    assert Desk(BOTH, [WIFI], mbit=RATES).train()[1] == ""


def test_another_network_that_is_hardly_faster_is_not_worth_a_change():
    best, line = Desk([WIFI, CABLE], [WIFI, CABLE], mbit={"en0": 900, "en5": 940}).train()
    assert (best.peer, line) == ("192.168.1.1", "")


@pytest.mark.parametrize(("first", "second"), [(CABLE, BRIDGE), (BRIDGE, CABLE)])
def test_an_address_that_nobody_assigned_is_not_taken_where_there_is_another(first, second):
    best, _ = Desk([first, second], [first, second], mbit={"en5": 900, "bridge0": 900}).train()
    assert best.peer == "10.0.0.1"


def test_a_network_that_only_some_hosts_have_or_every_machine_for_its_containers_is_not_tried():
    desk = Desk(BOTH, BOTH, [WIFI], mbit=RATES)
    assert desk.train()[0].peer == "192.168.1.1"
    assert [look.session.asked.count("connect") for look in desk.looks] == [1, 1, 1]
    docker = Desk([WIFI, DOCKER], [WIFI, DOCKER], mbit={"en0": 400, "br0": 9000})
    assert docker.train()[0].peer == "192.168.1.1"


@pytest.mark.parametrize(
    ("named", "peer"), [(("en0", ""), "192.168.1.1"), (("", "en0"), "192.168.1.1"), (("", "bridge0"), "169.254.7.1")]
)
def test_an_interface_that_the_user_named_wins(named, peer):
    assert Desk(BOTH, BOTH, mbit=RATES, named=named).train()[0].peer == peer


def test_a_network_that_keeps_hosts_apart_is_left_for_one_that_does_not_and_explained_if_none_does():
    best, line = Desk([WIFI, CABLE], [WIFI, CABLE], mbit={"en0": 0, "en5": 90}).train()
    assert best.peer == "10.0.0.1" and best.problems == []
    assert line.endswith("and not en0 (192.168.1.1), where not all hosts reach each other")
    best, line = Desk([WIFI, CABLE], [WIFI, CABLE], mbit={"en0": 0, "en5": 0}).train()
    assert (best.peer, line) == ("192.168.1.1", "")
    (problem,) = best.problems
    assert "192.168.1.1 (en0)" in problem.what


def test_with_eight_hosts_on_many_networks_there_are_figures_of_the_usual_one_at_least():
    hosts = [[WIFI, CABLE, SIXTH, SEVENTH]] * 8
    best, _ = Desk(*hosts, mbit={"en0": 5, "en5": 4, "en6": 3, "en7": 2}).train(2.8)
    assert len(best.pairs) == 56 and all(pair.mbit == 5 for pair in best.pairs.values())


def test_networks_that_lose_packets_leave_time_for_the_figures_of_the_usual_one():
    desk = Desk(*[[WIFI, CABLE, SIXTH, SEVENTH]] * 2, mbit={"en0": 5, "en5": 0, "en6": 0, "en7": 0})
    desk.slow = True
    begin = time.monotonic()
    best, _ = desk.train(3.0)
    assert time.monotonic() - begin < 3.0 and all(pair.mbit == 5 for pair in best.pairs.values())


# gloo, as hosts tell of it; test_groups.py has the real one.


@pytest.fixture
def joined():
    """Hosts with torch, and their links."""
    desk = Desk()
    for look in desk.looks:
        look.facts.facts, look.facts.torch = {"system": "Linux"}, {"version": "2.14.0"}
    return desk, desk.usual()


@pytest.mark.parametrize("seconds", [60.0, 2.0])
def test_pairs_that_are_silent_are_an_error_only_if_they_had_time_enough(joined, seconds):
    desk, links = joined
    desk.gloo = "no answer"
    (problem,) = form_groups(links, time.monotonic() + seconds)
    assert set(problem.hosts) == set(NAMES[:3])
    if seconds > 3:
        assert problem.severity == ERROR and problem.what.endswith("no answer")
        assert problem.what.startswith("ada <-> ben, ada <-> cleo, ben <-> cleo: TCP connects, but gloo does not (")
    else:
        tried = r"whether gloo connects was not tried among ada, ben, cleo: there were only 1\.\d s for it"
        assert problem.severity == WARNING and re.fullmatch(tried, problem.what)


def test_where_torch_is_not_imported_in_time_or_there_is_none_left_it_says_so(joined):
    desk, links = joined
    (problem,) = form_groups(links, time.monotonic() + 1.0)
    assert problem.what == "whether gloo connects was not tried among ada, ben, cleo: there was no time left"
    desk.looks[1].facts.torch = {"late": True}
    (problem,) = form_groups(links, time.monotonic() + 60)
    assert (problem.severity, problem.hosts) == (WARNING, ("ben",))
    assert problem.what.startswith("whether gloo connects was not tried: importing torch took too long")


def test_pairs_that_tcp_or_their_systems_keep_apart_are_not_tried(joined):
    desk, links = joined
    desk.gloo = "broken"
    links.pairs[1, 2].failed = links.pairs[0, 2].failed = "timeout"
    (problem,) = form_groups(links, time.monotonic() + 60)
    assert problem.what.startswith("ada <-> ben: TCP connects") and problem.hosts == ("ada", "ben")
    for look in desk.looks[1:]:
        look.facts.facts = {"system": "Darwin"}  # which is refused anyway
    assert form_groups(links, time.monotonic() + 60) == []
