"""Follows a run's folder, and keeps the parts of its page up to date."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import escape

from distributed.run_dir.away import ASKED, read_away
from distributed.run_dir.events import Event
from distributed.run_dir.folder import is_running, launcher_pid
from distributed.run_dir.log import RunEvents, new_events
from distributed.run_dir.run_view import HostView, RunView
from distributed.run_dir.summary import RUNNING
from multimac.report.page import contents
from multimac.report.template import moment, rendered
from multimac.report.timeline import KINDS
from multimac.view.run_screen import FIGURES, READINGS, reading_of

PARTS = ("head", "now", "curves", "hosts", "faults", "wer", "what", "data", "versions", "foot")  # from the top
SHOWN = ("loss", "clips/s", "round", "sent", "left")
LINES = 6  # of what happened last
# The report's parts are made anew from all events. That takes longer the longer a run is, and gets its part of a core.
EVERY_S, SHARE = 2.0, 0.01
PIECE = 1 << 22  # bytes of events
PHASES = {"start": "starting", "evaluate": "measuring WER"}
UNUSED = {"commit", "preparing"}  # many, and no figure of a report is made of them


class LiveRun:
    """Keeps what the page shows of one run; `look` is to be called about once a second, while somebody looks on."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.parts: dict[str, str] = {}  # HTML by name
        self.has_ended = self.is_over = False
        self.stopped: int | None = None  # the launcher that was asked to stop
        self._position, self._read, self._view = 0, RunEvents(), RunView()
        self._lines: deque[tuple[str, str]] = deque(maxlen=LINES)
        self._found: dict[str, Any] = {}
        self._due = 0.0
        self._measured, self._saved = -1, 0

    def look(self) -> None:
        """Read what is new, and make the parts anew that may have changed."""
        if (self.run_dir / "run.json").exists() and not (self.run_dir / "events.jsonl").exists():
            return self.tell("The run is about to begin.")
        going_on = is_running(self.run_dir)  # before the events are read: what it says last is among them then
        if not self._read_events() and self.has_ended and not going_on:
            return
        began = time.thread_time()
        if time.monotonic() >= self._due or not going_on or self.has_ended:
            self._found = self._contents(going_on)
            self.parts = {part: rendered("page.html", block=part, **self._found) for part in PARTS if part != "now"}
            self._due = time.monotonic() + max(EVERY_S, (time.thread_time() - began) / SHARE)
        self.has_ended = not going_on
        self.parts = {**self.parts, "now": rendered("now.html", **self._now())}

    def _read_events(self) -> bool:
        """Take all that is new, in pieces: the whole of a long run would be large. Say whether there was anything."""
        begun, path, piece = self._position, self.run_dir / "events.jsonl", PIECE
        while not self.is_over:
            events, end = new_events(path, self._position, piece)
            if end == self._position:
                if not path.exists() or path.stat().st_size - end < piece:
                    break
                piece *= 2  # one line is longer
            self._position = end
            for event in events:
                self._take(event)
        return self._position > begun

    def tell(self, text: str) -> None:
        """Show a sentence in place of what goes on now."""
        self.parts = {**self.parts, "now": f'<p class="missing">{escape(text)}</p>'}

    def _take(self, event: Event) -> None:
        self._view.take(event)
        self._lines += [(moment(event.time), line) for line in self._view.lines]
        self._view.lines.clear()
        self._saved = event.step if event.type == "checkpoint" else self._saved
        if event.type == "step":
            event.written.clear()  # half of the memory, and of no use to a report
        if event.type not in UNUSED:
            self._read.add(event)

    def _contents(self, going_on: bool) -> dict[str, Any]:
        """Gather what the report has. What was measured, with its recordings, is only read again once there is more."""
        measured = len(self._read.of_type("evaluation")) + (not going_on)
        tests = self._found["tests"] if measured == self._measured else None if measured else []
        self._measured = measured
        found = contents(self.run_dir, read=self._read if going_on else None, tests=tests)
        state = found["state"][going_on:]  # how far it is stands below, and is newer there
        return found | {"live": True, "state": state}

    def _now(self) -> dict[str, Any]:
        """Gather what changes with every step."""
        view, away = self._view, read_away(self.run_dir)
        hosts = list(view.hosts.values())
        training = [host for host in hosts if host.state == "training"]
        speed = sum(host.speed or 0.0 for host in training)
        lefts = [host.remaining for host in training if host.remaining is not None]
        clips = [one for one in self._found["data"] if one.kind == "training" and one.clips]
        seconds_a_clip = clips[0].hours * 3600 / clips[0].clips if clips and clips[0].hours else 0.0
        step, steps = max((h.step for h in hosts), default=0), max((h.total_steps for h in hosts), default=0)
        return {
            "going_on": self._found["run"].state == RUNNING and not self.has_ended,
            "stopping": self.stopped is not None and self.stopped == launcher_pid(self.run_dir),
            "evaluating": view.phase == "evaluate",
            "phase": view.progress or _phase(view, training),
            "step": step,
            "steps": steps,
            "epoch": max((host.epoch for host in hosts), default=0),
            "left": max(lefts) if lefts else None,
            "saved": self._saved,
            "speed": speed,
            "times_real": speed * seconds_a_clip,
            "cards": [
                _card(host, time.time(), asked=host.name in away, needed=self._found["run"].needs_all_hosts)
                for host in hosts
            ],
            "lines": [(when[11:], line) for when, line in self._lines],
        }


def _phase(view: RunView, training: Sequence[HostView]) -> str:
    if training or view.is_paused:
        return "paused" if view.is_paused else "training"
    return PHASES.get(view.phase, view.phase)


def _card(host: HostView, now: float, *, asked: bool, needed: bool) -> dict[str, Any]:
    """Gather what is shown of a host. asked: a person wants it to be left out. needed: the run cannot do without it."""
    state = host.state.partition(",")[0]
    figures = {column.name: column.cell(host) for column in FIGURES if column.name in SHOWN}
    figures |= {"device": host.device, **{name: reading_of(name, host, now=now) for name in READINGS}}
    return {
        "name": host.name,
        "state": host.state,
        "kind": KINDS.get(state, "starting"),
        "step": host.step,
        "steps": host.total_steps,
        "is_asked": asked,
        "is_away": state == "away",
        "was_asked": host.away_for == ASKED,
        "can_leave": not needed and state in ("training", "away", "waiting", "paused"),
        "figures": [(name, value) for name, value in figures.items() if value],
    }
