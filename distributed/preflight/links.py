"""A real TCP connection for every ordered pair of hosts, from the Python that trains: is it there, how fast is it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from whisper_tuner.errors import ExitStatus, HostError

from .report import WARNING, HostFacts, Pair, Problem, unique
from .session import Session

CONNECT_S = 2.5  # a lost SYN is sent again after 1 s
BURST_S = 0.4
SHORTEST_BURST_S = 0.05
BURST_BYTES = 8 << 20
SLOW_MBIT = 20.0
NO_ROUTE = {65, 113}  # EHOSTUNREACH on macOS and on Linux


@dataclass(frozen=True, kw_only=True)
class Node:
    """A host that takes part. `peer` is the address towards which it chooses its interface."""

    number: int
    facts: HostFacts
    session: Session
    peer: str

    @property
    def name(self) -> str:
        return self.facts.name


@dataclass(frozen=True, kw_only=True)
class Place:
    address: str
    interface: str
    port: int
    datagram_port: int


class Links:
    """Measures all pairs of `nodes`, and names what is wrong; fills in each host's address and interface."""

    def __init__(self, nodes: Sequence[Node], deadline: float):
        self.nodes, self.deadline = list(nodes), deadline
        self.problems: list[Problem] = []
        self.places: dict[int, Place] = {}
        self.found: dict[tuple[int, int], dict] = {}
        self.mbit: dict[tuple[int, int], float] = {}

    def measure(self) -> list[Pair]:
        self._open()
        self.nodes = [node for node in self.nodes if node.number in self.places]
        if len(self.nodes) > 1:
            self._connect()
            self._explain()
            self._bursts()
        return [self._pair(source, target) for source in self.nodes for target in self.nodes if source is not target]

    def _open(self) -> None:
        token = secrets.token_hex(16)
        interface = {node.number: node.facts.host.interface or "" for node in self.nodes}
        answers = self._ask_all(
            "open",
            lambda node: {"peer": node.peer, "interface": interface[node.number], "token": token},
        )
        for node, answer in answers:
            if "wrong" in answer:
                what, _, remedy = answer["wrong"].partition("\n")
                status = ExitStatus.CONFIG if interface[node.number] else ExitStatus.HOST
                self._add(node, f"no interface towards the others: {what}", remedy.strip(), status=status)
                continue
            self.places[node.number] = place = Place(**answer)
            node.facts.address, node.facts.interface = place.address, place.interface

    def _connect(self) -> None:
        def request(node: Node) -> dict:
            others = [(number, place) for number, place in self.places.items() if number != node.number]
            peers = [[number, place.address, place.port, place.datagram_port] for number, place in others]
            return {"me": node.number, "peers": peers, "timeout": CONNECT_S}

        for node, answer in self._ask_all("connect", request):
            for target, result in answer["links"]:
                self.found[node.number, target] = result

    def _explain(self) -> None:
        """Failed connections in words: one problem for what belongs together."""
        failed = {pair: result for pair, result in self.found.items() if "failed" in result}
        if not failed:
            return
        heard = {node.number: set(answer["heard"]) for node, answer in self._ask_all("heard", lambda node: {})}
        silent = {pair for pair, result in failed.items() if result["failed"] == "timeout"}
        both = {(a, b) for a, b in silent if a < b and (b, a) in silent}
        for a, b in sorted(both):
            self._explain_both(a, b, a in heard.get(b, ()), b in heard.get(a, ()))
        rest = {pair: result for pair, result in failed.items() if pair not in both and pair[::-1] not in both}
        by_target: dict[tuple[int, str, int | None], list[int]] = {}
        for (source, target), result in sorted(rest.items()):
            by_target.setdefault((target, result["failed"], result["errno"]), []).append(source)
        for (target, reason, errno), sources in by_target.items():
            self._explain_one_way(sources, target, reason, errno)

    def _explain_both(self, a: int, b: int, arrives: bool, returns: bool) -> None:
        first, second = self._name(a), self._name(b)
        if arrives == returns:
            how = (
                "TCP connections fail both ways, although datagrams arrive"
                if arrives
                else "nothing gets through either way"
            )
            at = f"({self._at(a)}, {self._at(b)})"
            self._add_pair((a, b), f"{first} <-> {second}: {how} {at}", _firewall(first, second))
            return
        source, target = (b, a) if arrives else (a, b)
        remedy = f"Let {self._name(target)} take packets from {self._name(source)} (firewall, router, Wi-Fi isolation)."
        what = f"{self._name(source)} -> {self._name(target)}: packets are lost on this way; the other way they arrive"
        self._add_pair((source, target), what, remedy)

    def _explain_one_way(self, sources: list[int], target: int, reason: str, errno: int | None) -> None:
        names, name = ", ".join(map(self._name, sources)), self._name(target)
        back = all("latency" in self.found.get((target, source), {}) for source in sources)
        reverse = f"; {name} -> {names} works" if back else ""
        where = f"{names} -> {name}: "
        if reason == "timeout":
            self._add_pair((*sources, target), f"{where}no answer from {self._at(target)}{reverse}", _firewall(name))
        elif reason == "refused":
            other = f'Is {self._at(target)} the right interface? Name another with "interface" in the hosts file.'
            self._add_pair((*sources, target), f"{where}{self._at(target)} refuses the connection{reverse}", other)
        elif errno in NO_ROUTE:
            network = (
                f'Are they in one network? Name the right interface of {name} with "interface" in the hosts file.'
                " On a Mac allow the terminal in System Settings > Privacy & Security > Local Network."
            )
            self._add_pair((*sources, target), f"{where}no way to {self._at(target)} ({reason}){reverse}", network)
        else:
            remedy = f'Name the right interface of {name} with "interface" in the hosts file.'
            self._add_pair((*sources, target), f"{where}{self._at(target)}: {reason}{reverse}", remedy)

    def _bursts(self) -> None:
        """Disjoint pairs at the same time; with many hosts each burst is shorter, so that all fit in."""
        working = {pair for pair, result in self.found.items() if "latency" in result}
        turns = [turn for turn in tournament([node.number for node in self.nodes]) if working & set(turn)]
        for position, turn in enumerate(turns):
            left = (self.deadline - time.monotonic()) / (len(turns) - position)
            seconds = min(BURST_S, left / 2)
            if seconds < SHORTEST_BURST_S:
                break
            pairs = [pair for pair in turn if pair in working]
            with ThreadPoolExecutor(max_workers=len(pairs)) as pool:
                list(pool.map(lambda pair, seconds=seconds: self._burst(*pair, seconds), pairs))
        self._judge_speed()

    def _burst(self, source: int, target: int, seconds: float) -> None:
        nodes = {node.number: node for node in self.nodes}
        place, deadline = self.places[target], min(self.deadline, time.monotonic() + seconds + 1.0)
        request = {"me": source, "address": place.address, "port": place.port, "seconds": seconds, "limit": BURST_BYTES}
        try:
            nodes[source].session.call("burst", deadline, **request)
        except HostError:
            return  # its connection was there a moment ago: no figure is better than a false alarm
        burst = nodes[target].session.burst_from(source, deadline)
        if burst and burst["seconds"] > 0:
            self.mbit[source, target] = burst["bytes"] * 8 / burst["seconds"] / 1e6

    def _judge_speed(self) -> None:
        for (a, b), mbit in self.mbit.items():
            if mbit < SLOW_MBIT:
                remedy = "A cable, or a place nearer to the access point; LoRA and longer rounds send less."
                text = f"{self._name(a)} -> {self._name(b)}: only {mbit:.1f} Mbit/s"
                self._add_pair((a, b), text, remedy, severity=WARNING)

    def _pair(self, source: Node, target: Node) -> Pair:
        key = (source.number, target.number)
        result = self.found.get(key, {"failed": "not tried"})
        return Pair(
            source=source.name,
            target=target.name,
            latency_s=result.get("latency"),
            mbit=self.mbit.get(key),
            failed=result.get("failed"),
        )

    def _ask_all(self, op: str, request: Callable[[Node], dict]) -> Iterator[tuple[Node, dict]]:
        """The answers of all nodes, asked at once; a node that fails becomes a problem."""
        numbers = [(node, node.session.send(op, **request(node))) for node in self.nodes]
        for node, number in numbers:
            try:
                yield node, node.session.answer(number, op, self.deadline)
            except HostError as error:
                what = f"its links could not be tried: {error.args[0].removeprefix(node.name + ': ')}"
                self._add(node, what, "Is its cable or Wi-Fi steady? Look again: multimac hosts check")

    def _name(self, number: int) -> str:
        return next(node.name for node in self.nodes if node.number == number)

    def _at(self, number: int) -> str:
        place = self.places[number]
        return f"{place.address} ({place.interface})"

    def _add(self, node: Node, what: str, remedy: str = "", *, status: ExitStatus = ExitStatus.HOST) -> None:
        self.problems.append(Problem(hosts=(node.name,), what=what, remedy=remedy, check="links", status=status))

    def _add_pair(self, numbers: Sequence[int], what: str, remedy: str, **more: str) -> None:
        names = tuple(unique(map(self._name, numbers)))
        self.problems.append(Problem(hosts=names, what=what, remedy=remedy, check="links", **more))


def tournament(numbers: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Turns of disjoint ordered pairs that hold every ordered pair once (circle method)."""
    players: list[int | None] = [*numbers, *([None] if len(numbers) % 2 else [])]
    turns = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = [(a, b) for a, b in zip(players[:half], reversed(players[half:]), strict=True) if None not in (a, b)]
        turns += [pairs, [(b, a) for a, b in pairs]]
        players = [players[0], players[-1], *players[1:-1]]
    return turns


def _firewall(*names: str) -> str:
    where = " and ".join(names)
    return (
        f"Let the firewall of {where} pass connections from the other hosts. On a Mac: System Settings > Network >"
        " Firewall > Options, allow that Python. On Linux: `ufw allow from ADDRESS`."
    )
