"""Tries and measures a real TCP connection for every ordered pair of hosts, from the Python that trains."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from distributed.ssh.local_network import DENIED, WAYS_OUT, allow_lines
from whisper_tuner.errors import ExitStatus, HostError

from .facts import NOT_TRIED, Pair
from .findings import Finding, Severity
from .look import Look, ask_all

CONNECT_S = 2.5  # a lost SYN is sent again after 1 s
BURST_S = 0.4
SHORTEST_BURST_S = 0.05
SHARE = 2  # a burst takes so many times its seconds: to begin, and to end on a slow link
BURST_BYTES = 8 << 20
SLOW_MBIT = 20.0
NO_ROUTE = {65, 113}  # EHOSTUNREACH on macOS and on Linux


class Links:
    """Measures all pairs of hosts on one network, and names what is wrong.

    peer: where ranks would meet; towards it the hosts choose their interface. Pairs go by the numbers of both hosts.
    token: one for all networks of a preflight.
    """

    def __init__(self, looks: Sequence[Look], peer: str, deadline: float, token: str, *, connect_s: float = CONNECT_S):
        self.looks, self.peer, self.deadline = {look.number: look for look in looks}, peer, deadline
        self.token, self.connect_s = token, connect_s
        self.places: dict[int, dict] = {}  # where each host listens: see PLACE
        self.pairs: dict[tuple[int, int], Pair] = {}
        self.problems: list[Finding] = []

    @property
    def is_whole(self) -> bool:
        """Tell if all hosts listen, and each reaches each other."""
        return bool(self.pairs) and not self.problems and all(pair.failed is None for pair in self.pairs.values())

    @property
    def slowest_mbit(self) -> float:
        """Return the rate of the slowest pair in Mbit/s; 0 where one is not reached, or nothing was measured."""
        return min((pair.mbit or 0.0 for pair in self.pairs.values()), default=0.0)

    @property
    def least_s(self) -> float:
        """Return how many seconds it takes at least to measure all pairs."""
        return max(1, len(tournament(list(self.looks)))) * SHARE * SHORTEST_BURST_S

    def connect(self) -> None:
        self.open()
        for a, b in itertools.permutations(self.looks, 2):
            self.pairs[a, b] = Pair(source=self.looks[a].name, target=self.looks[b].name)
        if self.pairs:
            self._connect()
            self._explain()

    def open(self) -> None:
        """Let the hosts listen; those that cannot are left out."""

        def request(look: Look) -> dict:
            return {"peer": self.peer, "interface": look.facts.host.interface or "", "token": self.token}

        for look, answer in self._call_all("open", request):
            if "wrong" in answer:
                what, _, remedy = answer["wrong"].partition("\n")
                status = ExitStatus.CONFIG if look.facts.host.interface else ExitStatus.HOST
                self._add([look.number], f"no interface towards the others: {what}", remedy.strip(), status=status)
                continue
            self.places[look.number] = answer
        self.looks = {number: self.looks[number] for number in self.places}

    def _connect(self) -> None:
        def request(look: Look) -> dict:
            others = {number: place for number, place in self.places.items() if number != look.number}
            peers = [[number, at["address"], at["port"], at["datagram_port"]] for number, at in others.items()]
            return {"me": look.number, "peers": peers, "timeout": self.connect_s}

        for look, answer in self._call_all("connect", request):
            for target, result in answer["links"]:
                if pair := self.pairs.get((look.number, target)):
                    pair.failed, pair.errno = result.get("failed"), result.get("errno")
                    pair.latency_s = result.get("latency")

    def _explain(self) -> None:
        """Put failed connections into words: one problem for what belongs together."""
        failed = {key for key, pair in self.pairs.items() if pair.failed not in (None, NOT_TRIED)}
        if not failed:
            return
        denied = {key for key in failed if self.pairs[key].failed == DENIED}
        self._explain_denied(denied)
        failed -= denied
        heard = {look.number: answer["heard"] for look, answer in self._call_all("heard", lambda look: {})}
        silent = {key for key in failed if self.pairs[key].failed == "timeout"}
        both = {(a, b) for a, b in silent if (b, a) in silent}
        for a, b in sorted(both):
            if a < b:
                self._explain_both(a, b, a in heard.get(b, ()), b in heard.get(a, ()))
        by_target: dict[tuple[int, str, int | None], list[int]] = {}
        for source, target in sorted(failed - both):
            pair = self.pairs[source, target]
            by_target.setdefault((target, pair.failed, pair.errno), []).append(source)
        for (target, reason, errno), sources in by_target.items():
            self._explain_one_way(sources, target, reason, errno)

    def _explain_denied(self, pairs: set[tuple[int, int]]) -> None:
        for source in sorted({source for source, _ in pairs}):
            targets = ", ".join(self.looks[target].name for number, target in sorted(pairs) if number == source)
            self._add([source], f"{DENIED}: it reaches none of {targets}", WAYS_OUT)

    def _explain_both(self, a: int, b: int, arrives: bool, returns: bool) -> None:
        """arrives, returns: whether datagrams get from a to b, and from b to a."""
        first, second = self.looks[a].name, self.looks[b].name
        if arrives != returns:
            source, target = (second, first) if arrives else (first, second)
            what = f"{source} -> {target}: packets are lost in this direction; in the other they arrive"
            number = a if arrives else b
            accept = f"Let {target} accept packets from {source} (firewall, router, Wi-Fi isolation)."
            self._add([a, b], what, accept + self._allow(number))
            return
        how = "TCP fails both ways, although datagrams arrive" if arrives else "nothing gets through either way"
        what = f"{first} <-> {second}: {how} ({self.at(a)}, {self.at(b)})"
        self._add([a, b], what, self._firewall(a, b))

    def _explain_one_way(self, sources: list[int], target: int, reason: str, errno: int | None) -> None:
        names = ", ".join(self.looks[source].name for source in sources)
        name, at = self.looks[target].name, self.at(target)
        back = all(self.pairs[target, source].failed is None for source in sources)
        reverse = f"; {name} -> {names} works" if back else ""
        way, everyone = f"{names} -> {name}", [*sources, target]
        other = f'Name the right interface of {name} with "interface" in the hosts file.'
        if reason == "timeout":
            self._add(everyone, f"{way}: no answer from {at}{reverse}", self._firewall(target))
        elif reason == "refused":
            self._add(everyone, f"{way}: {at} refuses the connection{reverse}", other)
        elif errno in NO_ROUTE:
            allow = "On a Mac allow the terminal in System Settings > Privacy & Security > Local Network."
            near = f"Are they on the same network? {other} {allow}"
            self._add(everyone, f"{way}: no route to {at} ({reason}){reverse}", near)
        else:
            self._add(everyone, f"{way}: {at}: {reason}{reverse}", other)

    def _firewall(self, *numbers: int) -> str:
        where, commands = " and ".join(self.looks[number].name for number in numbers), self._allow(*numbers)
        return f"In the firewall of {where}, allow connections from the other hosts.{commands}"

    def _allow(self, *numbers: int) -> str:
        """Return the commands that open a firewall: its own for each Mac, or those of Linux."""
        told = []
        for facts in (self.looks[number].facts for number in numbers):
            if facts.facts.get("system") == "Darwin" and (program := facts.facts.get("program")):
                allow = allow_lines(program)
                told.append(f" On {facts.name} (with an administrator's password): {allow}.")
        return "".join(told) or " On Linux: `ufw allow from ADDRESS`."

    def at(self, number: int) -> str:
        return f"{self.places[number]['address']} ({self.places[number]['interface']})"

    def measure(self, deadline: float) -> None:
        """Measure disjoint pairs at the same time; with many hosts each burst is shorter, so that all fit in."""
        working = {key for key, pair in self.pairs.items() if pair.failed is None}
        turns = [turn for turn in tournament(list(self.looks)) if working & set(turn)]
        for position, turn in enumerate(turns):
            left = (deadline - time.monotonic()) / (len(turns) - position)
            seconds = min(BURST_S, left / SHARE)
            if seconds < SHORTEST_BURST_S:
                break
            pairs = working.intersection(turn)
            with ThreadPoolExecutor(max_workers=len(pairs)) as pool:
                list(pool.map(functools.partial(self._burst, seconds), pairs))

    def _burst(self, seconds: float, pair: tuple[int, int]) -> None:
        source, target = pair
        sender, receiver, place = self.looks[source], self.looks[target], self.places[target]
        deadline = min(self.deadline, time.monotonic() + seconds + 1.0)
        where = {"address": place["address"], "port": place["port"]}
        try:
            sender.session.call("burst", deadline, me=source, seconds=seconds, limit=BURST_BYTES, **where)
        except HostError:
            return  # its connection was there a moment ago: no figure is better than a false alarm
        burst = receiver.session.burst_from(source, place["port"], deadline)
        if burst and burst["seconds"] > 0:
            self.pairs[pair].mbit = burst["bytes"] * 8 / burst["seconds"] / 1e6

    def warn_of_slow_ones(self) -> None:
        for (source, target), pair in self.pairs.items():
            if pair.mbit is not None and pair.mbit < SLOW_MBIT:
                remedy = "Use a cable, or move closer to the access point; LoRA and longer rounds send less."
                what = f"{pair.source} -> {pair.target}: only {pair.mbit:.1f} Mbit/s"
                self._add([source, target], what, remedy, severity=Severity.WARNING)

    def _call_all(self, op: str, request: Callable[[Look], dict]) -> Iterator[tuple[Look, dict]]:
        """Ask all hosts at once; one that fails becomes a problem."""

        def failed(look: Look, error: HostError) -> None:
            what = f"its links could not be tested: {error.args[0].removeprefix(look.name + ': ')}"
            self._add([look.number], what, "Is its cable or Wi-Fi steady? Look again: multimac hosts check")

        return ask_all(self.looks.values(), op, request, self.deadline, failed)

    def _add(self, numbers: Sequence[int], what: str, remedy: str, **more) -> None:
        names = tuple(self.looks[number].name for number in numbers)
        self.problems.append(Finding(hosts=names, what=what, remedy=remedy, check="links", **more))


def tournament(numbers: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Make turns of disjoint ordered pairs that hold every ordered pair once (circle method)."""
    players: list[int | None] = [*numbers, *([None] if len(numbers) % 2 else [])]
    turns = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = [(a, b) for a, b in zip(players[:half], reversed(players[half:]), strict=True) if None not in (a, b)]
        turns += [pairs, [(b, a) for a, b in pairs]]
        players = [players[0], players[-1], *players[1:-1]]
    return turns
