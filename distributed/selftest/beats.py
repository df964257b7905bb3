"""Beats of a machine, with both its clocks: while it sleeps there are none, and one clock may stand still."""

from __future__ import annotations

import time

from distributed.control.messages import send_event

EVERY_S = 0.5


def beats(request: dict) -> dict:
    """For `seconds`; the longest gap on each clock. time.monotonic stands still while a Mac sleeps (man 3 clock)."""
    until = time.time() + request["seconds"]
    wall, steady = time.time(), time.monotonic()
    gaps = [0.0, 0.0]
    while time.time() < until:
        time.sleep(EVERY_S)
        now, then = time.time(), time.monotonic()
        gaps = [max(gaps[0], now - wall), max(gaps[1], then - steady)]
        wall, steady = now, then
        send_event({"type": "beat", "wall": now})
    return {"wall_gap_s": gaps[0], "steady_gap_s": gaps[1]}
