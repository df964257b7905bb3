"""What a coordinator knows can be written down: another one goes on from it as the first would have."""

import json
import random

import pytest

from exogym.errors import RanksDiverged
from exogym.membership import END, ROUND, STATE_SYNC
from exogym.membership import coordinator as coordinator_module
from exogym.membership.coordinator import Coordinator
from exogym.membership.coordinator_state import CoordinatorState

HOSTS = ("ada", "bob", "cy", "dee")


class Listener:
    """A coordinator, what it says, and a clock that begins anywhere."""

    def __init__(self, began: float):
        self.now, self.said = began, []
        send = lambda host, message: self.said.append((host, message))  # noqa: E731
        about = {"clock": lambda: self.now, "min_hosts": 2, "resumed": True}
        self.coordinator = Coordinator(HOSTS, send, self.said.append, **about)

    def succeed(self) -> None:
        """Another process takes over, from what is written down; its clock shows another time."""
        written = json.dumps(self.coordinator.state.to_json(self.now))
        self.now = self.now + 8192.0  # so that no rounding moves a moment
        self.coordinator.state = CoordinatorState.from_json(json.loads(written), self.now)


def happening(chance: random.Random):
    """Something that a launcher could tell, as (method, arguments) made from the present generation."""
    host = chance.choice(HOSTS)
    what = chance.choice([STATE_SYNC, ROUND, ROUND, ROUND, END] if chance.random() < 0.02 else [STATE_SYNC, ROUND])
    unreached = chance.sample(HOSTS, chance.choice([0, 0, 1]))
    kinds = ["ready", "ready", "lost", "vote", "vote", "vote", "all vote", "trouble", "reach", "stalled", "round_end"]
    kind = chance.choice([*kinds, "leave", "come_back"])
    return kind, host, what, [other for other in unreached if other != host], chance.choice([0.125, 2.5, 30.0])


def tell(listener: Listener, kind: str, host: str, what: str, unreached: list[str], seconds: float) -> None:
    coordinator = listener.coordinator
    listener.now += seconds
    listener.said.append(coordinator.tick())
    number = coordinator.generation.number if coordinator.generation else 0
    about = {"generation": number, "vote": coordinator.state.vote, "what": what, "digest": 7, "message": "refused"}
    about |= {"samples": {"0": [host]}, "round": 1, "cut_short": False, "waits": True, "unreached": unreached}
    about["stop"] = host == HOSTS[0]
    if kind == "all vote":
        for name in coordinator.generation.members if coordinator.generation else ():
            coordinator.vote(name, about)
    elif kind in ("vote", "trouble", "reach", "round_end"):
        getattr(coordinator, kind)(host, about)
    elif kind == "stalled":
        coordinator.stalled()
    elif kind == "leave":
        coordinator.leave(host, "asked")
    else:
        getattr(coordinator, kind)(host)


@pytest.mark.parametrize("seed", range(8))
def test_another_goes_on_as_the_first_would_have(seed, monkeypatch):
    monkeypatch.setattr(coordinator_module.secrets, "token_hex", lambda size: "prefix")
    chance = random.Random(seed)
    first, second = Listener(0.0), Listener(512.0)
    for _ in range(300):
        event = happening(chance)
        for listener in (first, second):
            try:
                tell(listener, *event)
            except RanksDiverged as error:
                listener.said.append(str(error))
        second.succeed()
        assert first.said == second.said
    sent = [said[1] for said in first.said if isinstance(said, tuple) and isinstance(said[1], dict)]
    assert {"generation", "commit"} <= {message["type"] for message in sent}
