"""What a program of the system says, as it says it; and what another probe does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from distributed.control.messages import split_line

LIMIT_S = 10.0
MOST = 20_000  # characters
PROBE = [sys.executable, "-m", "distributed.selftest.probe"]


def said_by(command: Sequence[str], limit_s: float = LIMIT_S) -> dict:
    """Its status and both outputs; the status is None if it could not be run or did not end."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"status": None, "output": f"no end within {limit_s:g} s"}
    except OSError as error:
        return {"status": None, "output": error.strerror or str(error)}
    return {"status": done.returncode, "output": (done.stdout + done.stderr).decode("utf-8", "replace")[:MOST]}


def answer_in(output: str) -> Any:
    """Of a probe that has ended. Raises OSError."""
    # Not splitlines(): to that the mark of an event ends a line.
    events = [event for line in output.split("\n") if (event := split_line(line)[1])]
    if not events or events[-1]["type"] != "answer":
        raise OSError(f"no answer: {events[-1]['message'] if events else output[-300:]}")
    return events[-1]["answer"]
