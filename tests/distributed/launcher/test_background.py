"""Threads that report to an inbox, with real ones."""

import time

import pytest

from distributed.launcher.background import Background


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
