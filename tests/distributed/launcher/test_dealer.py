import random
import threading
import time

import pytest

from distributed.launcher.hearing import Dealer, in_groups
from whisper_tuner.eval.evaluation import Transcript

HERE = "here"


def transcripts(group, machine, unreadable=()):
    return [Transcript("", problem="no such file") if c in unreadable else Transcript(f"{c}") for c in group]


def finish_here(dealer, unreadable=()) -> None:
    while (group := dealer.take_here()) is not None:
        dealer.heard_here(group, transcripts(group, HERE, unreadable), HERE, time.monotonic())


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
    dealer.heard_here(own, transcripts(own, HERE), HERE, began - 4)
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


@pytest.mark.parametrize("seed", range(30))
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
