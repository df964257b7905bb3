"""Measures the import of torch in a fresh process, and how long it holds up the beats of that and of its parent.

The first import on a Mac may take up to a minute, as the system scans what is new. A thread of the process itself
beats only while the import leaves it the interpreter.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from .probe import PROBE, answer_in

EVERY_S = 0.02


class Beats:
    """Measures the longest time between two turns of a thread, within a `with`."""

    def __init__(self) -> None:
        self.longest, self._over = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Beats:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        last, is_over = time.perf_counter(), False
        while not is_over:
            is_over = self._over.wait(EVERY_S)
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last), now


def imports(request: dict) -> list[dict]:
    """Import torch in a new process, twice: the first time may take long, the second one is the usual case."""
    found = []
    for _ in range(2):
        began = time.perf_counter()
        with Beats() as beats:
            command = [*PROBE, "imports.import_torch"]
            done = subprocess.run(
                command, input='{"life_s": 100}\n', stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        whole_s = time.perf_counter() - began
        found.append({**answer_in(done.stdout), "whole_s": whole_s, "parent_gap_s": beats.longest})
    return found


def import_torch(request: dict) -> dict:
    assert "torch" not in sys.modules, "something has imported torch before"
    began = time.perf_counter()
    with Beats() as beats:
        import torch  # noqa: F401
    return {"import_s": time.perf_counter() - began, "gap_s": beats.longest}
