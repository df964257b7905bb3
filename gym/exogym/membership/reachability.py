"""Which hosts cannot reach each other, and who goes on then. Knows no sockets and never waits.

A rank that waits asks its peers whether they are there (waiting.py). Who does not answer, though the launcher hears
them, is kept in `Reachability`, and `largest` chooses those who can train together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

Pair = tuple[str, str]


class Reachability:
    """What each host says about the others. One side's word is enough: gloo needs both ways."""

    def __init__(self) -> None:
        self._unreached: dict[str, set[str]] = {}
        self._told: tuple[list[Pair], list[str]] = [], []  # pairs, and who has to wait for that

    def says(self, host: str, unreached: Collection[str], *, new: Collection[str]) -> None:
        """All whom this host does not reach; others than before only if they are among `new`."""
        self._unreached[host] = set(unreached) & (self._unreached.get(host, set()) | set(new))

    def forget(self, host: str) -> None:
        """What it said, and what others said of it."""
        self._unreached.pop(host, None)
        for others in self._unreached.values():
            others.discard(host)
        pairs, waiting = self._told
        self._told = [pair for pair in pairs if host not in pair], [name for name in waiting if name != host]

    def pairs(self, hosts: Sequence[str]) -> list[Pair]:
        """Those of `hosts` who do not reach each other, in their order."""
        return [
            (one, other)
            for n, one in enumerate(hosts)
            for other in hosts[n + 1 :]
            if other in self._unreached.get(one, ()) or one in self._unreached.get(other, ())
        ]

    def is_news(self, pairs: list[Pair], waiting: list[str]) -> bool:
        if not pairs:
            return False
        known, before = self._told
        new = [pair for pair in pairs if pair not in known]
        self._told = known + new, waiting
        return bool(new) or waiting != before

    def reached_again(self) -> list[Pair]:
        """Of the pairs that were told, once."""
        again = [pair for pair in self._told[0] if not self.pairs(pair)]
        if again:
            self._told = [pair for pair in self._told[0] if pair not in again], self._told[1]
        return again


def largest(hosts: Sequence[str], pairs: Collection[Pair], known: Collection[str]) -> list[str]:
    """The most of `hosts` (in rank order) without any of `pairs`; one of `known` is among them, if there are any.

    Of several as large, the one with the most of `known`, then the first in rank order. `known` have the newest state:
    were it left behind, what was agreed would be trained once more.
    """
    rank = {host: n for n, host in enumerate(hosts)}

    def worth(chosen: frozenset[str]) -> tuple:
        ours = len(chosen & set(known))
        return bool(ours), len(chosen), ours, sorted((-rank[host] for host in chosen), reverse=True)

    return sorted(max(_without(frozenset(hosts), pairs), key=worth), key=rank.__getitem__)


def _without(hosts: frozenset[str], pairs: Collection[Pair]) -> Iterator[frozenset[str]]:
    """Sets without any of `pairs`, all those among them to which nobody could be added."""
    apart = {host: {a if b == host else b for a, b in pairs if host in (a, b)} & hosts for host in hosts}
    worst = max(sorted(hosts), key=lambda host: len(apart[host]), default=None)
    if worst is None or not apart[worst]:
        yield hosts
        return
    yield from _without(hosts - {worst}, pairs)
    for others in _without(hosts - {worst} - apart[worst], pairs):
        yield others | {worst}
