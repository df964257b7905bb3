"""A process beside the agent that imports torch once: what it can use, and groups of gloo's with other hosts.

Importing takes seconds, and forming a group may hang: the process is killed with the agent.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from .facts import LOOK_AT_TORCH
from .session import children

SAYS_LITTLE = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # what it says may be read only at its end


class TorchProcess:
    def __init__(self):
        self.child = None

    def torch_facts(self, seconds: int, program: str = "") -> dict:
        """Tell what torch can use. The process ends on an alarm of its own; `program` runs in it afterwards."""
        self.child = subprocess.Popen(
            [sys.executable, "-c", LOOK_AT_TORCH + program, str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **SAYS_LITTLE},
        )
        children.append(self.child)
        facts = self.read()
        if facts is not None:
            return facts
        _, err = self.child.communicate()
        if self.child.returncode == -signal.SIGALRM:
            return {"late": True}
        last = err.decode("utf-8", "replace").strip().splitlines() or [f"status {self.child.returncode}"]
        return {"failed": last[-1][:300]}

    def begin_groups(self, **request) -> dict:
        return self.ask("begin_groups", request)

    def form_groups(self, **request) -> dict:
        return self.ask("form_groups", request)

    def ask(self, op: str, request: dict) -> dict:
        self.child.stdin.write(json.dumps({"op": op, **request}).encode() + b"\n")
        self.child.stdin.flush()
        answer = self.read()
        if answer is None:
            raise OSError(None, "the process with torch has ended")
        return answer

    def read(self) -> dict | None:
        """Read its next line of JSON, whatever else torch prints; None at its end."""
        for line in self.child.stdout:
            if line.startswith(b"{"):
                return json.loads(line.decode())
        return None
