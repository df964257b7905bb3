"""A worker that counts aloud, and repeats each JSON line that it hears."""

import sys
import threading
import time

from distributed.control.channel import ControlChannel
from distributed.control.messages import send_event

channel = ControlChannel(sys.stdin.buffer)
channel.coordinator.put = lambda message: send_event({"type": "echo", "n": message["n"]})


def count() -> None:
    for n in range(1_000_000):
        send_event({"type": "count", "n": n})
        time.sleep(0.002)


threading.Thread(target=count, daemon=True).start()
time.sleep(60)
