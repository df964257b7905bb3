"""Tries the links between hosts, TCP and then gloo, from the Python that trains; chooses the network to train on.

That is the network of the hosts file's addresses, or a faster one that all hosts share.
"""

from __future__ import annotations

import ipaddress
import itertools
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from distributed.hosts.interfaces import is_self_assigned
from distributed.ssh.local_network import DENIED, WAYS_OUT, allow_lines
from whisper_tuner.errors import ExitStatus, HostError

from .findings import Finding, Severity
from .look import Look, ask_all

NOT_TRIED = "not tried"
CONNECT_S = 2.5  # a lost SYN is sent again after 1 s
BURST_S = 0.4
SHORTEST_BURST_S = 0.05
SHARE = 2  # a burst takes so many times its seconds: to begin, and to end on a slow link
BURST_BYTES = 8 << 20
SLOW_MBIT = 20.0
NO_ROUTE = {65, 113}  # EHOSTUNREACH on macOS and on Linux

FASTER = 1.2  # than the usual network: a measurement of less than half a second is no more exact than that
SELF_ASSIGNED = 0.7  # what such an address counts for: a Mac changes it as it likes
THUNDERBOLT = "bridge0"
# macOS has one route for all of 169.254.0.0/16, often by Wi-Fi (targetBridge #130).
BRIDGE_UNUSED = (
    "the Thunderbolt Bridge (bridge0) is not used: with self-assigned addresses it is slower, or not reached. Give each"
    " Mac a fixed one, such as 10.10.0.1 and 10.10.0.2 with the mask 255.255.255.0: System Settings > Network >"
    " Thunderbolt Bridge > Details > TCP/IP > Manually"
)
MOST = 3  # networks besides the usual one that are tried
TRIED_S = 1.2  # a network that loses the first SYN is not worth it
SPARE = 1.5  # measurements take longer now and then
MEASURED_S = 1.5  # of the time for all, kept for the figures

LEAST_S = 1.0  # in which a healthy group forms, also between Macs that are busy
AMPLE_S = 3.0  # in which it also forms over a Wi-Fi that saves power, and is full
ANSWER_S = 0.5
SILENT = "no answer"  # what the probe says of a pair that hangs
WHAT_HELPS = (
    "The hosts train over such groups. Give them the same torch (multimac hosts setup), and open all ports between them"
    ' in their firewalls; or name other interfaces with "interface" in the hosts file.'
)


@dataclass(kw_only=True)
class Pair:
    """A connection from `source` to `target`. mbit: what `target` received, Mbit/s; failed: why there is none."""

    source: str
    target: str
    latency_s: float | None = None
    mbit: float | None = None
    failed: str | None = NOT_TRIED
    errno: int | None = None


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

    def at(self, number: int) -> str:
        return f"{self.places[number]['address']} ({self.places[number]['interface']})"

    def connect(self) -> None:
        """Let all hosts listen and connect to each other, and put what fails into words."""
        self.open()
        for a, b in itertools.permutations(self.looks, 2):
            self.pairs[a, b] = Pair(source=self.looks[a].name, target=self.looks[b].name)
        if not self.pairs:
            return

        def request(look: Look) -> dict:
            others = {number: place for number, place in self.places.items() if number != look.number}
            peers = [[number, at["address"], at["port"], at["datagram_port"]] for number, at in others.items()]
            return {"me": look.number, "peers": peers, "timeout": self.connect_s}

        for look, answer in self._call_all("connect", request):
            for target, result in answer["links"]:
                if pair := self.pairs.get((look.number, target)):
                    pair.failed, pair.errno = result.get("failed"), result.get("errno")
                    pair.latency_s = result.get("latency")
        if failed := {key: pair.failed for key, pair in self.pairs.items() if pair.failed not in (None, NOT_TRIED)}:
            self._explain(failed)

    def open(self) -> None:
        """Let the hosts listen; those that cannot are left out."""

        where = {"peer": self.peer, "token": self.token}
        for look, answer in self._call_all(
            "open", lambda look: {**where, "interface": look.facts.host.interface or ""}
        ):
            if "wrong" in answer:
                what, _, remedy = answer["wrong"].partition("\n")
                status = ExitStatus.CONFIG if look.facts.host.interface else ExitStatus.HOST
                self._add([look.number], f"no interface towards the others: {what}", remedy.strip(), status=status)
                continue
            self.places[look.number] = answer
        self.looks = {number: self.looks[number] for number in self.places}

    def _explain(self, failed: Mapping[tuple[int, int], str | None]) -> None:
        """Put failed connections into words: one problem for what belongs together."""
        denied = sorted(key for key in failed if failed[key] == DENIED)
        for source, of in itertools.groupby(denied, key=lambda pair: pair[0]):
            targets = ", ".join(self.looks[target].name for _, target in of)
            self._add([source], f"{DENIED}: it reaches none of {targets}", WAYS_OUT)
        heard = {look.number: answer["heard"] for look, answer in self._call_all("heard", lambda look: {})}
        both = sorted((a, b) for a, b in failed if failed[a, b] == failed.get((b, a)) == "timeout")
        for a, b in both:
            if a < b:
                self._explain_both(a, b, a in heard.get(b, ()), b in heard.get(a, ()))
        by_target = defaultdict(list)
        for source, target in sorted(failed.keys() - {*denied, *both}):
            by_target[target, failed[source, target], self.pairs[source, target].errno].append(source)
        for (target, reason, errno), sources in by_target.items():
            self._explain_one_way(sources, target, reason, errno)

    def _explain_both(self, a: int, b: int, arrives: bool, returns: bool) -> None:
        """Put into words that TCP fails both ways. arrives, returns: whether datagrams get from a to b, from b to a."""
        first, second = self.looks[a].name, self.looks[b].name
        if arrives != returns:
            source, target, number = (second, first, a) if arrives else (first, second, b)
            what = f"{source} -> {target}: packets are lost in this direction; in the other they arrive"
            accept = f"Let {target} accept packets from {source} (firewall, router, Wi-Fi isolation)."
            self._add([a, b], what, accept + self._allow(number))
            return
        how = "TCP fails both ways, although datagrams arrive" if arrives else "nothing gets through either way"
        self._add([a, b], f"{first} <-> {second}: {how} ({self.at(a)}, {self.at(b)})", self._firewall(a, b))

    def _explain_one_way(self, sources: list[int], target: int, reason: str | None, errno: int | None) -> None:
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
                told.append(f" On {facts.name} (with an administrator's password): {allow_lines(program)}.")
        return "".join(told) or " On Linux: `ufw allow from ADDRESS`."

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
                list(pool.map(lambda pair, seconds=seconds: self._burst(seconds, *pair), pairs))

    def _burst(self, seconds: float, source: int, target: int) -> None:
        sender, receiver, place = self.looks[source].session, self.looks[target].session, self.places[target]
        assert sender and receiver
        deadline = min(self.deadline, time.monotonic() + seconds + 1.0)
        where = {"address": place["address"], "port": place["port"]}
        try:
            sender.call("burst", deadline, me=source, seconds=seconds, limit=BURST_BYTES, **where)
        except HostError:
            return  # its connection was there a moment ago: no figure is better than a false alarm
        burst = receiver.burst_from(source, place["port"], deadline)
        if burst and burst["seconds"] > 0:
            self.pairs[source, target].mbit = burst["bytes"] * 8 / burst["seconds"] / 1e6

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

    def _add(
        self,
        numbers: Sequence[int],
        what: str,
        remedy: str,
        *,
        severity: Severity = Severity.ERROR,
        status: ExitStatus = ExitStatus.HOST,
    ) -> None:
        names = tuple(self.looks[number].name for number in numbers)
        found = Finding(hosts=names, what=what, remedy=remedy, check="links", severity=severity, status=status)
        self.problems.append(found)


def tournament(numbers: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Make turns of disjoint ordered pairs that hold every ordered pair once (circle method)."""
    players: list[int | None] = [*numbers, *([None] if len(numbers) % 2 else [])]
    half, turns = len(players) // 2, []
    for _ in range(len(players) - 1):
        facing = zip(players[:half], reversed(players[half:]), strict=True)
        pairs = [(a, b) for a, b in facing if a is not None and b is not None]
        turns += [pairs, [(b, a) for a, b in pairs]]
        players = [players[0], players[-1], *players[1:-1]]
    return turns


# Networks.


def measured(looks: Sequence[Look], usual: str, deadline: float) -> list[Links]:
    """Measure the usual network, where ranks meet at `usual`, and others that all hosts share and that work."""
    token = secrets.token_hex(16)
    first = Links(looks, usual, deadline, token)
    first.connect()
    networks = [first, *_others(first, looks, token)]
    # With many hosts there is no time to measure all: the usual one comes first.
    least_s = max(1, len(tournament(list(first.looks)))) * SHARE * SHORTEST_BURST_S
    del networks[max(1, int((deadline - time.monotonic()) / (SPARE * least_s))) :]
    for position, links in enumerate(networks):
        now = time.monotonic()
        links.measure(now + (deadline - now) / (len(networks) - position))
    return networks


def _others(usual: Links, looks: Sequence[Look], token: str) -> Iterator[Links]:
    """Yield other networks that work. Every host must be in one; an interface that the user named decides."""
    master = usual.looks.get(0)
    if master is None or master.facts.host.interface:
        return
    end = usual.deadline - MEASURED_S
    for _, address, length in usual.places[0]["networks"][:MOST]:
        if time.monotonic() > end - TRIED_S:
            return
        links = Links(looks, address, usual.deadline, token, connect_s=TRIED_S)
        links.open()
        network = ipaddress.ip_network(f"{address}/{length}", strict=False)
        places = [ipaddress.ip_address(place["address"]) for place in links.places.values()]
        # Bridges of containers have one address on all machines.
        if len(set(places)) == len(looks) and all(place in network for place in places):
            links.connect()
            if links.is_whole:
                yield links


def chosen(networks: Sequence[Links]) -> Links:
    """Choose the fastest by its slowest link. Another than the usual one must be clearly faster."""

    def worth(links: Links) -> float:
        return links.slowest_mbit * (SELF_ASSIGNED if is_self_assigned(links.peer) else 1.0)

    best = networks[0]
    for links in networks[1:]:
        if worth(links) > FASTER * worth(best):
            best = links
    return best


def told(best: Links, usual: Links) -> str:
    """Tell the user in one line what was chosen; "" where nothing is unusual."""

    def name(links: Links) -> str:
        interfaces = dict.fromkeys(place["interface"] for place in links.places.values())
        return f"{' and '.join(interfaces)} ({links.peer})"

    if best is not usual:
        before = f"{usual.slowest_mbit:.0f} Mbit/s" if usual.is_whole else "where not all hosts reach each other"
        return f"training uses {name(best)}, {best.slowest_mbit:.0f} Mbit/s, and not {name(usual)}, {before}"
    bridges = [[at for name, at, _ in place["networks"] if name == THUNDERBOLT] for place in usual.places.values()]
    if bridges and all(at and is_self_assigned(at[0]) for at in bridges):
        return BRIDGE_UNUSED
    return ""


# gloo.


def form_groups(links: Links, deadline: float) -> list[Finding]:
    """Form a group of gloo's for every pair at once, with one real all_reduce, over the addresses of training.

    Each forms in a thread of the process that has imported torch: distributed/hosts/agent/group_probe.py. As in
    training, this process brings what each tells the other. Pairs that TCP does not join have been explained by Links.
    """
    looks, found = links.looks, []
    untried: dict[str, list[str]] = defaultdict(list)  # by the reason, hosts
    for look in looks.values():
        if look.facts.torch == {"late": True}:
            untried["importing torch took too long (the next time is quicker)"].append(look.name)
    systems = {n: look.facts.facts["system"] for n, look in looks.items() if "version" in (look.facts.torch or {})}
    able = [number for number in systems if systems[number] == systems[min(systems)]]  # others are refused anyway
    joined = {key for key, pair in links.pairs.items() if pair.failed is None}
    pairs = [(a, b) for a in able for b in able if a < b and {(a, b), (b, a)} <= joined]
    for failed, those in (_failed_groups(links, pairs, deadline, untried) if pairs else {}).items():
        numbers = dict.fromkeys(number for pair in those for number in pair)
        names = ", ".join(f"{looks[a].name} <-> {looks[b].name}" for a, b in those)
        places = ", ".join(map(links.at, numbers))
        what = f"{names}: TCP connects, but gloo does not ({places}): {failed}"
        hosts = tuple(looks[number].name for number in numbers)
        found.append(Finding(hosts=hosts, what=what, remedy=WHAT_HELPS, check="links"))
    for reason, untaken in untried.items():
        hosts, among = tuple(untaken), f" among {', '.join(untaken)}" if len(untaken) > 1 else ""
        what = f"whether gloo connects was not tried{among}: {reason}"
        remedy = "The run itself will do it. To look again: multimac hosts check"
        found.append(Finding(hosts=hosts, what=what, remedy=remedy, severity=Severity.WARNING, check="links"))
    return found


def _failed_groups(
    links: Links, pairs: Sequence[tuple[int, int]], deadline: float, untried: dict[str, list[str]]
) -> dict[str, list[tuple[int, int]]]:
    """Try to form the groups; return the pairs by what went wrong. Hosts that could not try are added to `untried`."""
    looks = links.looks

    def ask(op: str, requests: Mapping[int, dict], wanted: str, until: float) -> dict[int, list]:
        def failed(look: Look, error: HostError) -> None:
            untried[error.args[0].removeprefix(f"{look.name}: ")].append(look.name)

        asked = [looks[number] for number in requests]
        answers = ask_all(asked, op, lambda look: requests[look.number], until, failed)
        return {look.number: answer[wanted] for look, answer in answers}

    seconds = deadline - time.monotonic() - ANSWER_S
    numbers = sorted({number for pair in pairs for number in pair})
    if seconds < LEAST_S:
        untried["there was no time left"] += [looks[number].name for number in numbers]
        return {}
    begin, form = {}, {}
    for number in numbers:
        peers = [a + b - number for a, b in pairs if number in (a, b)]
        at = links.places[number]["address"]
        begin[number] = {"me": number, "address": at, "peers": peers, "seconds": seconds}
    told = ask("begin_groups", begin, "told", deadline - seconds / 2)
    seconds = deadline - time.monotonic() - ANSWER_S
    for number in told:
        news = [[one, *words] for one in told for peer, *words in told[one] if peer == number]
        form[number] = {"told": news, "seconds": seconds}
    said = {number: dict(of) for number, of in ask("form_groups", form, "groups", deadline).items()}
    failed = defaultdict(list)
    for a, b in pairs:
        if a in said and b in said:
            both = said[a].get(b, ""), said[b].get(a, "")
            # Of what both sides say of a failure, that nothing came says least.
            if what := max(both, key=lambda each: (bool(each), each != SILENT)):
                failed[what].append((a, b))
    if seconds < AMPLE_S and (slow := failed.pop(SILENT, None)):
        names = dict.fromkeys(looks[number].name for pair in slow for number in pair)
        untried[f"there were only {seconds:.1f} s for it"] += names
    return failed
