"""A worker on another host: a process that outlives the connection over which it is reached."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from distributed.control.channel import GO_ON
from distributed.control.messages import KEPT, repeat, split_line
from distributed.ssh.machine import Process


class WorkerProcess:
    """A Process. Nothing that either side writes is lost, or comes twice, when `attach` gives it another connection."""

    def __init__(self, process: Process):
        self.name, self.pid = process.name, process.pid
        self._process = process
        self._attaching, self._writing = threading.Lock(), threading.Lock()
        self._kept: deque[bytes] = deque(maxlen=KEPT)
        self._written = self._arrived = 0  # lines to it; events of it

    def attach(self, start_relay: Callable[[int], Process]) -> bool:
        """Go on over what start_relay(events that have arrived) starts, see relay.py; False if that does not reach it.

        May block for some seconds; `write` does not. Afterwards the caller closes the old connection. Raises HostError.
        """
        with self._attaching:
            relay = start_relay(self._arrived)
            heard = next(relay.lines(), "")
            try:
                with self._writing:
                    missing = repeat(self._kept, self._written, int(heard))
                    relay.pid, self._process = self.pid, relay  # who kills it means the worker
                    for line in (GO_ON, *missing):
                        relay.write(line)
            except ValueError:
                relay.kill()
                return False
        return True

    def write(self, data: bytes) -> None:
        """A line. Raises HostError."""
        with self._writing:
            self._kept.append(data)
            self._written += 1
            self._process.write(data)

    def close_stdin(self) -> None:
        self._process.close_stdin()

    def lines(self) -> Iterator[str]:
        process = None
        while process is not self._process:
            process = self._process
            for line in process.lines():
                with self._attaching:  # afterwards it may come again, over the other connection
                    if process is not self._process:
                        break
                    self._arrived += split_line(line)[1] is not None
                yield line
            with self._attaching:
                pass

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int | None:
        return self._process.wait(timeout)

    def kill(self) -> None:
        self._process.kill()
