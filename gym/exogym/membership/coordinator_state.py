"""All that a coordinator knows, as it can be written down: another process could go on from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from exogym.membership.blame import Trouble
from exogym.membership.messages import Generation
from exogym.membership.reachability import Reachability


@dataclass
class CoordinatorState:
    """last: who was in when ranks last agreed, and has that in a checkpoint. remembering: those of them whose processes
    are still the same. awaited: who has not come yet for the first time. vote: the number of the vote that is going on.
    """

    generation: Generation | None = None
    ended: bool = False  # all members have voted that there is nothing left to do
    stopping: bool = False
    present: set[str] = field(default_factory=set)
    last: set[str] = field(default_factory=set)
    remembering: set[str] = field(default_factory=set)
    awaited: set[str] = field(default_factory=set)
    paused: set[str] = field(default_factory=set)  # who is there, but too few to begin a round
    votes: dict[str, dict[str, Any]] = field(default_factory=dict)
    vote: int = 0
    is_mid_round: bool = False
    diverged: int = 0  # times that members differed since a round last counted
    formed: int = 0  # generations
    last_members: list[str] = field(default_factory=list)
    orphaned_since: float | None = None
    apart_since: float | None = None
    trouble: Trouble = field(default_factory=Trouble)
    reach: Reachability = field(default_factory=Reachability)

    def to_json(self, now: float) -> dict[str, Any]:
        """Times become ages: another process has another clock."""
        return _listed(asdict(self._shifted(-now)))

    @classmethod
    def from_json(cls, record: dict[str, Any], now: float) -> CoordinatorState:
        generation = record["generation"]
        trouble, reach = Trouble(**record["trouble"]), Reachability.from_json(record["reach"])
        sets = {name: set(record[name]) for name in ("present", "last", "remembering", "awaited", "paused")}
        state = cls(**{**record, **sets, "trouble": trouble, "reach": reach})
        state.generation = Generation.of(generation) if generation else None
        return state._shifted(now)

    def _shifted(self, seconds: float) -> CoordinatorState:
        """A copy with all times moved by so much."""

        def moved(time: float | None) -> float | None:
            return None if time is None else time + seconds

        times = {"orphaned_since": moved(self.orphaned_since), "apart_since": moved(self.apart_since)}
        return replace(self, **times, trouble=replace(self.trouble, since=moved(self.trouble.since)))


def _listed(value: Any) -> Any:
    """The same with sorted lists in place of sets."""
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return value
