"""Threads that report to an inbox, with real ones; audio for a worker: tried again, in turns, while somebody waits."""

import threading
import time

import pytest
from simulated import Clock

from distributed.launcher.background import AGAIN_S, GIVE_UP_S, AudioPush, Background
from whisper_tuner.errors import HostError, RunError


class Process:
    def __init__(self, *lines):
        self._lines, self.killed = lines, False

    def lines(self):
        yield from self._lines

    def wait(self, timeout=None):
        return 3

    def kill(self):
        self.killed = True


def told(background: Background, count: int, told_of: list) -> list:
    """What was told, once it is so much."""
    while len(told_of) < count:
        for tell in background.take(5):
            tell()
    return told_of


def test_lines_and_the_end_of_a_process_come_in_order():
    background, heard = Background(), []
    background.listen(Process("a", None, "b"), heard.append, heard.append, 1.0)
    assert told(background, 4, heard) == ["a", None, "b", 3]


def test_what_a_thread_returns_or_raises_is_told_where_it_is_taken():
    background, results = Background(), []
    background.run(lambda: 5, results.append)
    assert told(background, 1, results) == [5]
    background.run(lambda: 1 / 0, failed=results.append)
    assert isinstance(told(background, 2, results)[1], ZeroDivisionError)
    background.run(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        told(background, 3, results)


def test_nothing_to_take_is_waited_for():
    began = time.monotonic()
    assert Background().take(0.2) == [] and time.monotonic() - began >= 0.2


@pytest.mark.parametrize("late", [True, False])
def test_a_process_that_starts_as_the_run_ends_is_not_left_behind(late):
    background, process = Background(), Process()
    if late:
        background.close()
    background.put(pytest.fail, process.kill)
    if not late:
        background.close()
    assert process.killed and background.take(0) == []


# audio


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
