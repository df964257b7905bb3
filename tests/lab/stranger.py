"""A stranger on the network, in any network namespace, who talks nonsense or gloo's language.

`python stranger.py SEED COUNT ADDRESS:PORT...`: of each three connections one sends random bytes and closes, one sends
and stays open, one stays open without a word. Only the last MOST_OPEN stay open. Prints the number made to each address
as JSON, then waits until stdin ends.

`python stranger.py gloo`: prints `ready`, then each line of stdin is WHAT ADDRESS:PORT. `keys` reads and prints those
of a torch store; `abort` greets as each of the first peers that gloo may wait for there, and sends a message of a
nonsense length; `join` greets likewise, takes part in whatever that peer would, and prints how long each message was
that it could read.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import socket
import struct
import sys
import threading
from collections import deque
from datetime import timedelta

CONNECT_TIMEOUT_S = 1.0
SEND_TIMEOUT_S = 0.5  # nobody may be reading
LONGEST = 17  # as a power of two, in bytes
MOST_OPEN = 64  # to each address
PEERS = 4  # gloo numbers the connections that it waits for from 0 on
PREAMBLE = struct.Struct("<6Q")  # bytes of all, operation, slot, offset, length, offset there
SEND, SEND_READY, RECEIVE_READY = 1, 2, 3  # operations
STORE_S = 3.0


def trouble(address: str, count: int, rng: random.Random) -> tuple[int, deque[socket.socket]]:
    """Number of connections made, and those still open; ends at the first that is refused or not answered."""
    host, _, port = address.rpartition(":")
    made, kept = 0, deque(maxlen=MOST_OPEN)  # what drops out is closed by the collector
    with contextlib.suppress(OSError):
        for index in range(count):
            connection = socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S)
            made += 1
            connection.settimeout(SEND_TIMEOUT_S)
            if index % 3 < 2:
                with contextlib.suppress(OSError):  # hung up on, as it should be
                    connection.sendall(rng.randbytes(int(2 ** rng.uniform(0, LONGEST))))
            if index % 3 == 0:
                connection.close()
            else:
                kept.append(connection)
    return made, kept


def keys(host: str, port: int) -> None:
    from torch.distributed import TCPStore

    with contextlib.suppress(Exception):  # no store
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_S))
        print(json.dumps({"keys": store.list_keys()}), flush=True)


def abort(host: str, port: int) -> None:
    held = []
    with contextlib.suppress(OSError):
        for number in range(PEERS):
            held.append(socket.create_connection((host, port), CONNECT_TIMEOUT_S))
            held[-1].sendall(struct.pack("<q", number) + PREAMBLE.pack(1 << 40, SEND, 0, 0, 1 << 40, 0))
        for connection in held:
            connection.settimeout(None)
            connection.recv(1)  # until it is hung up


def join(host: str, port: int) -> None:
    for number in range(PEERS):
        threading.Thread(target=take_part, args=(host, port, number), daemon=True).start()


def take_part(host: str, port: int, number: int) -> None:
    with contextlib.suppress(OSError), socket.create_connection((host, port), CONNECT_TIMEOUT_S) as connection:
        connection.settimeout(None)
        connection.sendall(struct.pack("<q", number))
        stream = connection.makefile("rb")
        while len(head := stream.read(PREAMBLE.size)) == PREAMBLE.size:
            _, operation, slot, _, length, _ = PREAMBLE.unpack(head)
            if operation == SEND_READY:
                connection.sendall(PREAMBLE.pack(PREAMBLE.size, RECEIVE_READY, slot, 0, length, 0))
            elif operation == RECEIVE_READY:
                connection.sendall(PREAMBLE.pack(PREAMBLE.size + length, SEND, slot, 0, length, 0) + bytes(length))
            elif operation == SEND:
                print(json.dumps({"read": len(stream.read(length))}), flush=True)


def speak() -> None:
    importlib.import_module("torch.distributed")  # takes seconds, and what is asked for is wanted at once
    print("ready", flush=True)
    for line in sys.stdin:
        what, _, address = line.strip().partition(" ")
        host, _, port = address.rpartition(":")
        act = {"keys": keys, "abort": abort, "join": join}[what]
        threading.Thread(target=act, args=(host, int(port)), daemon=True).start()


def main(seed: str, count: str, *addresses: str) -> None:
    rng = random.Random(int(seed))
    done = {address: trouble(address, int(count), rng) for address in addresses}
    print(json.dumps({address: made for address, (made, _) in done.items()}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    speak() if sys.argv[1:] == ["gloo"] else main(*sys.argv[1:])
