"""A real TCP connection for every ordered pair of hosts, from the Python that trains: is it there, how fast is it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from whisper_tuner.errors import ExitStatus, HostError

from .report import WARNING, HostFacts, Pair, Problem, unique
from .session import Session

CONNECT_S = 2.5  # a lost SYN is sent again after 1 s
BURST_S = 0.4
SHORTEST_BURST_S = 0.05
BURST_BYTES = 8 << 20
SLOW_MBIT = 20.0
NO_ROUTE = {65, 113}  # EHOSTUNREACH on macOS and on Linux
OTHER_INTERFACE = 'Name the right interface of {} with "interface" in the hosts file.'


@dataclass(kw_only=True)
class Node:
    """A host that takes part. `peer` is the address towards which it chooses its interface; `place`, where it listens:
    `address`, `interface`, `port`, `datagram_port`."""

    number: int
    facts: HostFacts
    session: Session
    peer: str
    place: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def at(self) -> str:
        return f"{self.place['address']} ({self.place['interface']})"


class Links:
    """Measures all pairs of `nodes`, and names what is wrong; fills in each host's address and interface.

    `found` and `mbit` are by ordered pair of node numbers.
    """

    def __init__(self, nodes: Sequence[Node], deadline: float):
        self.nodes, self.deadline = {node.number: node for node in nodes}, deadline
        self.problems: list[Problem] = []
        self.found: dict[tuple[int, int], dict] = {}
        self.mbit: dict[tuple[int, int], float] = {}

    def measure(self) -> list[Pair]:
        self._open()
        self.nodes = {number: node for number, node in self.nodes.items() if node.place}
        if len(self.nodes) > 1:
            self._connect()
            self._explain()
            self._bursts()
        return [self._pair(source, target) for source in self.nodes for target in self.nodes if source != target]

    def _open(self) -> None:
        token = secrets.token_hex(16)

        def request(node: Node) -> dict:
            return {"peer": node.peer, "interface": node.facts.host.interface or "", "token": token}

        for node, answer in self._call_all("open", request):
            if "wrong" in answer:
                what, _, remedy = answer["wrong"].partition("\n")
                status = ExitStatus.CONFIG if node.facts.host.interface else ExitStatus.HOST
                what = f"no interface towards the others: {what}"
                self._add([node.number], what, remedy.strip(), status=status)
                continue
            node.place = answer
            node.facts.address, node.facts.interface = answer["address"], answer["interface"]

    def _connect(self) -> None:
        def request(node: Node) -> dict:
            others = [other for other in self.nodes.values() if other is not node]
            peers = [[o.number, o.place["address"], o.place["port"], o.place["datagram_port"]] for o in others]
            return {"me": node.number, "peers": peers, "timeout": CONNECT_S}

        for node, answer in self._call_all("connect", request):
            for target, result in answer["links"]:
                self.found[node.number, target] = result

    def _explain(self) -> None:
        """Failed connections in words: one problem for what belongs together."""
        failed = {pair: result for pair, result in self.found.items() if "failed" in result}
        if not failed:
            return
        heard = {node.number: set(answer["heard"]) for node, answer in self._call_all("heard", lambda node: {})}
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
        """arrives, returns: whether datagrams get from a to b, and from b to a."""
        first, second = self.nodes[a], self.nodes[b]
        if arrives != returns:
            source, target = (second, first) if arrives else (first, second)
            way = f"{source.name} -> {target.name}"
            remedy = f"Let {target.name} take packets from {source.name} (firewall, router, Wi-Fi isolation)."
            what = f"{way}: packets are lost on this way; the other way they arrive"
            self._add([source.number, target.number], what, remedy)
            return
        how = (
            "TCP connections fail both ways, although datagrams arrive"
            if arrives
            else "nothing gets through either way"
        )
        what = f"{first.name} <-> {second.name}: {how} ({first.at}, {second.at})"
        self._add([a, b], what, _firewall(first.name, second.name))

    def _explain_one_way(self, sources: list[int], target: int, reason: str, errno: int | None) -> None:
        names, node = ", ".join(self.nodes[source].name for source in sources), self.nodes[target]
        back = all("latency" in self.found.get((target, source), {}) for source in sources)
        reverse = f"; {node.name} -> {names} works" if back else ""
        way, at, everyone = f"{names} -> {node.name}", node.at, [*sources, target]
        if reason == "timeout":
            self._add(everyone, f"{way}: no answer from {at}{reverse}", _firewall(node.name))
        elif reason == "refused":
            remedy = f'Is {at} the right interface? Name another with "interface" in the hosts file.'
            self._add(everyone, f"{way}: {at} refuses the connection{reverse}", remedy)
        elif errno in NO_ROUTE:
            near = f"Are they in one network? {OTHER_INTERFACE.format(node.name)}"
            allow = "On a Mac allow the terminal in System Settings > Privacy & Security > Local Network."
            self._add(everyone, f"{way}: no way to {at} ({reason}){reverse}", f"{near} {allow}")
        else:
            self._add(everyone, f"{way}: {at}: {reason}{reverse}", OTHER_INTERFACE.format(node.name))

    def _bursts(self) -> None:
        """Disjoint pairs at the same time; with many hosts each burst is shorter, so that all fit in."""
        working = {pair for pair, result in self.found.items() if "latency" in result}
        turns = [turn for turn in tournament(list(self.nodes)) if working & set(turn)]
        for position, turn in enumerate(turns):
            left = (self.deadline - time.monotonic()) / (len(turns) - position)
            seconds = min(BURST_S, left / 2)
            if seconds < SHORTEST_BURST_S:
                break
            pairs = [pair for pair in turn if pair in working]
            with ThreadPoolExecutor(max_workers=len(pairs)) as pool:
                list(pool.map(lambda pair, seconds=seconds: self._burst(*pair, seconds), pairs))

    def _burst(self, source: int, target: int, seconds: float) -> None:
        sender, receiver = self.nodes[source], self.nodes[target]
        deadline = min(self.deadline, time.monotonic() + seconds + 1.0)
        where = {"address": receiver.place["address"], "port": receiver.place["port"]}
        try:
            sender.session.call("burst", deadline, me=source, seconds=seconds, limit=BURST_BYTES, **where)
        except HostError:
            return  # its connection was there a moment ago: no figure is better than a false alarm
        burst = receiver.session.burst_from(source, deadline)
        if not burst or burst["seconds"] <= 0:
            return
        self.mbit[source, target] = mbit = burst["bytes"] * 8 / burst["seconds"] / 1e6
        if mbit < SLOW_MBIT:
            remedy = "A cable, or a place nearer to the access point; LoRA and longer rounds send less."
            what = f"{sender.name} -> {receiver.name}: only {mbit:.1f} Mbit/s"
            self._add([source, target], what, remedy, severity=WARNING)

    def _pair(self, source: int, target: int) -> Pair:
        result = self.found.get((source, target), {"failed": "not tried"})
        return Pair(
            source=self.nodes[source].name,
            target=self.nodes[target].name,
            latency_s=result.get("latency"),
            mbit=self.mbit.get((source, target)),
            failed=result.get("failed"),
        )

    def _call_all(self, op: str, request: Callable[[Node], dict]) -> Iterator[tuple[Node, dict]]:
        """The answers of all nodes, asked at once; a node that fails becomes a problem."""
        numbers = [(node, node.session.send(op, **request(node))) for node in self.nodes.values()]
        for node, number in numbers:
            try:
                yield node, node.session.answer(number, op, self.deadline)
            except HostError as error:
                what = f"its links could not be tried: {error.args[0].removeprefix(node.name + ': ')}"
                self._add([node.number], what, "Is its cable or Wi-Fi steady? Look again: multimac hosts check")

    def _add(self, numbers: Sequence[int], what: str, remedy: str, **more) -> None:
        names = tuple(unique(self.nodes[number].name for number in numbers))
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
