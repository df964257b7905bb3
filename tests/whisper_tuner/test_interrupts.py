"""A signal that ends a command as Ctrl-C does."""

import os
import signal
import threading

import pytest

from whisper_tuner.interrupts import as_ctrl_c


@pytest.fixture
def at_hand():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_it_interrupts_and_is_put_back(at_hand):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.raises(KeyboardInterrupt), as_ctrl_c(signal.SIGTERM):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_one_that_is_ignored_stays_so(at_hand):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with as_ctrl_c(signal.SIGTERM):
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_in_another_thread_it_does_nothing():
    failures = []

    def enter():
        try:
            with as_ctrl_c(signal.SIGTERM):
                pass
        except ValueError as error:
            failures.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert not failures
