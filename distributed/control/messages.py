"""A worker's events: JSON lines after a record separator (RFC 7464), amid whatever else it prints."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections import deque

from whisper_tuner.json_text import parse_json

MARK = "\x1e"
KEPT = 2000  # lines that can be repeated


class Output:
    """Events on their way to the launcher through this process's stdout, which may become another connection."""

    def __init__(self) -> None:
        self._writing = threading.Lock()
        self._kept: deque[bytes] = deque(maxlen=KEPT)
        self._count = 0

    def send(self, event: dict) -> None:
        """The whole line, with none of another thread's amid it: a long one needs several writes.

        Where nobody reads any more it does not return: the lifeline saves what is to be saved, and ends the process.
        """
        line = f"{MARK}{json.dumps(event)}\n".encode()
        with self._writing:
            self._kept.append(line)
            self._count += 1
            try:
                _write(line)
            except OSError:
                threading.Event().wait()

    def move(self, connection: socket.socket, arrived: int) -> None:
        """Go on there, after the first so many events. Raises OSError, ValueError if they are not kept any more."""
        with self._writing:
            missing = repeat(self._kept, self._count, arrived)
            for stream in (1, 2):
                os.dup2(connection.fileno(), stream)
            for line in missing:
                _write(line)


def _write(line: bytes) -> None:
    while line:
        line = line[os.write(1, line) :]


def repeat(kept: deque[bytes], count: int, arrived: int) -> list[bytes]:
    """Of `count` lines, the last of which are kept, those after the first `arrived`. Raises ValueError."""
    if not 0 <= count - arrived <= len(kept):
        raise ValueError(f"{arrived} of {count} lines have arrived, and {len(kept)} are kept")
    return list(kept)[len(kept) - (count - arrived) :]


output = Output()
send_event = output.send


def split_line(line: str) -> tuple[str, dict | None]:
    """(ordinary text, event) of one line of a worker's output.

    Both at once if a thread sent an event while another had written a line's text, but not its end.
    """
    text, mark, rest = line.partition(MARK)
    try:
        event = parse_json(rest) if mark else None
    except ValueError:
        return line, None
    if isinstance(event, dict) and isinstance(event.get("type"), str):
        return text, event
    return line, None
