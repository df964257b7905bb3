"""What a run is doing now, from its events alone: one HostView for each host, and lines that are printed once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from whisper_tuner.text import FIRST_S, Pace, duration

from .log import problem_line

RECENT_STEPS = 10  # that speed and remaining time are reckoned from
FEW_STEPS = 3  # the first one takes longer than others
PREPARING = "preparing"  # begins the state of a host that computes log-mels
APART = (
    "cannot reach each other, though this machine reaches them: perhaps a firewall, or a Wi-Fi that keeps clients apart"
)


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
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    pace: Pace = field(default_factory=Pace)

    def take(self, event: dict) -> None:
        kind = event["type"]
        if kind == "phase":
            self.state = {"load": "loading"}.get(event["phase"], event["phase"])
        elif kind == "preparing":
            done, total = event["done"], event["total"]
            left = left_of(self.pace, event)
            self.state = f"{PREPARING} {done}/{total} clips{left}" if done < total else "waiting"
        elif kind == "start":
            self.state, self.total_steps, self.device = "training", event["total_steps"], event["device"]
        elif kind == "step":
            self.step, self.epoch = event["step"], event["epoch"] + 1
            self.loss = self.loss if event.get("loss") is None else event["loss"]
            self.sent += event.get("bytes") or 0
            self.recent.append((event["seconds"], event["samples"]))
        elif kind == "round":
            self.round = event["round"]
        elif kind == "plan":
            self.total_steps = event["total_steps"]
        elif kind == "lost":
            self.state, self.recent = "given up" if event["given_up"] else "lost", deque(maxlen=RECENT_STEPS)
        elif kind == "back":
            self.state = "waiting"
        elif kind == "resume":
            self.step, self.round, self.epoch = event["step"], event["round"], event["epoch"] + 1
        elif kind == "done":
            self.state = "done"
        elif kind == "error":
            self.state = "failed"

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
        return (self.total_steps - self.step) * spent / len(self.recent)


class RunView:
    """Follows one run; `lines` collects what is printed once, above the table."""

    def __init__(self) -> None:
        self.hosts: dict[str, HostView] = {}
        self.lines: list[str] = []
        self.phase = "starting"
        self.progress = ""
        self.end: dict | None = None
        self._generation = 0
        self._resumed = False
        self._validated = self._shared = 0
        self._ended: set[str] = set()
        self._paces: dict[str, Pace] = {}  # of evaluations

    def take(self, event: dict) -> None:
        """`event` is one that read_events gave: its fields are there and of their types."""
        kind, host = event["type"], event.get("host")
        if host is not None:
            self._host(host).take(event)
        if kind == "phase" and host is None:
            self._take_phase(event)
        elif kind == "generation":
            self._take_generation(event["number"], event["hosts"])
        elif kind == "resume":
            self._take_resume(host, event)
        elif kind in ("paused", "apart"):
            for name in event["hosts"]:
                self._host(name).state = "paused" if kind == "paused" else "not reached"
        elif kind == "evaluating":
            left = left_of(self._paces.setdefault(event["model"], Pace()), event)
            self.progress = f"evaluating {event['model']}: {event['done']}/{event['total']} clips{left}"
        elif kind == "evaluation":
            self.progress = ""
        elif kind == "end":
            self.end = event
        if kind == "validation":
            self._take_validation(event)
        elif kind == "shares":
            self._take_shares(event)
        elif kind in ("early_stop", "best"):
            self._take_end_of_training(event)
        elif said := line_of(event):
            self.lines.append(said)

    def _host(self, name: str) -> HostView:
        return self.hosts.setdefault(name, HostView(name))

    def _take_phase(self, event: dict) -> None:
        self.phase, self.end = event["phase"], None  # an end that was read before is an earlier attempt's
        for name in event.get("hosts") or ():
            self._host(name)
            self._resumed, self._validated, self._shared = False, 0, 0  # a launcher has just started
            self._ended = set()

    def _take_validation(self, event: dict) -> None:
        if event["step"] > self._validated and event.get("loss") is not None:  # every host tells it
            self._validated = event["step"]
            self.lines.append(f"step {event['step']}: validation loss {event['loss']:.3f}")

    def _take_end_of_training(self, event: dict) -> None:
        if event["type"] not in self._ended:  # every host tells it
            self._ended.add(event["type"])
            self.lines.append(line_of(event))

    def _take_shares(self, event: dict) -> None:
        if event["step"] > self._shared:  # every host tells it
            self._shared = event["step"]
            self.lines.append(f"step {event['step']}: {event['what']}")

    def _take_generation(self, number: int, hosts: list[str]) -> None:
        for name in hosts:
            view = self._host(name)
            view.state = "training" if view.total_steps else view.state
        self._generation = number
        if number > 1:
            self.lines.append(f"training continues with {', '.join(hosts)}")

    def _take_resume(self, host: str, event: dict) -> None:
        step, anew = event["step"], event.get("anew") and event["step"]
        if self._generation > 1:
            self.lines.append(f"{host} joins after step {step}{'; its inner optimizer starts afresh' if anew else ''}")
            return
        if not self._resumed:
            self._resumed = True
            self.lines.append(f"resumes after step {step}" if step else "starts from the beginning: no checkpoint")
        if anew:
            self.lines.append(f"{host}: its inner optimizer starts afresh")


def left_of(pace: Pace, event: dict) -> str:
    left = pace.left(event.get("time", 0.0), event["done"], event["total"])
    return f", {duration(left)} left" if left else ""


def line_of(event: dict) -> str:
    """What is printed for an event whatever came before it; "" for nothing."""
    kind = event["type"]
    if kind in ("problem", "warning", "notice"):
        return problem_line(event)
    if kind == "lost":
        return f"{event['host']} is lost{' and not tried again' if event['given_up'] else ''}: {event['reason']}"
    if kind == "paused":
        there = ", ".join(event["hosts"]) or "none"
        return f"paused until {event['min_hosts']} hosts are there (min_hosts); now: {there}"
    if kind == "early_stop":
        reason = f"validations in a row without a lower loss: {event['validations']} (early_stopping)"
        return f"training ends at step {event['step']} of {event['total_steps']}: {reason}"
    if kind == "best":
        return f"the model is that of step {event['best_step']}, validation loss {event['loss']:.3f} (keep_best)"
    if kind == "orphaned":
        return f"waiting for {', '.join(event['hosts'])}, who may have the newest state"
    if kind == "apart":
        left_out = f"; left out until then: {', '.join(event['hosts'])}" if event["hosts"] else ""
        return f"{named(event['pairs'])} {APART}{left_out}"
    if kind == "reached":
        return f"{named(event['pairs'])} reach each other again"
    if kind == "model":
        return f"model: {event['path']}"
    if kind == "report":
        return f"report: {event['path']}"
    return f"WER {event['when']}: {event['wer']:.1f}" if kind == "evaluation" else ""


def named(pairs: list[list[str]]) -> str:
    return ", ".join(f"{one} and {other}" for one, other in pairs)
