"""Threads that report to an inbox, with real ones."""

import time

import pytest
from waiting import wait_until

from distributed.launcher.background import Background, Kind, Message


class Process:
    def __init__(self, *lines):
        self._lines, self.killed = lines, False

    def lines(self):
        yield from self._lines

    def wait(self, timeout=None):
        return 3

    def kill(self):
        self.killed = True


def taken(background: Background, count: int) -> list[Message]:
    messages: list[Message] = []
    wait_until(lambda: messages.extend(background.take(0.1)) or len(messages) >= count)
    return messages


def test_lines_and_the_end_of_a_process_come_in_order():
    background = Background()
    background.listen("host", 7, Process("a", None, "b"), 1.0)
    assert [(message.kind, message.content) for message in taken(background, 4)] == [
        (Kind.LINE, "a"),
        (Kind.CUT_OFF, None),
        (Kind.LINE, "b"),
        (Kind.EXITED, 3),
    ]


def test_what_a_thread_returns_is_reported_and_what_it_raises_too():
    background = Background()
    background.run(lambda: Message("host", 1, Kind.RECONNECTED))
    assert taken(background, 1)[0].kind is Kind.RECONNECTED
    background.run(lambda: 1 / 0)
    [broken] = taken(background, 1)
    assert broken.kind is Kind.BROKEN and isinstance(broken.content, ZeroDivisionError)


def test_nothing_to_take_is_waited_for():
    began = time.monotonic()
    assert Background().take(0.2) == [] and time.monotonic() - began >= 0.2


@pytest.mark.parametrize("late", [True, False])
def test_a_process_that_starts_as_the_run_ends_is_not_left_behind(late):
    background, process = Background(), Process()
    started = Message("host", 1, Kind.STARTED, process)
    if late:
        assert background.close() == []
        background.put(started)
        assert process.killed
    else:
        background.put(started)
        assert background.close() == [started]
