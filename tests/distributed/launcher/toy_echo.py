"""A worker that counts aloud, and repeats each JSON line that it hears: `toy_echo.py DOOR`."""

import sys
import threading
import time
from pathlib import Path

from distributed.control.channel import Lifeline
from distributed.control.messages import send_event

line = Lifeline(sys.stdin.buffer)
line.coordinator.put = lambda message: send_event({"type": "echo", "n": message["n"]})
line.open_door(Path(sys.argv[1]))


def count() -> None:
    for n in range(1_000_000):
        send_event({"type": "count", "n": n})
        time.sleep(0.002)


threading.Thread(target=count, daemon=True).start()
time.sleep(60)
