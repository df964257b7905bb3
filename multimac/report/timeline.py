"""Draws what each host was at over the time of a run: training, lost, left out, evaluating."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distributed.run_dir.events import Event
from distributed.run_dir.log import Attempt, RunEvents
from distributed.run_dir.run_view import RunView
from whisper_tuner.text import duration

FEW, MOST_SPANS = 2, 400  # ticks between the ends; spans of one host, more cannot be told apart
SHORTEST = 0.15  # per cent of the width: a loss of seconds in a run of days is still seen
KINDS = {"training": "training", "lost": "lost", "given up": "lost", "failed": "lost", "not reached": "lost"}
KINDS |= {"away": "away", "paused": "away", "evaluate": "evaluating", "done": ""}  # others: "starting"
NO_CHANGE = {"round", "validation", "checkpoint", "preparing"}  # many
Change = tuple[float, str]  # seconds of the axis, and the kind of state from there on; "" for none


@dataclass(frozen=True, kw_only=True)
class Span:
    """A time in one state; `left` and `width` in per cent of the axis."""

    kind: str
    told: str
    left: float
    width: float


@dataclass(frozen=True, kw_only=True)
class Lane:
    host: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """ticks: (per cent of the axis, time). breaks: where the run was resumed; the time between is left out."""

    lanes: tuple[Lane, ...]
    ticks: tuple[tuple[float, str], ...]
    breaks: tuple[float, ...]
    kinds: tuple[str, ...]


def timeline_of(events: RunEvents, now: float | None = None) -> Timeline | None:
    """Return the lanes of all hosts; None before anything has happened. now: the time, while the run goes on."""
    changes: dict[str, list[Change]] = {}
    starts, end = [], 0.0
    for attempt in events.attempts:
        begun, ended = _times(attempt, now if attempt is events.attempts[-1] else None)
        starts.append(end)
        for when, host, state in _states(attempt):
            own, kind = changes.setdefault(host, []), KINDS.get(state, "starting")
            if not own or own[-1][1] != kind:
                own.append((end + max(0.0, when - begun), kind))
        end += ended - begun
        for own in changes.values():
            own.append((end, ""))  # while the run is stopped
    if end <= 0:
        return None
    lanes = tuple(Lane(host=host, spans=tuple(_spans(own, end))) for host, own in changes.items())
    ticks = tuple((100 * part / FEW, duration(end * part / FEW)) for part in range(FEW + 1))
    kinds = dict.fromkeys(span.kind for lane in lanes for span in lane.spans)
    return Timeline(
        lanes=lanes, ticks=ticks, breaks=tuple(100 * at / end for at in starts[1:] if at), kinds=tuple(kinds)
    )


def _times(attempt: Attempt, now: float | None) -> tuple[float, float]:
    found = [*attempt.others[:1], *attempt.steps[:1]], [*attempt.others[-1:], *attempt.steps[-1:]]
    begun, last = min(e.time for e in found[0]), max(e.time for e in found[1])
    return begun, max(begun, last, now or 0.0)


def _states(attempt: Attempt) -> Iterator[tuple[float, str, str]]:
    """Yield when each host came into a state."""
    view = RunView()
    for event in attempt.others:
        if event.type in NO_CHANGE:
            continue
        view.take(event)
        if _is_evaluation(event):
            yield from ((event.time, name, "evaluate") for name in view.hosts)
        elif event.type == "end":
            return
        elif view.phase != "evaluate":
            yield from ((event.time, host.name, host.state) for host in view.hosts.values())


def _is_evaluation(event: Event) -> bool:
    return event.type == "phase" and event.phase == "evaluate" and event.host is None


def _spans(changes: Sequence[Change], end: float) -> Iterator[Span]:
    ends = [when for when, _ in changes[1:]] + [end]
    spans = [(since, until, kind) for (since, kind), until in zip(changes, ends, strict=True) if kind and until > since]
    longest = sorted(spans, key=lambda span: span[0] - span[1])[:MOST_SPANS]
    for since, until, kind in sorted(longest):
        width = max(SHORTEST, 100 * (until - since) / end)
        told = f"{kind}, {duration(since)} to {duration(until)}"
        yield Span(kind=kind, told=told, left=round(100 * since / end, 3), width=round(width, 3))
