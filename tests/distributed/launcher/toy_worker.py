"""A worker that speaks the workers' protocol and trains nothing. Its spec says in Python what it is to do.

Started in the folder of the run, where workers learn what a real one's collectives would tell it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from distributed.control import channel as lifeline
from distributed.control.channel import Lifeline
from distributed.control.messages import send_event
from exogym.membership.messages import END, ROUND, STATE_SYNC

lifeline.BEAT_S = lifeline.TICK_S = 0.1
STEP_S = 0.02


def train(*, rounds: int | None = None, all_rounds: int | None = None) -> None:
    """Until the end, which comes with a stop or after `all_rounds`; or only until `rounds` have counted."""
    send_event({"type": "ready"})
    number = made = 0
    while True:
        number = line.coordinator.next_generation(after=number).number
        what, vote = STATE_SYNC, 0
        while (regroup := _vote(number, vote, what)) is not None:
            made += what == ROUND
            if what == END or made == rounds:
                return
            if regroup:
                break
            vote += 1
            time.sleep(STEP_S)
            send_event({"type": "step", "step": made + 1, "seconds": STEP_S})
            what = _agreed(number, vote, all_rounds)


def _vote(number: int, vote: int, what: str) -> bool | None:
    about = {"digest": 1, "round": vote, "samples": {}, "cut_short": False}
    send_event({"type": "vote", "generation": number, "vote": vote, "what": what, **about})
    return line.coordinator.wait_for_commit(number, vote)


def _agreed(number: int, vote: int, all_rounds: int | None) -> str:
    """What all members do next: whoever comes first decides."""
    what = END if line.stopping.is_set() or (all_rounds and vote > all_rounds) else ROUND
    decision = Path(f"decision-{number}-{vote}")
    with contextlib.suppress(FileExistsError):
        decision.symlink_to(what)
    return str(decision.readlink())


spec = json.loads(sys.stdin.buffer.readline())
life: int = spec["life"]  # how many workers this host has had, with this one
line = Lifeline(sys.stdin.buffer, spec["silence_s"])
exec(spec["do"])
line.saving.wait()
send_event({"type": "saved"})
time.sleep(60)
os._exit(1)
