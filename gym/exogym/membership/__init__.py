"""Which ranks train together: the coordinator decides, each rank has a client of it, and this is what they say.

Each message is a dict that fits on a line of JSON.

A *generation* is an ordered list of live members. The coordinator, in the process that started the others, forms
generations and counts votes. Votes of a generation are numbered from 0, which is the state sync. What a vote is for
counts on all members, or on none.

    coordinator -> member
      generation {number, members, prefix, continues_round}   form this group, and come to one state
      commit {generation, vote, regroup}    all members have voted: it counts
      round_end {generation, round, stop}   whether this round is cut short by a stop: the same for all members
      told {generation, key, value}         what another member has set in the store over which its group forms
      excluded                              the others go on without it; its work is void until it is in a generation

    member -> coordinator
      vote {generation, vote, what, digest}    for a round also {round, samples, position, cut_short}
      round_end {generation, round, stop}      it makes the last step of a round, or wants to end it here and stop
      set {generation, key, value}             in that store: for the others of this generation
      trouble {generation, message, stranger}  its group does not answer, or somebody without the run's key is in it
      reach {generation, waits, unreached}     peers that do not answer it
      exchange                                 weights are about to travel: its link will be busy for a while
      alive                                    it is at something that takes long
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# What votes are for.
STATE_SYNC, ROUND, DRIFT_CHECK = "state_sync", "round", "drift_check"
VALIDATION, SPEEDS, CORRELATION, END = "validation", "speeds", "correlation", "end"


@dataclass(frozen=True)
class Generation:
    """`prefix` is random: what members prove to each other holds in this generation alone.

    continues_round: they end the round that they were in. Otherwise they begin one, and what any of them has done since
    the last commit is void.
    """

    number: int
    members: tuple[str, ...]  # in rank order
    prefix: str
    continues_round: bool

    @classmethod
    def of(cls, message: dict[str, Any]) -> Generation:
        return cls(message["number"], tuple(message["members"]), message["prefix"], message["continues_round"])

    def message(self) -> dict[str, Any]:
        return {"type": "generation", **asdict(self)}
