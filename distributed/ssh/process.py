"""A command on a host: its input, its output, its end, which brings no connection down.

What paramiko raises on the way is in FAILURES.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import paramiko
from paramiko.common import MSG_CHANNEL_CLOSE, MSG_CHANNEL_FAILURE, MSG_CHANNEL_WINDOW_ADJUST

from whisper_tuner.errors import HostError

from .machine import ANNOUNCED, Completed, Machine

LOST = 255
STALLED_S = 30.0  # without a single byte moving
END_OF_INPUT_S = 2.0  # one packet
SOME_SIGNAL = 128
MOST_OUTPUT = 64 << 20  # bytes of a command, or of a line: an answer about 100,000 files has 20 MB
FAILURES = (paramiko.SSHException, OSError, EOFError)


class Transport(paramiko.Transport):
    """One connection, which sends nothing more to a channel whose end it has sent.

    paramiko makes a message under the channel's lock, and sends it after that. So what ends a command's input, or
    writes to it, may send after the thread that answers the command's end, and OpenSSH then closes the whole
    connection (paramiko's issues 1115 and 1705). Or it has given the channel's number to another one, which would get
    the message: so channels have numbers here that come only once, and each message gets the other side's as it leaves.
    """

    def __init__(self, sock: socket.socket | paramiko.Channel | paramiko.ProxyCommand):
        super().__init__(sock)
        self._own_numbers = itertools.count(1 << 31)  # no other side has so many channels
        self._open: dict[bytes, bytes] = {}  # the other side's number of a channel by the own one

    def open_channel(self, *args: Any, **options: Any) -> paramiko.Channel:
        channel = super().open_channel(*args, **options)
        own = next(self._own_numbers)
        self._open[own.to_bytes(4, "big")] = channel.remote_chanid.to_bytes(4, "big")
        channel.remote_chanid = own
        return channel

    def _send_message(self, data: paramiko.Message) -> None:
        """Calls about channels come one at a time, as their caller holds `clear_to_send_lock`."""
        message = data.asbytes()
        kind, own = message[0], message[1:5]
        if MSG_CHANNEL_WINDOW_ADJUST <= kind <= MSG_CHANNEL_FAILURE and own[0] >= 0x80:
            theirs = self._open.pop(own, None) if kind == MSG_CHANNEL_CLOSE else self._open.get(own)
            if theirs is None:
                return
            data = paramiko.Message(message[:1] + theirs + message[5:])
        super()._send_message(data)


class RemoteProcess:
    """A command on a host."""

    def __init__(self, remote: Machine, channel: paramiko.Channel):
        self.name = remote.name
        self._remote, self._channel = remote, channel
        self._lines = _lines_of(channel)
        first = next(self._lines, "")
        announced = ANNOUNCED.fullmatch(first)
        if not announced:
            rest = "\n".join([first, *self._lines]).strip()
            raise HostError(self.name, f"cannot start: {rest or 'the session ended at once'}")
        self.pid = int(announced[1])

    def write(self, data: bytes) -> None:
        try:
            with _closed_if_stuck(self._channel, 2 * STALLED_S):
                self._channel.sendall(data)
        except FAILURES as error:
            raise HostError(self.name, "the process is gone") from error

    def close_stdin(self) -> None:
        with contextlib.suppress(*FAILURES), _closed_if_stuck(self._channel, END_OF_INPUT_S):
            self._channel.shutdown_write()

    def lines(self) -> Iterator[str]:
        return self._lines

    def poll(self) -> int | None:
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> int | None:
        if not self._channel.status_event.wait(timeout):
            return None if self._channel.get_transport().is_active() and not self._channel.closed else LOST
        return _status_of(self._channel)

    def kill(self) -> None:
        """Kill the process group; then close the session, whatever state the host is in."""
        if self.poll() is None:
            with contextlib.suppress(HostError):
                self._remote.run(["/bin/sh", "-c", f"kill -9 -{self.pid}"], timeout=5)
        with contextlib.suppress(*FAILURES):
            self._channel.close()


def communicate(channel: paramiko.Channel, input: Iterable[bytes], timeout: float | None) -> Completed | None:
    """Feed stdin and read both streams to their end; None if that is later than `timeout` after the end of `input`.

    Raises TimeoutError if the host takes none of `input` for STALLED_S, OSError if it prints without end, and what
    `input` raises.
    """
    stdout, stderr = bytearray(), bytearray()
    failed: list[Exception] = []
    channel.settimeout(STALLED_S)

    def feed() -> None:
        try:
            for send in itertools.chain((partial(channel.sendall, block) for block in input), [channel.shutdown_write]):
                try:
                    with _closed_if_stuck(channel, 2 * STALLED_S):
                        send()
                except TimeoutError as error:
                    raise TimeoutError(f"it has taken no data for {STALLED_S:g} s") from error
                except FAILURES:
                    return  # it has ended without reading all: its output says why
        except Exception as error:  # whatever it is must reach the caller
            failed.append(error)
            channel.close()

    def read(receive: Callable[[int], bytes], output: bytearray) -> None:
        block = b"."
        with contextlib.suppress(*FAILURES):
            while block:
                with contextlib.suppress(TimeoutError):  # which is for what is sent
                    block = receive(1 << 16)
                    output += block
                if len(output) > MOST_OUTPUT:
                    failed.append(OSError(f"it prints more than {MOST_OUTPUT >> 20} MB"))
                    channel.close()
                    return

    feeder = threading.Thread(target=feed, daemon=True)
    readers = [
        threading.Thread(target=read, args=(channel.recv, stdout), daemon=True),
        threading.Thread(target=read, args=(channel.recv_stderr, stderr), daemon=True),
    ]
    for thread in (feeder, *readers):
        thread.start()
    feeder.join()
    deadline = None if timeout is None else time.monotonic() + timeout
    for thread in readers:
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
    late = any(thread.is_alive() for thread in readers)
    status = LOST if late or failed else _status_of(channel)
    channel.close()
    if failed:
        raise failed[0]
    return None if late else Completed.of(status, stdout, stderr)


def _closed_if_stuck(channel: paramiko.Channel, seconds: float) -> contextlib.AbstractContextManager[None]:
    """Close the connection if what is sent to it takes longer.

    A full socket knows no timeout: paramiko writes on until the connection is closed, and lets nobody else write.
    """

    def cut() -> None:
        transports = [channel.get_transport()]
        while isinstance(transports[-1].sock, paramiko.Channel):  # of a host that it jumps over, which is what is stuck
            transports.append(transports[-1].sock.get_transport())
        for transport in reversed(transports):
            transport.close()

    return if_late(seconds, cut)


@contextlib.contextmanager
def if_late(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Call act() from a thread if what is done in here takes longer, so that whatever waits in here fails."""
    late = threading.Timer(seconds, act)
    late.daemon = True  # what nobody waits for any more does not keep the process
    late.start()
    try:
        yield
    finally:
        late.cancel()


def _status_of(channel: paramiko.Channel) -> int:
    """Return the exit status. A session that ends without one while the connection lives was killed, by a signal."""
    status = channel.recv_exit_status()
    if status >= 0:
        return status
    return SOME_SIGNAL if channel.get_transport().is_active() else LOST


def _lines_of(channel: paramiko.Channel) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    with contextlib.suppress(*FAILURES):
        while block := channel.recv(1 << 16):
            *whole, rest = (rest + decoder.decode(block)).split("\n")
            for line in whole:
                yield line.rstrip("\r")
            if len(rest) > MOST_OUTPUT:  # a line without end
                channel.close()
    if rest and channel.eof_received:  # else the connection has ended amid a line
        yield rest
