"""A worker that does nothing; its first line says what it is to do first, in Python, and how long it bears silence."""

import json
import sys
import time

from distributed.control.channel import ControlChannel
from distributed.control.messages import send_event
from distributed.control.timeouts import Timeouts

spec = json.loads(sys.stdin.buffer.readline())
channel = ControlChannel(sys.stdin.buffer, Timeouts(**spec["timeouts"]))
exec(spec["do"], {"channel": channel, "send_event": send_event, "time": time, "sys": sys})
print("here", flush=True)
time.sleep(60)
