"""What failed connections are called, and how fast the others are; hosts answer as they would."""

import time

import pytest

from distributed.checkup.findings import Severity
from distributed.checkup.links import Links
from distributed.checkup.look import Look
from distributed.ssh.host import Host
from distributed.ssh.local_network import DENIED
from whisper_tuner.errors import ExitStatus, HostError

ERROR, WARNING = Severity.ERROR, Severity.WARNING
NAMES = ["ada", "ben", "cleo"]
WELL = {"latency": 0.001}
SILENT = {"failed": "timeout", "errno": None}


class Network:
    """Three hosts; `failing`: by pair of numbers, how TCP fails; `lost`: pairs whose datagrams do not arrive."""

    def __init__(self, failing=(), *, lost=(), mbit: float = 100.0):
        self.failing, self.lost, self.mbit = dict(failing), set(lost), mbit

    def links(self, **changes) -> Links:
        looks = [Look(number, Host(address=name, interface=changes.get(name))) for number, name in enumerate(NAMES)]
        for look in looks:
            look.session = FakeSession(self, look.number)
        return Links(looks, "192.0.2.1", time.monotonic() + 10, "token")


class FakeSession:
    def __init__(self, network: Network, number: int):
        self.network, self.number = network, number

    def send(self, op: str, **request):
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
        if interface:
            return {"wrong": f"{peer}: {interface} is not an interface of this machine\n  Its interfaces: lo."}
        return {"address": f"192.0.2.{self.number}", "interface": "en0", "port": 1, "datagram_port": 2}

    def connect(self, me: int, peers: list, timeout: float):
        found = [[peer[0], self.network.failing.get((me, peer[0]), WELL)] for peer in peers]
        return {"links": [*found, [99, SILENT]]}  # of a host that nobody has asked for

    def heard(self):
        return {"heard": [source for source in range(3) if (source, self.number) not in self.network.lost]}

    def burst(self, **request):
        return {"sent": 1}

    def burst_from(self, source: int, port: int, deadline: float):
        return {"bytes": int(self.network.mbit * 1e6 / 8), "seconds": 1.0}


def measured(links: Links) -> Links:
    links.connect()
    links.measure(links.deadline)
    links.warn_of_slow_ones()
    return links


def said(network: Network) -> list[str]:
    links = measured(network.links())
    return [str(problem) for problem in links.problems]


def test_healthy_links_are_measured():
    links = measured(Network().links())
    assert (len(links.pairs), links.problems) == (6, [])
    assert all(pair.failed is None and pair.mbit == pytest.approx(100.0) for pair in links.pairs.values())
    assert links.is_whole and links.slowest_mbit == pytest.approx(100.0)


def test_a_firewall_between_two_hosts():
    pair, back = (0, 1), (1, 0)
    (problem,) = said(Network({pair: SILENT, back: SILENT}, lost=[pair, back]))
    assert problem.startswith("ada <-> ben: nothing gets through either way (192.0.2.0 (en0), 192.0.2.1 (en0))")
    assert "In the firewall of ada and ben, allow" in problem
    (problem,) = said(Network({pair: SILENT, back: SILENT}))
    assert problem.startswith("ada <-> ben: TCP fails both ways, although datagrams arrive")


def test_a_mac_is_told_how_its_firewall_lets_that_python_pass():
    silent = {(0, 1): SILENT, (2, 1): SILENT}
    links = Network(silent).links()
    links.looks[1].facts.facts = {"system": "Darwin", "program": "/opt/Python.app/Contents/MacOS/Python"}
    measured(links)
    (problem,) = map(str, links.problems)
    allow = "socketfilterfw --add /opt/Python.app/Contents/MacOS/Python` and `sudo "
    assert "On ben (with an administrator's password): `sudo /usr/libexec" in problem and allow in problem
    assert "ufw" not in problem


def test_packets_that_are_lost_one_way():
    (problem,) = said(Network({(0, 1): SILENT, (1, 0): SILENT}, lost=[(1, 0)]))
    assert problem.startswith("ben -> ada: packets are lost in this direction; in the other they arrive")
    assert "Let ada accept packets from ben" in problem


@pytest.mark.parametrize(
    ("result", "words", "remedy"),
    [
        (SILENT, "no answer from 192.0.2.2 (en0)", "In the firewall of cleo, allow"),
        (
            {"failed": "refused", "errno": 61},
            "192.0.2.2 (en0) refuses the connection",
            "Name the right interface of cleo",
        ),
        (
            {"failed": "No route to host", "errno": 65},
            "no route to 192.0.2.2 (en0) (No route to host)",
            "Local Network.",
        ),
        ({"failed": "broken", "errno": None}, "192.0.2.2 (en0): broken", "Name the right interface of cleo"),
    ],
)
def test_one_host_that_the_others_do_not_reach(result, words, remedy):
    (problem,) = said(Network({(0, 2): result, (1, 2): result}))
    assert problem.startswith(f"ada, ben -> cleo: {words}; cleo -> ada, ben works\n") and remedy in problem


def test_a_host_whose_python_may_not_use_the_local_network_is_told_once():
    denied = {"failed": DENIED, "errno": 65}
    (problem,) = said(Network({(0, 1): denied, (0, 2): denied}))
    assert problem.startswith(f"ada: {DENIED}: it reaches none of ben, cleo\n  Start from Terminal.app")


def test_a_slow_link_is_a_warning():
    links = measured(Network(mbit=3.0).links())
    assert {problem.severity for problem in links.problems} == {WARNING}
    assert "ada -> ben: only 3.0 Mbit/s" in [problem.what for problem in links.problems]


def test_a_wrong_interface_and_a_host_that_is_lost_leave_the_others_their_links():
    links = measured(Network().links(ben="nope0"))
    (problem,) = links.problems
    assert (problem.severity, problem.status) == (ERROR, ExitStatus.CONFIG)
    assert "nope0 is not an interface" in problem.what and problem.remedy == "Its interfaces: lo."
    assert {(pair.source, pair.target) for pair in links.pairs.values()} == {("ada", "cleo"), ("cleo", "ada")}
    links = measured(Network().links(cleo="gone"))
    assert len(links.pairs) == 2 and not links.is_whole
    assert "its links could not be tested: the process is gone" in links.problems[0].what
