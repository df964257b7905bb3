"""When a host loads a model and takes clips; the host itself is a stand-in, real ones are in tests/integration."""

import time

import pytest
from waiting import wait_until

from distributed.launcher import hearing
from distributed.launcher.hearing import Dealer, DecodingHosts
from whisper_tuner.errors import HostError
from whisper_tuner.eval.evaluation import Transcript


class StandIn:
    """Records what it is asked. fails: the group at which it breaks."""

    device = "cpu"
    fails: tuple[int, ...] | None = None

    def __init__(self, name: str):
        self.name = name
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        StandIn.last = self

    def start(self) -> None:
        pass

    def hears(self, model: str, group) -> list[Transcript]:
        self.asked.append((model, tuple(group)))
        if tuple(group) == self.fails:
            raise HostError(self.name, "broke")
        return [Transcript(f"{clip}") for clip in group]

    def close(self) -> None:
        pass


@pytest.fixture
def host_for(monkeypatch):
    """Starts a host for these dealers; returns it, and what is told of it."""
    monkeypatch.setattr(hearing, "_Host", StandIn)
    started, told = [], []

    def start(dealers: dict[str, Dealer]) -> tuple[StandIn, list]:
        started.append(DecodingHosts(["h2"], dealers, lambda host, what: told.append((host, what))))
        return StandIn.last, told

    yield start
    for hosts in started:
        hosts.close()


def test_a_model_is_loaded_before_a_group_is_taken(host_for):
    first, second = Dealer([[0], [1]]), Dealer([[2]])
    host, _ = host_for({"before": first, "after": second})
    wait_until(lambda: second.is_done, 10)
    assert host.asked == [("before", ()), ("before", (0,)), ("before", (1,)), ("after", ()), ("after", (2,))]


def test_no_model_is_loaded_for_which_nothing_waits(host_for):
    dealer, later = Dealer([[0]]), Dealer([[1]])
    group = dealer.take_here()
    host, _ = host_for({"before": dealer, "after": later})
    time.sleep(0.2)
    assert host.asked == []
    dealer.heard_here(group, [Transcript("0")], "here", time.monotonic())
    wait_until(lambda: later.is_done, 10)
    assert host.asked == [("after", ()), ("after", (1,))]


@pytest.mark.parametrize("fails", [(), (0,)])
def test_a_host_that_breaks_holds_no_group(host_for, monkeypatch, fails):
    monkeypatch.setattr(StandIn, "fails", fails)
    dealer = Dealer([[0], [1]])
    _, told = host_for({"before": dealer})
    wait_until(lambda: told, 10)
    assert told[0][0] == "h2" and "transcribes no more clips: h2: broke" in told[0][1]
    assert {dealer.take_here(), dealer.take_here()} == {(0,), (1,)}
