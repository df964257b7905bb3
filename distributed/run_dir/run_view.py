"""What a run is doing now, from its events alone: one HostView for each host, and lines that are printed once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from whisper_tuner.text import FIRST_S, Pace, counted, duration

from .events import TYPES, Event

RECENT_STEPS = 10  # that speed and remaining time are reckoned from
FEW_STEPS = 3  # the first one takes longer than others
PREPARING = "preparing"  # begins the state of a host that computes log-mels
STATES = {"back": "waiting", "away": "away", "done": "done", "error": "failed"}  # of a host after such an event
GONE = ("lost", "given up")


@dataclass
class HostView:
    """The latest that the events tell of one host."""

    name: str
    state: str = "starting"
    step: int = 0
    total_steps: int = 0
    epoch: int = 0
    loss: float | None = None
    round: int = 0
    sent: int = 0
    device: str = ""
    is_out: bool = False  # it was told to be left out, and not to be back
    away_for: str = ""  # why it is left out, the last time
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    pace: Pace = field(default_factory=Pace)
    machine: Event | None = None

    def take(self, event: Event) -> None:
        kind = event.type
        if kind == "phase":
            self.state = "loading" if event.phase == "load" else event.phase
        elif kind == "preparing":
            told = f"{PREPARING} {_how_far(self.pace, event)}"
            self.state = told if event.done < event.total else "waiting"
        elif kind == "start":
            self.total_steps, self.device = event.total_steps, event.device
            self.state = "away" if self.is_out else "training"  # a process that has just started waits to be called
        elif kind == "step":
            self.step, self.epoch = event.step, event.epoch + 1
            self.loss = self.loss if event.loss is None else event.loss
            self.sent += event.bytes
            self.recent.append((event.seconds, event.samples))
        elif kind == "machine":
            self.machine = event
        elif kind == "round":
            self.round = event.round
        elif kind == "plan":
            self.total_steps = event.total_steps
        elif kind == "lost":
            self.state = "given up" if event.given_up else "lost"
            self.is_out = False
            self.loss = None  # others go on, so it would soon be an old one beside theirs
            self.recent.clear()
        elif kind == "resume":
            self.step, self.round, self.epoch = event.step, event.round, event.epoch + 1
        else:
            self.is_out = kind == "away" or (self.is_out and kind != "back")
            if kind == "away":
                self.away_for = event.reason
                self.recent.clear()
                if self.state in GONE:
                    return  # it is told again once the host is found
            self.state = STATES.get(kind, self.state)

    @property
    def speed(self) -> float | None:
        """Clips per second over the last steps."""
        seconds = sum(spent for spent, _ in self.recent)
        return sum(samples for _, samples in self.recent) / seconds if seconds else None

    @property
    def remaining(self) -> float | None:
        """Seconds to the end of training."""
        spent = sum(seconds for seconds, _ in self.recent)
        if self.state != "training" or (len(self.recent) < FEW_STEPS and spent < FIRST_S):
            return None
        return max(0, self.total_steps - self.step) * spent / len(self.recent)


class RunView:
    """Follows one run; `lines` collects what is printed once, above the table."""

    def __init__(self) -> None:
        self.hosts: dict[str, HostView] = {}
        self.lines: list[str] = []
        self.phase = "starting"
        self.progress = ""
        self.is_paused = False  # until enough hosts are there for the next generation
        self.end: Event | None = None
        self._generation = 0
        self._resumed = False
        self._told: dict[str, int] = {}  # the last step of which each type was told that every host tells
        self._paces: dict[str, Pace] = {}  # of evaluations

    def take(self, event: Event) -> None:
        kind, is_known = event.type, False
        if event.host is not None:
            host = self._host(event.host)
            is_known = kind == "away" and host.is_out and host.away_for == event.reason
            host.take(event)
            if kind == "plan":  # of all hosts: one that is gone does not tell it
                for gone in self.hosts.values():
                    is_silent = gone.is_out or gone.state in GONE
                    gone.total_steps = event.total_steps if is_silent else gone.total_steps
        elif kind == "phase":
            self.phase, self.end = event.phase, None  # an end that was read before is an earlier attempt's
            if event.hosts:  # a launcher has just started
                self.hosts |= {name: HostView(name) for name in event.hosts}
                self._resumed, self._told, self.is_paused, self.progress = False, {}, False, ""
        if kind == "generation":
            self._generation, self.is_paused = event.number, False
            for host in map(self._host, event.hosts):
                host.state = "training" if host.total_steps else host.state
            if event.number > 1:
                giving = [name for name in event.hosts if self._host(name).is_out]  # only their state to the others
                goes_on = [name for name in event.hosts if name not in giving] or event.hosts
                state = f", from the state of {', '.join(giving)}" if giving and goes_on != event.hosts else ""
                self.lines.append(f"training continues with {', '.join(goes_on)}{state}")
        elif kind == "resume":
            self._take_resume(event)
        elif kind in ("paused", "apart"):
            self.is_paused |= kind == "paused"
            for name in event.hosts:
                self._host(name).state = "paused" if kind == "paused" else "not reached"
        elif kind == "evaluating":
            what = f"{event.model} on {event.kept}" if event.kept else event.model
            pace = self._paces.setdefault(what, Pace())
            self.progress = f"evaluating {what}: {_how_far(pace, event)}"
        elif kind == "evaluation":
            self.progress = ""
        elif kind == "end":
            self.end = event
        is_known |= kind in TYPES and TYPES[kind].every_host_tells and event.step <= self._told.get(kind, -1)
        if (line := event.line) and not is_known:
            self._told[kind] = event.step
            self.lines.append(line)

    def _host(self, name: str) -> HostView:
        return self.hosts.setdefault(name, HostView(name))

    def _take_resume(self, event: Event) -> None:
        step, anew = event.step, event.written.get("anew") and event.step
        if self._generation > 1:
            afresh = "; its inner optimizer starts afresh" if anew else ""
            self.lines.append(f"{event.host} joins after step {step}{afresh}")
            return
        if not self._resumed:
            self._resumed = True
            agreed = "" if event.written.get("exactly", True) else ", the last that hosts had agreed on"
            self.lines.append(
                f"resumes after step {step}{agreed}" if step else "starts from the beginning: no checkpoint"
            )
        if anew:
            self.lines.append(f"{event.host}: its inner optimizer starts afresh")


def _how_far(pace: Pace, event: Event) -> str:
    if not event.done:
        return counted(event.total, "clip")
    left = pace.left(event.time, event.done, event.total)
    return f"{event.done}/{counted(event.total, 'clip')}" + (f", {duration(left)} left" if left else "")
