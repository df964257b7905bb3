"""Which hosts cannot reach each other, and who goes on then. Knows no sockets and never waits.

A rank that waits asks its peers whether they are there (client.py). Who does not answer, though the launcher hears
them, is kept in `Reachability`, and `largest` chooses those who can train together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Pair = tuple[str, str]


@dataclass
class Reachability:
    """Keeps what each host says about the others. One side's report is enough: gloo needs both ways.

    told: the pairs of which users have heard. waiting: who has to wait for them to reach each other.
    """

    unreached: dict[str, set[str]] = field(default_factory=dict)
    told: list[Pair] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Reachability:
        unreached = {host: set(others) for host, others in record["unreached"].items()}
        return cls(unreached, [(one, other) for one, other in record["told"]], record["waiting"])

    def says(self, host: str, unreached: Collection[str], *, new: Collection[str]) -> None:
        """Take in whom this host does not reach; others than before only if they are among `new`."""
        self.unreached[host] = set(unreached) & (self.unreached.get(host, set()) | set(new))

    def forget(self, host: str) -> None:
        """Forget what a host said, and what others said of it."""
        self.unreached.pop(host, None)
        for others in self.unreached.values():
            others.discard(host)
        self.told = [pair for pair in self.told if host not in pair]
        self.waiting = [name for name in self.waiting if name != host]

    def pairs(self, hosts: Sequence[str]) -> list[Pair]:
        """Return the pairs of `hosts` who do not reach each other, in their order."""
        return [
            (one, other)
            for n, one in enumerate(hosts)
            for other in hosts[n + 1 :]
            if other in self.unreached.get(one, ()) or one in self.unreached.get(other, ())
        ]

    def is_news(self, pairs: list[Pair], waiting: list[str]) -> bool:
        if not pairs:
            return False
        new = [pair for pair in pairs if pair not in self.told]
        is_news = bool(new) or waiting != self.waiting
        self.told, self.waiting = self.told + new, waiting
        return is_news

    def reached_again(self) -> list[Pair]:
        """Return the pairs that were told and reach each other now, each once."""
        again = [pair for pair in self.told if not self.pairs(pair)]
        self.told = [pair for pair in self.told if pair not in again]
        return again


def largest(hosts: Sequence[str], pairs: Collection[Pair], known: Collection[str]) -> list[str]:
    """Return the most of `hosts` (in rank order) without any of `pairs`, with one of `known` if there are any.

    Of several as large, the one with the most of `known`, then the first in rank order. `known` have the newest state:
    were it left behind, what was agreed would be trained once more.
    """
    rank = {host: n for n, host in enumerate(hosts)}

    def worth(chosen: frozenset[str]) -> tuple:
        ours = len(chosen & set(known))
        return bool(ours), len(chosen), ours, sorted((-rank[host] for host in chosen), reverse=True)

    return sorted(max(_without(frozenset(hosts), pairs), key=worth), key=rank.__getitem__)


def _without(hosts: frozenset[str], pairs: Collection[Pair]) -> Iterator[frozenset[str]]:
    """Yield sets without any of `pairs`, all those among them to which nobody could be added."""
    apart = {host: {a if b == host else b for a, b in pairs if host in (a, b)} & hosts for host in hosts}
    worst = max(sorted(hosts), key=lambda host: len(apart[host]), default=None)
    if worst is None or not apart[worst]:
        yield hosts
        return
    yield from _without(hosts - {worst}, pairs)
    for others in _without(hosts - {worst} - apart[worst], pairs):
        yield others | {worst}
