"""Who transcribes which clips, and when a host loads a model; the host is a stand-in, real ones are in integration."""

import random
import threading
import time

import pytest
from waiting import wait_until

from distributed.launcher import hearing
from distributed.launcher.hearing import Dealer, DecodingHosts, in_groups
from whisper_tuner.errors import HostError
from whisper_tuner.eval.evaluation import Transcript

HERE = "here"


def transcripts(group, machine, unreadable=()):
    return [Transcript("", problem="no such file") if c in unreadable else Transcript(f"{c}") for c in group]


def finish_here(dealer, unreadable=()) -> None:
    while (group := dealer.take_here()) is not None:
        dealer.heard(group, transcripts(group, HERE, unreadable), HERE, began=time.monotonic())


@pytest.mark.parametrize(
    ("clips", "machines", "one_by_one", "sizes"),
    [
        (0, 1, True, []),
        (0, 3, True, []),
        (16, 1, True, [16]),
        (16, 3, True, [3, 3, 2, 2, 1, 1, 1, 1, 1, 1]),
        (16, 3, False, [3, 3, 2, 2, 2, 2, 2]),
        (40, 2, True, [8, 8, 6, 5, 4, 3, 2, 1, 1, 1, 1]),
        (3, 8, False, [2, 1]),
    ],
)
def test_groups_grow_smaller_towards_the_end(clips, machines, one_by_one, sizes):
    groups = list(in_groups(range(clips), 8, machines, one_by_one=one_by_one))
    assert [len(group) for group in groups] == sizes
    assert [clip for group in groups for clip in group] == list(range(clips))


def test_a_group_of_few_clips_is_waited_for_less_long():
    dealer = Dealer([[0, 1, 2, 3], [4]])
    own, began = dealer.take_here(), time.monotonic()
    dealer.take()  # and nothing more is heard of it
    dealer.heard(own, transcripts(own, HERE), HERE, began=began - 4)
    assert dealer.take_here() == (4,)
    assert 1.9 < time.monotonic() - began < 7  # for a group as large as its own it would wait for 8 s


def test_this_machine_alone_transcribes_all():
    dealer = Dealer([[2, 0], [1]])
    finish_here(dealer)
    assert dealer.is_done and dealer.counts == {HERE: 3}
    assert {clip: one.text for clip, one in dealer.transcripts.items()} == {0: "0", 1: "1", 2: "2"}


def test_no_clips_are_done_at_once():
    dealer = Dealer([])
    assert dealer.is_done and dealer.take_here() is None and dealer.take() is None


def test_a_group_that_is_given_back_is_dealt_again():
    dealer = Dealer([[0, 1]])
    dealer.give_back(dealer.take())
    finish_here(dealer)
    assert dealer.counts == {HERE: 2}


def test_a_clip_that_only_a_host_cannot_read_is_transcribed_here():
    dealer = Dealer([[0, 1]])
    group = dealer.take()
    dealer.heard(group, transcripts(group, "h2", unreadable=[1]), "h2")
    assert not dealer.is_done
    finish_here(dealer)
    assert dealer.transcripts[1] == Transcript("1") and dealer.counts == {"h2": 1, HERE: 1}


def test_a_clip_that_nobody_can_read_is_told_once():
    dealer = Dealer([[0, 1]])
    group = dealer.take()
    dealer.heard(group, transcripts(group, "h2", unreadable=[1]), "h2")
    finish_here(dealer, unreadable=[1])
    assert dealer.transcripts[1].problem and dealer.is_done


def test_a_host_that_is_silent_is_not_waited_for_and_may_come_too_late():
    dealer = Dealer([[0], [1]])
    slow = dealer.take()
    finish_here(dealer)
    assert dealer.is_done
    dealer.heard(slow, [Transcript("late")], "h2")
    assert dealer.transcripts[0] == Transcript("0") and dealer.counts == {HERE: 2}


def test_a_host_gets_no_more_once_it_is_closed():
    dealer = Dealer([[0]])
    dealer.close()
    assert dealer.take() is None
    finish_here(dealer)
    assert dealer.is_done


@pytest.mark.parametrize("seed", range(12))
def test_whatever_hosts_do_each_clip_has_the_text_of_its_own(seed):
    chance = random.Random(seed)
    clips, size = chance.randrange(1, 40), chance.randrange(1, 6)
    dealer = Dealer([range(start, min(start + size, clips)) for start in range(0, clips, size)])
    unreadable = set(chance.sample(range(clips), chance.randrange(0, min(clips, 3))))

    def host(name: str, seed: int) -> None:
        chance = random.Random(seed)
        while group := dealer.take():
            time.sleep(chance.random() / 500)
            what = chance.choice(["hears"] * 6 + ["gives back", "vanishes", "fails"])
            if what == "hears":
                dealer.heard(group, transcripts(group, name, unreadable if chance.random() < 0.5 else ()), name)
            elif what == "gives back":
                dealer.give_back(group)
            elif what == "fails":
                dealer.give_back(group)
                return
            else:
                return  # and never says a word again

    hosts = [threading.Thread(target=host, args=(f"h{number}", chance.random()), daemon=True) for number in range(4)]
    for thread in hosts:
        thread.start()
    finish_here(dealer)
    dealer.close()
    for thread in hosts:
        thread.join(10)
        assert not thread.is_alive()
    assert {clip: one.text for clip, one in dealer.transcripts.items()} == {c: f"{c}" for c in range(clips)}
    assert sum(dealer.counts.values()) == clips


# hosts


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


def test_a_host_that_is_to_leave_gives_back_what_it_has_not_begun(monkeypatch):
    monkeypatch.setattr(hearing, "_Host", StandIn)
    dealer, asked = Dealer([[0], [1], [2]]), []
    hosts = DecodingHosts(
        ["h2"], {"before": dealer}, lambda *_: None, lambda host: asked.append(host) or len(asked) > 1
    )
    wait_until(lambda: len(asked) == 2 and dealer.has_waiting, 10)
    time.sleep(0.1)
    assert StandIn.last.asked == [("before", ()), ("before", (0,))] and asked == ["h2", "h2"]
    assert [dealer.take_here(), dealer.take_here()] == [(1,), (2,)]
    hosts.close()


def test_no_model_is_loaded_for_which_nothing_waits(host_for):
    dealer, later = Dealer([[0]]), Dealer([[1]])
    group = dealer.take_here()
    host, _ = host_for({"before": dealer, "after": later})
    time.sleep(0.2)
    assert host.asked == []
    dealer.heard(group, [Transcript("0")], "here", began=time.monotonic())
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
