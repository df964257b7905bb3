"""A run's whole history from events.jsonl: one attempt for each launcher that wrote into it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .log import Senseless, decode

DAMAGED, SENSELESS = "is damaged", "makes no sense"


@dataclass
class Attempt:
    """What one launcher wrote; a resumed run has several."""

    steps: list[dict] = field(default_factory=list)
    others: list[dict] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the beginning of the first step to the end of the last, over all ranks."""
        if not self.steps:
            return 0.0
        return max(s["time"] for s in self.steps) - min(s["time"] - s["seconds"] for s in self.steps)

    def of_type(self, *kinds: str) -> list[dict]:
        return [event for event in self.others if event["type"] in kinds]

    def take(self, event: dict) -> None:
        (self.steps if event["type"] == "step" else self.others).append(event)


@dataclass
class RunEvents:
    """`damage` names the first line that cannot be read, and says what is wrong with it; "" if all can."""

    attempts: list[Attempt] = field(default_factory=list)
    first_time: float | None = None
    last_time: float | None = None
    damage: str = ""

    def take(self, event: dict) -> None:
        if begins(event) or not self.attempts:
            self.attempts.append(Attempt())
        self.attempts[-1].take(event)
        self.last_time = event["time"]
        self.first_time = self.first_time or self.last_time

    def of_type(self, *kinds: str) -> list[dict]:
        return [event for attempt in self.attempts for event in attempt.of_type(*kinds)]


def begins(event: dict) -> bool:
    """Whether a launcher has just started."""
    return event["type"] == "phase" and "hosts" in event


def problem_line(event: dict) -> str:
    """What a `problem` or a `warning` says to the user. The coordinator's warnings are about no host."""
    if event["type"] == "problem":
        return f"{event.get('host') or 'data'}: skipped: {event['what']}"
    return f"{event['host']}: {event['what']}" if event.get("host") else event["what"]


def scan(path: Path) -> RunEvents:
    """Raises OSError; a missing file is a run that has not begun.

    A killed launcher may leave a line cut short: at the end, or before the first event of the next launcher.
    """
    found = RunEvents()
    try:
        *lines, unfinished = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return found
    bad: dict[int, str] = {}  # what is wrong with each line that is no event
    for number, line in enumerate(lines, 1):
        try:
            event = decode(line)
        except ValueError as error:
            bad[number] = SENSELESS if isinstance(error, Senseless) else DAMAGED
            continue
        if begins(event) and bad.get(number - 1) == DAMAGED:
            del bad[number - 1]
        found.take(event)
    if found.attempts and bad.get(len(lines)) == DAMAGED:
        del bad[len(lines)]
    for number in list(bad)[:1]:
        found.damage = f"{path.name}:{number} {bad[number]}"
    if not found.attempts and (bad or unfinished):
        found.damage = f"{path.name} holds no event that can be read"
    return found
