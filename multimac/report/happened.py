"""What happened in a run: its curves, who trained how much, and what went wrong when.

Curves are SVG: points in a square of 1000 by 1000, which the page stretches. Numbers beside it are ordinary text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from distributed.run_dir.log import RunEvents
from distributed.run_dir.run_view import RunView
from distributed.run_dir.summary import NO_LAST_WORD, HostFigures, RunSummary
from whisper_tuner.errors import ExitStatus

from .template import Private, moment, number

Points = Sequence[tuple[float, float]]

SIDE = 1000
MOST_POINTS = 400  # of a curve; more cannot be told apart on a page
TICKS = 5
SMALLEST = 1e-12  # a range, as a part of its values, that can still be divided
NEAR_ZERO = 0.5  # of the highest value: from there on an axis begins at 0, so that heights can be compared
FAULTS_SHOWN = 200
# Of these RunView tells what a user should know; other lines of it stand elsewhere in the report.
FAULTS = {"lost", "away", "paused", "orphaned", "apart", "reached", "generation", "resume", "problem", "warning"}


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host of a run. share: of all clips, in per cent. lost: how often, and for how long; "" if never.

    spent: its time on computing, in exchanges (which wait for the others), and waiting for data, in per cent.
    """

    figures: HostFigures
    share: float
    lost: str
    spent: tuple[float, float, float] | None


@dataclass(frozen=True, kw_only=True)
class Fault:
    when: str
    what: str


def charts_of(run: RunSummary, events: RunEvents) -> list[Chart]:
    breaks = [min(step.step for step in attempt.steps) for attempt in events.attempts if attempt.steps][1:]
    training = Curve(name="training", told="training loss", style="training", points=run.curves.loss)
    loss = run.curves.validation
    validation = Curve(name="validation", told="validation loss", style="validation", points=loss, dots=True)
    rate = Curve(name="learning rate", told="learning rate", style="rate", points=run.curves.lr)
    own = [
        Curve(name="each host", told="", style="own", points=points)
        for points in run.curves.of_hosts.values()
        if len(run.curves.of_hosts) > 1
    ]
    found = [chart("Loss", [*own, training, validation], breaks), chart("Learning rate", [rate], breaks)]
    return [each for each in found if each]


def hosts_of(run: RunSummary) -> list[Host]:
    total = sum(host.clips for host in run.per_host)
    return [
        Host(
            figures=host,
            share=100 * host.clips / total if total else 0.0,
            lost=run.lost.get(host.name, ""),
            spent=_spent(host),
        )
        for host in run.per_host
    ]


def _spent(host: HostFigures) -> tuple[float, float, float] | None:
    exchange, data = host.communicating or 0.0, host.waiting or 0.0
    parts = max(0.0, host.seconds - exchange), exchange, data
    total = sum(parts)
    return (100 * parts[0] / total, 100 * parts[1] / total, 100 * parts[2] / total) if total else None


def faults_of(events: RunEvents, private: Private) -> tuple[list[Fault], int]:
    """Return the last FAULTS_SHOWN, and how many there were before."""
    found: list[tuple[float, str]] = []
    for attempt in events.attempts:
        view = RunView()
        begun = attempt.of_type("phase")
        if attempt is not events.attempts[0]:
            found.append((begun[0].time if begun else 0.0, "the run is started again"))
        for event in attempt.of_type(*FAULTS, "back", "end"):
            view.lines.clear()
            if event.type == "end":  # without what to do about it, which is past
                view.lines += [] if event.status == ExitStatus.OK else event.message.splitlines()[:1]
            else:
                view.take(event)
            found += [(event.time, line) for line in view.lines]
        if not attempt.of_type("end") and attempt is not events.attempts[-1]:
            last = [*attempt.steps[-1:], *attempt.others[-1:]]
            found.append((max(event.time for event in last), NO_LAST_WORD))
    shown = [Fault(when=moment(when), what=private.text(what)) for when, what in found[-FAULTS_SHOWN:]]
    return shown, len(found) - len(shown)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """told: what it is called in a sentence, or "". style: a class of the page's CSS. dots: its points are marked."""

    name: str
    told: str
    style: str
    points: Points
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Line:
    """A drawn curve: `paths` are pieces of it, `dots` are places."""

    name: str
    style: str
    paths: tuple[str, ...]
    dots: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A number at the edge; `at` is per cent from the left, or from the top."""

    text: str
    at: float


@dataclass(frozen=True, kw_only=True)
class Chart:
    """breaks: per cent from the left where a run was resumed. thinned: steps in a point, 1 if all are drawn."""

    title: str
    told: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    breaks: tuple[Tick, ...]
    thinned: int


def chart(title: str, curves: Sequence[Curve], breaks: Sequence[int] = ()) -> Chart | None:
    """Draw curves. breaks: steps with which a run went on after an interruption; no line leads to them.

    Returns None without points.
    """
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return None
    everything = [point for curve in curves for point in curve.points]
    left, right = _limits([x for x, _ in everything])
    low, high = _limits([y for _, y in everything], to_zero=True)
    breaks = [step for step in breaks if left < step <= right]
    told, lines = [], []
    for curve in curves:
        (first, begin), (last, end) = curve.points[0], curve.points[-1]
        to = f" and {end:.3g} at step {last:.15g}" if len(curve.points) > 1 else ""
        told += [f"The {curve.told} was {begin:.3g} at step {first:.15g}{to}."] if curve.told else []
        pieces = []
        for begins, ends in itertools.pairwise([-math.inf, *breaks, math.inf]):
            if piece := [point for point in curve.points if begins <= point[0] < ends]:
                points = _thinned(piece, left, right, len(curve.points))
                at = [(SIDE * (x - left) / (right - left), SIDE * (high - y) / (high - low)) for x, y in points]
                pieces.append([(round(x), round(y)) for x, y in at])
        alone = [piece[0] for piece in pieces if len(piece) == 1]  # a line of one point cannot be seen
        dots = [point for piece in pieces for point in piece] if curve.dots else alone
        paths = tuple("M" + "L".join(f"{x} {y}" for x, y in piece) for piece in pieces if len(piece) > 1)
        lines.append(Line(name=curve.name, style=curve.style, paths=paths, dots=tuple(dots)))
    return Chart(
        title=title,
        told=" ".join(told),
        lines=tuple(lines),
        x_ticks=tuple(_tick(x, (x - left) / (right - left)) for x in _round_numbers(left, right, whole=True)),
        y_ticks=tuple(_tick(y, (high - y) / (high - low)) for y in _round_numbers(low, high)),
        breaks=tuple(_tick(step, (step - 0.5 - left) / (right - left)) for step in breaks),
        thinned=math.ceil(max(len(curve.points) for curve in curves) / MOST_POINTS),
    )


def _limits(values: Sequence[float], *, to_zero: bool = False) -> tuple[float, float]:
    """Return limits that are somewhat apart, also where all values are the same."""
    low, high = min(values), max(values)
    if to_zero and 0 < low < NEAR_ZERO * high:
        low = 0.0
    if high - low > SMALLEST * max(abs(low), abs(high), SMALLEST):
        return low, high
    room = abs(low) / 10 or 1.0
    return low - room, high + room


def _thinned(points: Points, left: float, right: float, total: int) -> Points:
    """Return at most MOST_POINTS between left and right: the mean of all that would lie in one column.

    total: how many points the whole curve has, of which these are a piece.
    """
    if total <= MOST_POINTS:
        return points
    columns: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        columns.setdefault(math.floor((x - left) / (right - left) * (MOST_POINTS - 1)), []).append((x, y))
    return [
        (sum(x for x, _ in found) / len(found), sum(y for _, y in found) / len(found)) for found in columns.values()
    ]


def _tick(value: float, share: float) -> Tick:
    return Tick(text=number(value), at=round(100 * share, 2))


def _round_numbers(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return a few between two limits."""
    rough = (high - low) / TICKS
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough)
    step = max(1, round(step)) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [round(count * step, 12) for count in range(first, math.floor(high / step + 1e-9) + 1)]
