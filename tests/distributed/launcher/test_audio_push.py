"""Audio for a worker: tried again, in turns, and no longer than somebody waits for it."""

import threading

import pytest
from simulated import Clock

from distributed.launcher.background import AGAIN_S, GIVE_UP_S, AudioPush, Background
from whisper_tuner.errors import HostError, RunError

LOST = HostError("host", "the connection was lost")


class Waiting(Clock):
    """A Background whose waits pass at once."""

    def __init__(self):
        super().__init__()
        self.now, self.put = lambda: self.time, lambda tell: tell()

    def sleep(self, seconds):
        self.pass_until(self.time + seconds, lambda: False)


class Host:
    name = "host"

    def __init__(self, *outcomes):
        self.outcomes, self.wanted, self.unsendable = list(outcomes), [], ["b"]  # of the first files: None, or an error

    def send(self, files, wanted):
        self.wanted.append(list(files))
        for name in files:
            if self.outcomes and (error := self.outcomes.pop(0)):
                raise error
            yield 1, [name] if name in self.unsendable else []


@pytest.fixture
def background():
    return Waiting()


@pytest.fixture
def unsent():
    """The lists of files of which the worker is told that they do not come."""
    return []


@pytest.fixture
def push_to(background, unsent):
    return lambda host: AudioPush(host, background, unsent.append)


@pytest.mark.parametrize(
    ("outcomes", "wanted"),
    [([], ["ab"]), ([LOST], ["ab", "ab"]), ([None, LOST], ["ab", "b"])],
    ids=["at once", "again", "what has arrived is not sent again"],
)
def test_files_are_sent_and_those_that_cannot_be_are_named(push_to, unsent, outcomes, wanted):
    host = Host(*outcomes)
    assert push_to(host).send(["a", "b"]) is None
    assert host.wanted == [list(names) for names in wanted]
    assert unsent == [["b"]]


def test_a_host_that_takes_none_is_given_up_after_a_while(background, push_to):
    host = Host(*[LOST] * 1000)
    assert push_to(host).send(["a"]) is LOST
    assert GIVE_UP_S < background.time <= GIVE_UP_S + AGAIN_S


def test_a_host_that_takes_its_files_slowly_is_not_given_up(background, push_to):
    host = Host(*[LOST] * 8, None, *[LOST] * 8)
    assert push_to(host).send(["a", "c"]) is None and background.time > GIVE_UP_S


def test_a_host_that_sleeps_is_sent_its_files_when_it_wakes_up(background, push_to):
    host = Host(*[LOST] * 100)
    push = push_to(host)
    push.silent.set()
    background.at(100 * AGAIN_S, push.silent.clear)
    assert push.send(["a"]) is None and len(host.wanted) == 101


def test_nothing_more_is_sent_once_the_worker_has_ended(background, push_to):
    host = Host(*[LOST] * 100)
    push = push_to(host)
    background.at(10, push.over.set)
    assert push.send(["a"]) is None and background.time < 10 + AGAIN_S + 1


def test_no_file_is_sent_of_a_run_that_does_not_know_them(push_to, unsent):
    host = Host(RunError("no list of audio"))
    assert push_to(host).send(["a", "b"]) is None
    assert unsent == [["a", "b"]]


def test_two_lists_are_sent_in_turns_and_never_side_by_side():
    order, busy, done = [], threading.Lock(), threading.Semaphore(0)

    class Slow(Host):
        def send(self, files, wanted):
            for name in files:
                assert busy.acquire(blocking=False)
                order.append(name)
                done.acquire(timeout=0.02)
                busy.release()
                yield 1, []

    background = Background()
    push = AudioPush(Slow(), background, print)
    threads = [threading.Thread(target=push.send, args=([name] * 5,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(order) == ["a"] * 5 + ["b"] * 5 and order not in ([*"aaaaabbbbb"], [*"bbbbbaaaaa"])
