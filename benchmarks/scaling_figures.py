"""What scaling.py makes of a run: its steady speed, where the time goes, what is sent, and when a WER is reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MB = 1e6


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What was counted until `time`. sent, received: bytes by host. hosts, machine: CPU seconds of these and of all."""

    time: float
    sent: dict[str, int]
    received: dict[str, int]
    hosts: float
    machine: float


@dataclass(frozen=True, kw_only=True)
class Steady:
    """Of some steps. rate: clips a second of all hosts. computing, waiting (for others) and exchanging: shares of the
    hosts' time; the rest is mostly waiting for batches. counted, sent, received: bytes by host, by our counter (None of
    what does not count) and by the interface. others: cores that something else used. cores: of all hosts, with what
    is not training; None in results of before this was kept.
    """

    rate: float
    clips: int
    seconds: float
    computing: float | None
    waiting: float | None
    exchanging: float | None
    counted: dict[str, int] | None
    sent: dict[str, float]
    received: dict[str, float]
    others: float
    cores: float | None = None

    def mb_per_1000(self, bytes_by_host: Mapping[str, float]) -> float:
        """MB of a host, on average, for 1,000 clips that all hosts train."""
        return sum(bytes_by_host.values()) / len(bytes_by_host) / MB / self.clips * 1000


def steady(events: Iterable[dict], samples: Sequence[Sample], window: tuple[int, int]) -> Steady:
    """Of the steps after `window[0]` up to `window[1]`, of the hosts that are in the samples.

    Each host's clips by its own time: hosts that never wait for each other make their steps at different times.
    """
    first, last = window
    of_host: dict[str, dict[int, dict]] = {name: {} for name in samples[0].sent}
    for event in events:
        if event["type"] == "step" and first <= event["step"] <= last:
            of_host[event["host"]][event["step"]] = event
    if missing := [name for name, steps in of_host.items() if {first, last} - set(steps)]:
        raise ValueError(f"no steps {first} and {last} of {', '.join(missing)}")
    times = {name: (steps.pop(first)["time"], steps[last]["time"]) for name, steps in of_host.items()}
    seconds = {name: end - begin for name, (begin, end) in times.items()}
    clips = {name: sum(step["samples"] for step in steps.values()) for name, steps in of_host.items()}
    total = sum(seconds.values())
    steps = [step for steps in of_host.values() for step in steps.values()]
    exchanges = _exchanges(of_host)
    spent = sum(step.get("seconds_exchanging") or 0.0 for step in steps)
    return Steady(
        rate=sum(clips[name] / seconds[name] for name in times),
        clips=sum(clips.values()),
        seconds=total / len(times),
        computing=(sum(step["seconds"] for step in steps) - spent) / total,
        waiting=(spent - exchanges) / total,
        exchanging=exchanges / total,
        counted={name: sum(step.get("bytes") or 0 for step in steps.values()) for name, steps in of_host.items()},
        **_of_machine(samples, times),
    )


def steady_recipe(told: dict, samples: Sequence[Sample], first: int) -> Steady:
    """Of seq2seq_recipe.py's steps after `first`; it tells neither what it waits for nor what it sends."""
    begin = told["began"] + sum(told["taken"][:first])
    end = told["began"] + sum(told["taken"])
    clips = round(told["clips"] * (told["steps"] - first) / told["steps"])
    return Steady(
        rate=clips / (end - begin),
        clips=clips,
        seconds=end - begin,
        computing=None,
        waiting=None,
        exchanging=None,
        counted=None,
        **_of_machine(samples, dict.fromkeys(samples[0].sent, (begin, end))),
    )


def _exchanges(of_host: Mapping[str, Mapping[int, dict]]) -> float:
    """Seconds in exchanges, over all hosts. Who comes last waits for nobody: it takes as long as it takes there."""
    by_step: dict[int, list[float]] = {}
    for steps in of_host.values():
        for number, step in steps.items():
            by_step.setdefault(number, []).append(step.get("seconds_exchanging") or 0.0)
    return sum(len(seconds) * min(seconds) for seconds in by_step.values() if len(seconds) > 1)


def _of_machine(samples: Sequence[Sample], times: Mapping[str, tuple[float, float]]) -> dict:
    at = [sample.time for sample in samples]
    begin, end = min(b for b, _ in times.values()), max(e for _, e in times.values())

    def grown(values: Sequence[float], between: tuple[float, float]) -> float:
        before, after = np.interp(between, at, values)
        return float(after - before)

    def of_hosts(kind: str) -> dict[str, float]:
        return {name: grown([getattr(s, kind)[name] for s in samples], times[name]) for name in times}

    def cores(seconds: Sequence[float]) -> float:
        return grown(seconds, (begin, end)) / (end - begin)

    return {
        "sent": of_hosts("sent"),
        "received": of_hosts("received"),
        "others": cores([sample.machine - sample.hosts for sample in samples]),
        "cores": cores([sample.hosts for sample in samples]),
    }


@dataclass(frozen=True, kw_only=True)
class Point:
    """A model that a run had after `seconds` of training."""

    step: int
    seconds: float
    wer: float


def time_to(curve: Sequence[Point], wer: float) -> float | None:
    """Seconds until it is as good, along straight lines between the points; None: never."""
    for before, point in zip([None, *curve], curve, strict=False):
        if point.wer <= wer:
            if before is None:
                return point.seconds
            part = (before.wer - wer) / (before.wer - point.wer)
            return before.seconds + part * (point.seconds - before.seconds)
    return None


def times_of_agreements(events: Sequence[dict], agreements: Iterable[int]) -> dict[int, tuple[int, float]]:
    """(step, seconds since the first step began) of each: a round, or where there are none, a step."""
    steps = [event for event in events if event["type"] == "step"]
    began = min(event["time"] - event["seconds"] for event in steps)
    rounds = [(event["round"], event) for event in events if event["type"] == "round"]
    found: dict[int, tuple[int, float]] = {}
    for number, event in rounds or [(step["step"], step) for step in steps]:
        step, seconds = found.get(number, (0, 0.0))
        found[number] = (max(step, event["step"]), max(seconds, event["time"] - began))
    return {number: found[number] for number in agreements}
