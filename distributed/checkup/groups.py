"""Tries one real all_reduce of gloo's for every pair of hosts, between the addresses over which they would train."""

from __future__ import annotations

import time
from collections import defaultdict

from whisper_tuner.errors import HostError

from .findings import Finding, Severity
from .links import Links
from .look import Look, ask_all

LEAST_S = 1.0  # in which a healthy group forms, also between Macs that are busy
AMPLE_S = 3.0  # in which it also forms over a Wi-Fi that saves power, and is full
ANSWER_S = 0.5
SILENT = "no answer"  # what the probe says of a pair that hangs
WHAT_HELPS = (
    "The hosts train over such groups. Give them the same torch (multimac hosts setup), and open all ports between them"
    ' in their firewalls; or name other interfaces with "interface" in the hosts file.'
)


class Groups:
    """Forms groups of all pairs at once, each in a thread of the process that has imported torch.

    The hosts' side is distributed/hosts/agent/group_probe.py. As in training, this process brings what each tells the
    other. Pairs that TCP does not join have been explained by Links.
    """

    def __init__(self, links: Links, deadline: float):
        self.links, self.deadline = links, deadline
        self.untried: dict[str, list[str]] = defaultdict(list)  # by the reason, hosts

    def form(self) -> list[Finding]:
        looks, found = self.links.looks, []
        pairs = self._pairs()
        for failed, those in (self._failed(pairs) if pairs else {}).items():
            numbers = dict.fromkeys(number for pair in those for number in pair)
            names = ", ".join(f"{looks[a].name} <-> {looks[b].name}" for a, b in those)
            places = ", ".join(map(self.links.at, numbers))
            what = f"{names}: TCP connects, but gloo does not ({places}): {failed}"
            hosts = tuple(looks[number].name for number in numbers)
            found.append(Finding(hosts=hosts, what=what, remedy=WHAT_HELPS, check="links"))
        return [*found, *(self._not_tried(reason, names) for reason, names in self.untried.items())]

    def _not_tried(self, reason: str, names: list[str]) -> Finding:
        what = f"no gloo group was tried with {', '.join(names)}: {reason}"
        remedy = "The run itself will do it. To look again: multimac hosts check"
        return Finding(hosts=tuple(names), what=what, remedy=remedy, severity=Severity.WARNING, check="links")

    def _pairs(self) -> list[tuple[int, int]]:
        """Return the pairs that could form a group, the lower number first."""
        for look in self.links.looks.values():
            if look.facts.torch == {"late": True}:
                self.untried["importing torch took too long (the next time is quicker)"].append(look.name)
        links = self.links.pairs
        systems = {
            number: look.facts.facts["system"] for number, look in self.links.looks.items() if look.facts.has_torch
        }
        able = [number for number in systems if systems[number] == systems[min(systems)]]  # others are refused anyway
        return [(a, b) for a in able for b in able if a < b and {links[a, b].failed, links[b, a].failed} == {None}]

    def _failed(self, pairs: list[tuple[int, int]]) -> dict[str, list[tuple[int, int]]]:
        """Try to form the groups; return by what went wrong the pairs."""
        seconds, looks = self.deadline - time.monotonic() - ANSWER_S, self.links.looks
        numbers = sorted({number for pair in pairs for number in pair})
        if seconds < LEAST_S:
            self.untried["there was no time left"] += [looks[number].name for number in numbers]
            return {}
        begin, form = {}, {}
        for number in numbers:
            peers = [a + b - number for a, b in pairs if number in (a, b)]
            at = self.links.places[number]["address"]
            begin[number] = {"me": number, "address": at, "peers": peers, "seconds": seconds}
        told = self._ask("begin_groups", begin, "told", self.deadline - seconds / 2)
        seconds = self.deadline - time.monotonic() - ANSWER_S
        for number in told:
            news = [[one, *words] for one in told for peer, *words in told[one] if peer == number]
            form[number] = {"told": news, "seconds": seconds}
        said = {number: dict(of) for number, of in self._ask("form_groups", form, "groups", self.deadline).items()}
        failed = defaultdict(list)
        for a, b in pairs:
            if a in said and b in said and (what := _clearer(said[a].get(b, ""), said[b].get(a, ""))):
                failed[what].append((a, b))
        if seconds < AMPLE_S and (slow := failed.pop(SILENT, None)):
            names = dict.fromkeys(looks[number].name for pair in slow for number in pair)
            self.untried[f"there were only {seconds:.1f} s for it"] += names
        return failed

    def _ask(self, op: str, requests: dict[int, dict], wanted: str, deadline: float) -> dict[int, list]:
        """Return by number what hosts answer, all asked at once; a host that cannot answer is untried."""

        def failed(look: Look, error: HostError) -> None:
            self.untried[error.args[0].removeprefix(f"{look.name}: ")].append(look.name)

        looks = [self.links.looks[number] for number in requests]
        answers = ask_all(looks, op, lambda look: requests[look.number], deadline, failed)
        return {look.number: answer[wanted] for look, answer in answers}


def _clearer(one: str, other: str) -> str:
    """Choose between what both sides say of a failure: that nothing came says least."""
    return max(one, other, key=lambda said: (bool(said), said != SILENT))
