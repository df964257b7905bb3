"""Who trains together, and when a round counts. Knows neither tensors nor sockets, and never waits.

A *generation* is an ordered list of live members. One Roster, in the process that started the others, forms generations
and counts votes; each member hears of it through its Mailbox. All messages are dicts that fit on a line of JSON:

    from the roster   {"type": "generation", "number", "members", "prefix", "amid_round"}     meet there and enter
                      {"type": "commit", "generation", "vote", "regroup"}       all have done it: it counts
                      {"type": "out"}                  they go on without it: what it does is void, until it is called
    from a member     {"type": "vote", "generation", "vote", "what", "digest", ...}  this member has done it
                      {"type": "trouble", "generation", "message"}                   its group does not answer
                      {"type": "reach", "generation", "waits", "unreached"}    peers who do not answer it
                      {"type": "exchange"}                           of weights: its link will be full for a while
                      {"type": "alive"}                                              at something that takes long

Votes of a generation are numbered from 0, the entry. What they are for counts on all members, or on none.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# What votes are for.
ENTER, ROUND, SYNC, VALIDATION, SHARES, END = "enter", "round", "sync", "validation", "shares", "end"


@dataclass(frozen=True)
class Generation:
    """`prefix` is random and names the place in the store where its members meet.

    amid_round: they go on with a round; otherwise they begin one, and what any of them is amid is void.
    """

    number: int
    members: tuple[str, ...]  # in rank order
    prefix: str
    amid_round: bool

    @classmethod
    def of(cls, message: dict[str, Any]) -> Generation:
        return cls(message["number"], tuple(message["members"]), message["prefix"], message["amid_round"])

    def message(self) -> dict[str, Any]:
        return {"type": "generation", **asdict(self)}
