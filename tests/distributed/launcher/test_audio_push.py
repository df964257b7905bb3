"""Audio for a worker: tried again, in turns, and no longer than somebody waits for it."""

import threading

import pytest
from simulated import Clock

from distributed.launcher.audio_push import AGAIN_S, GIVE_UP_S, AudioPush
from distributed.launcher.background import Background, Kind
from whisper_tuner.errors import HostError, RunError

LOST = HostError("host", "the connection was lost")


class Waiting(Clock):
    """A Background whose waits pass at once."""

    def __init__(self):
        super().__init__()
        self.messages = []
        self.now, self.put = lambda: self.time, self.messages.append

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


@pytest.mark.parametrize(
    ("outcomes", "wanted"),
    [([], ["ab"]), ([LOST], ["ab", "ab"]), ([None, LOST], ["ab", "b"])],
    ids=["at once", "again", "what has arrived is not sent again"],
)
def test_files_are_sent_and_those_that_cannot_be_are_named(background, outcomes, wanted):
    host = Host(*outcomes)
    assert AudioPush(host, 1, background).send(["a", "b"]) is None
    assert host.wanted == [list(names) for names in wanted]
    assert [(message.kind, message.content) for message in background.messages] == [(Kind.UNSENT, ["b"])]


def test_a_host_that_takes_none_is_given_up_after_a_while(background):
    host = Host(*[LOST] * 1000)
    message = AudioPush(host, 1, background).send(["a"])
    assert (message.kind, message.content) == (Kind.NOT_SENT, LOST)
    assert GIVE_UP_S < background.time <= GIVE_UP_S + AGAIN_S


def test_a_host_that_takes_its_files_slowly_is_not_given_up(background):
    host = Host(*[LOST] * 8, None, *[LOST] * 8)
    assert AudioPush(host, 1, background).send(["a", "c"]) is None and background.time > GIVE_UP_S


def test_a_host_that_sleeps_is_sent_its_files_when_it_wakes_up(background):
    host = Host(*[LOST] * 100)
    push = AudioPush(host, 1, background)
    push.set_silent(True)
    background.at(100 * AGAIN_S, lambda: push.set_silent(False))
    assert push.send(["a"]) is None and len(host.wanted) == 101


def test_nothing_more_is_sent_once_the_worker_has_ended(background):
    host = Host(*[LOST] * 100)
    push = AudioPush(host, 1, background)
    background.at(10, push.end)
    assert push.send(["a"]) is None and background.time < 10 + AGAIN_S + 1


def test_no_file_is_sent_of_a_run_that_does_not_know_them(background):
    host = Host(RunError("no list of audio"))
    assert AudioPush(host, 1, background).send(["a", "b"]) is None
    assert background.messages[0].content == ["a", "b"]


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
    push = AudioPush(Slow(), 1, background)
    threads = [threading.Thread(target=push.send, args=([name] * 5,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(order) == ["a"] * 5 + ["b"] * 5 and order not in ([*"aaaaabbbbb"], [*"bbbbbaaaaa"])
