"""A worker's events: JSON lines after a record separator (RFC 7464), amid whatever else it prints."""

from __future__ import annotations

import ipaddress
import json
import os
import threading

from whisper_tuner.text import parse_json

MARK = "\x1e"
Endpoint = tuple[str, int]

_writing = threading.Lock()


def send_event(event: dict) -> None:
    """Write the whole line to stdout, with none of another thread's amid it: a long one needs several writes.

    Where nobody reads any more it does not return: the control channel saves what is to be saved, and ends the process.
    """
    line = event_line(event)
    with _writing:
        try:
            while line:
                line = line[os.write(1, line) :]
        except OSError:
            threading.Event().wait()


def event_line(event: dict) -> bytes:
    return f"{MARK}{json.dumps(event)}\n".encode()


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


def endpoint(address: object, port: object) -> Endpoint:
    """Raises ValueError for what is no IPv4 address and port."""
    if not isinstance(address, str) or type(port) is not int or not 0 < port < 65536:
        raise ValueError(f"{address!r}, {port!r} is no address and port")
    return str(ipaddress.IPv4Address(address)), port
