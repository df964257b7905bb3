"""The master's side of one preflight agent: start it on a machine, ask it, end it."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

from distributed.hosts.agent_call import FIND_PYTHON, no_answer
from distributed.ssh.machine import Machine, Process
from whisper_tuner.errors import HostError
from whisper_tuner.json_text import parse_json

AGENT = Path(__file__).with_name("agent.py")
LIFE_S = 25  # after which an agent ends whatever happens
END_S = 1.0
BOOT = f"""import signal, sys
signal.alarm({LIFE_S})
sys.path[:] = [entry for entry in sys.path if entry]
f = sys.stdin.buffer
exec(compile(f.read(int(f.readline())), "preflight_agent", "exec"), {{"__name__": "__main__"}})"""
# The Python that trains if it runs at all; else another one, which can still tell of disk, memory and clock.
START = """
"$1" -c 'import sys; sys.version_info < (3, 9) and sys.exit(1)' 2>/dev/null && exec "$1" -X utf8 -c "$0" training
"""


class NotInTime(HostError):
    """An agent gave no answer before its deadline."""


class Session:
    """Any thread may ask. Raises HostError for what the agent could not do, NotInTime for silence."""

    def __init__(self, machine: Machine, python: str):
        self.name = machine.name
        line = ["/bin/sh", "-c", START + FIND_PYTHON, BOOT, machine.expand(python)]
        self._process: Process = machine.start(line, env={"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"})
        self._numbers = itertools.count()
        self._news = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self._bursts: list[dict[str, Any]] = []
        self._said: list[str] = []
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()
        source = AGENT.read_bytes()
        self._process.write(str(len(source)).encode() + b"\n" + source)

    def ask(self, op: str, deadline: float, **request: Any) -> dict[str, Any]:
        """deadline: by time.monotonic()."""
        return self.answer(self.send(op, **request), op, deadline)

    def send(self, op: str, **request: Any) -> int:
        number = next(self._numbers)
        with contextlib.suppress(HostError):  # it has ended: the answer will say so
            self._process.write(json.dumps({"id": number, "op": op, **request}).encode() + b"\n")
        return number

    def answer(self, number: int, op: str, deadline: float) -> dict[str, Any]:
        with self._news:
            self._news.wait_for(lambda: number in self._answers or self._ended, max(0.0, deadline - time.monotonic()))
            found = self._answers.pop(number, None)
        if found is None and self._ended:
            raise self._gone()
        if found is None:
            raise NotInTime(self.name, f"no answer in time ({op})")
        if "error" in found:
            error = HostError(self.name, found["error"])
            error.errno = found["errno"]
            raise error
        return found["answer"]

    def burst_from(self, source: int, deadline: float) -> dict[str, Any] | None:
        """What a burst of host number `source` brought to this host; None if it has not ended in time."""

        def found() -> dict[str, Any] | None:
            return next((burst for burst in self._bursts if burst["source"] == source), None)

        with self._news:
            self._news.wait_for(lambda: found() or self._ended, max(0.0, deadline - time.monotonic()))
            return found()

    def close(self) -> None:
        """The agent ends with its stdin; over a cut link by its own alarm."""
        self._process.close_stdin()

    def ended(self, timeout: float = END_S) -> bool:
        return self._process.wait(timeout) is not None

    def _read(self) -> None:
        for line in self._process.lines():
            message = _message(line)
            if message is None:
                self._said = [*self._said[-20:], line]
                continue
            with self._news:
                if "event" in message:
                    self._bursts.append(message)
                else:
                    self._answers[message["id"]] = message
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def _gone(self) -> HostError:
        return no_answer(self.name, self._process.wait(END_S), "\n".join(self._said))


def _message(line: str) -> dict[str, Any] | None:
    """An answer, or the end of a burst; None for what a shell prints of its own, which may be JSON by chance."""
    try:
        message = parse_json(line)
    except ValueError:
        return None
    if not isinstance(message, dict):
        return None
    is_answer = isinstance(message.get("id"), int) and ("answer" in message or {"error", "errno"} <= set(message))
    return message if is_answer or {"event", "source", "bytes", "seconds"} <= set(message) else None
