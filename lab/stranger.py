"""A stranger on the network: `python stranger.py SEED COUNT ADDRESS:PORT...`, in any network namespace.

Of each three connections one sends random bytes and closes, one sends and stays open, one stays open without a word.
Only the last MOST_OPEN stay open. Prints the number made to each address as JSON, then waits until stdin ends.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import sys
from collections import deque

CONNECT_TIMEOUT_S = 1.0
SEND_TIMEOUT_S = 0.5  # nobody may be reading
LONGEST = 17  # as a power of two, in bytes
MOST_OPEN = 64  # to each address


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


def main(seed: str, count: str, *addresses: str) -> None:
    rng = random.Random(int(seed))
    done = {address: trouble(address, int(count), rng) for address in addresses}
    print(json.dumps({address: made for address, (made, _) in done.items()}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
