"""How long the import of torch takes in a fresh process, and how long it holds up the beats of that and its parent.

The first import on a Mac may take up to a minute, as the system scans what is new. A thread of the process itself
beats only while the import leaves it the interpreter.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from .programs import PROBE, answer_in

EVERY_S = 0.02


class Beats:
    """The longest time between two turns of a thread, from `start` to `stop`."""

    def __init__(self) -> None:
        self.longest, self._last, self._over = 0.0, time.perf_counter(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Beats:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            self._turn()
        self._turn()

    def _turn(self) -> None:
        now = time.perf_counter()
        self.longest, self._last = max(self.longest, now - self._last), now


def imports(request: dict) -> list[dict]:
    return [_one(request) for _ in range(2)]


def _one(request: dict) -> dict:
    began = time.perf_counter()
    with Beats() as beats:
        child = subprocess.Popen(
            [*PROBE, "import_torch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        output, _ = child.communicate(request.get("line", '{"life_s": 100}') + "\n")
    return {**answer_in(output), "whole_s": time.perf_counter() - began, "parent_gap_s": beats.longest}


def import_torch(request: dict) -> dict:
    assert "torch" not in sys.modules, "something has imported torch before"
    began = time.perf_counter()
    with Beats() as beats:
        time.sleep(request.get("hold_s", 0.0))  # of tests: a hold that lets the thread run
        import torch  # noqa: F401
    return {"import_s": time.perf_counter() - began, "gap_s": beats.longest}
