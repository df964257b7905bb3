"""A worker on another host, over whichever connection reaches it at present."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from distributed.control.messages import split_line
from distributed.control.supervisor import EXIT, WHOLE, KeptLines
from distributed.ssh.machine import Process
from whisper_tuner.errors import HostError
from whisper_tuner.json_text import parse_json


class WorkerLink:
    """A WorkerProcess, see spawner.py. `connect` gives it its first connection, and each later one.

    No line is lost and none comes twice, see supervisor.py. One thread reads `lines`; any thread may call the rest.
    """

    def __init__(self, name: str):
        self.name = name
        self._changed = threading.Condition()  # holds for all that follows
        self._kept = KeptLines()
        self._relay: Process | None = None
        self._pid = 0  # the process group of the supervisor and its worker
        self._arrived = 0
        self._status: int | None = None
        self._closed = False

    def connect(self, relay: Process) -> bool:
        """Go on over this session with a relay; False if no worker is there, or it lacks lines. Raises HostError.

        May block until the relay has said its first word. The caller closes the connection before.
        """
        said, hello = [], None
        for line in relay.lines():
            if hello := _hello(line):
                break
            said.append(line)  # of a shell, or an error
        if hello is None:
            relay.kill()
            if words := "\n".join(said).strip():
                raise HostError(self.name, f"its worker cannot be reached: {words}")
            return False
        pid, first = hello
        with self._changed:
            try:
                missing = self._kept.since(first)
            except ValueError:
                relay.kill()
                return False
            self._relay, self._pid = relay, pid
            relay.write(f'{{"arrived": {self._arrived}, "first": {first}}}\n'.encode())
            for line in missing:
                relay.write(line)
            self._changed.notify_all()
        return True

    def write(self, data: bytes) -> None:
        """A line; it is kept for the next connection. Raises HostError if this one is gone."""
        with self._changed:
            self._kept.append(data)
            if self._relay:
                self._relay.write(data)

    def lines(self) -> Iterator[str | None]:
        """Until the worker has ended, or this end is closed. None: the connection is gone, the worker may live."""
        relay = None
        while relay := self._next(relay):
            for said in relay.lines():
                if not said.endswith(WHOLE):
                    continue
                line = said.removesuffix(WHOLE).rstrip("\r")
                with self._changed:
                    if relay is not self._relay:  # it will come again, over the other connection
                        break
                    self._arrived += 1
                    event = split_line(line)[1]
                    if event and event["type"] == EXIT:
                        self._status = event["status"]
                        self._changed.notify_all()
                        return
                yield line
            with self._changed:
                is_cut_off = relay is self._relay and not self._closed
            if is_cut_off:
                yield None

    def _next(self, relay: Process | None) -> Process | None:
        """Another connection than this one, once there is one; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._relay is not relay)
            return None if self._closed else self._relay

    def wait(self, timeout: float | None = None) -> int | None:
        """The worker's exit status; None if `lines` has not seen it within `timeout` seconds, or is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._status is not None, timeout)
            return self._status

    def kill(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            relay = self._relay
            if relay and self._status is None:
                relay.pid = self._pid  # that is whom to kill over this session
        if relay:
            relay.kill()


def _hello(line: str) -> tuple[int, int] | None:
    """(pid, heard) of a supervisor's first word. A process group below 2 means more than one, to `kill`."""
    try:
        hello = parse_json(line)
        pid, heard = hello["pid"], hello["heard"]
    except (ValueError, TypeError, KeyError):
        return None
    return (pid, heard) if type(pid) is type(heard) is int and pid > 1 else None
