"""The master's side of one agent that answers until it is told to end."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import Any

from distributed.hosts.agent_call import (
    answer_in,
    fits,
    no_answer,
    parse_message,
    request_line,
    sources,
    start_command,
)
from distributed.ssh.machine import Machine, Process
from whisper_tuner.errors import HostError

LIFE_S = 25  # after which an agent ends whatever happens
END_S = 1.0
BURST = {"event": str, "source": int, "port": int, "bytes": int, "seconds": float}


class NotInTime(HostError):
    """An agent gave no answer before its deadline."""


class Session:
    """Any thread may call. Raises HostError for what the agent could not do, NotInTime for silence."""

    def __init__(self, machine: Machine, python: str, life_s: int | None = None):
        self.name = machine.name
        command = start_command(str(life_s or LIFE_S), machine.expand(python))
        self._process: Process = machine.start(command, env={"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"})
        self._numbers = itertools.count()
        self._news = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self._bursts: dict[tuple[int, int], dict[str, Any]] = {}  # by their source, and the port where they arrived
        self._said: list[str] = []
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()
        self._process.write(sources())

    def call(self, op: str, deadline: float, **request: Any) -> dict[str, Any]:
        """deadline: by time.monotonic()."""
        return self.answer(self.send(op, **request), op, deadline)

    def send(self, op: str, **request: Any) -> int:
        """The request's number, for `answer`."""
        number = next(self._numbers)
        with contextlib.suppress(HostError):  # it has ended: the answer will say so
            self._process.write(request_line(number, op, request))
        return number

    def answer(self, number: int, op: str, deadline: float) -> dict[str, Any]:
        with self._news:
            self._news.wait_for(lambda: number in self._answers or self._ended, max(0.0, deadline - time.monotonic()))
            found = self._answers.pop(number, None)
        if found is None and self._ended:
            raise no_answer(self.name, self._process.wait(END_S), "\n".join(self._said))
        if found is None:
            raise NotInTime(self.name, f"no answer in time ({op})")
        return answer_in(found, self.name, op)

    def burst_from(self, source: int, port: int, deadline: float) -> dict[str, Any] | None:
        """What a burst of host number `source` brought to this host's port; None if it has not ended in time."""
        key = source, port
        with self._news:
            self._news.wait_for(lambda: key in self._bursts or self._ended, max(0.0, deadline - time.monotonic()))
            return self._bursts.get(key)

    def close(self) -> None:
        """The agent ends with its stdin; over a cut link by its own alarm."""
        self._process.close_stdin()

    def ended(self, timeout: float = END_S) -> bool:
        return self._process.wait(timeout) is not None

    def _read(self) -> None:
        for line in self._process.lines():
            message = parse_message(line)
            with self._news:
                if message is None:
                    self._said = [*self._said[-20:], line]
                elif "id" in message:
                    self._answers[message["id"]] = message
                elif fits(message, BURST):
                    self._bursts.setdefault((message["source"], message["port"]), message)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()
