"""What happened in a run: its curves, who trained how much, and what went wrong when."""

from __future__ import annotations

from dataclasses import dataclass

from distributed.run_dir.figures import HostFigures, RunEvents
from distributed.run_dir.run_view import RunView
from distributed.run_dir.summary import NO_LAST_WORD, RunSummary
from whisper_tuner.errors import ExitStatus
from whisper_tuner.text import duration

from .charts import Chart, Curve, chart
from .template import Private, moment

FAULTS_SHOWN = 200
# Of these RunView tells what a user should know; other lines of it stand elsewhere in the report.
FAULTS = {"lost", "paused", "orphaned", "apart", "reached", "generation", "resume", "problem", "warning"}


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host of a run. share: of all clips, in per cent. lost: how often, and for how long; "" if never."""

    figures: HostFigures
    share: float
    lost: str


@dataclass(frozen=True, kw_only=True)
class Fault:
    when: str
    what: str


def charts_of(run: RunSummary, events: RunEvents) -> list[Chart]:
    breaks = [min(step["step"] for step in attempt.steps) for attempt in events.attempts if attempt.steps][1:]
    training = Curve(name="training", told="training loss", style="training", points=run.curves.loss)
    loss = run.curves.validation
    validation = Curve(name="validation", told="validation loss", style="validation", points=loss, dots=True)
    rate = Curve(name="learning rate", told="learning rate", style="rate", points=run.curves.lr)
    found = [chart("Loss", [training, validation], breaks), chart("Learning rate", [rate], breaks)]
    return [each for each in found if each]


def hosts_of(run: RunSummary, events: RunEvents) -> list[Host]:
    total = sum(host.clips for host in run.per_host)
    return [
        Host(
            figures=host,
            share=100 * host.clips / total if total else 0.0,
            lost=_lost(host.name, run.lost.get(host.name, 0), events),
        )
        for host in run.per_host
    ]


def _lost(name: str, times: int, events: RunEvents) -> str:
    """Tell how often a host was lost, such as `2 times, 1:20 in all`; for how long only if it came back each time."""
    if not times:
        return ""
    away, since = 0.0, None
    for event in events.of_type("lost", "back"):
        if event.get("host") == name:
            if event["type"] == "lost":
                since = event["time"] if since is None else since
            elif since is not None:
                away, since = away + event["time"] - since, None
    told = "once" if times == 1 else f"{times} times"
    if since is not None:
        return f"{told}, not back"
    return f"{told}, for {duration(away)}" if times == 1 else f"{told}, for {duration(away)} in all"


def faults_of(events: RunEvents, private: Private) -> tuple[list[Fault], int]:
    """Return the first FAULTS_SHOWN, and how many more there are."""
    found: list[tuple[float, str]] = []
    for number, attempt in enumerate(events.attempts):
        view = RunView()
        view.take({"type": "phase", "phase": "start", "hosts": []})
        begun = attempt.of_type("phase")
        if number:
            found.append((begun[0]["time"] if begun else 0.0, "the run is started again"))
        for event in attempt.of_type(*FAULTS, "back", "end"):
            view.lines.clear()
            if event["type"] == "end":  # without what to do about it, which is past
                view.lines += [] if event["status"] == ExitStatus.OK else event["message"].splitlines()[:1]
            elif event["type"] == "back":
                view.lines.append(f"{event['host']} is back")
            else:
                view.take(event)
            found += [(event["time"], line) for line in view.lines]
        if not attempt.of_type("end") and attempt is not events.attempts[-1]:
            last = [*attempt.steps[-1:], *attempt.others[-1:]]
            found.append((max(event["time"] for event in last), NO_LAST_WORD))
    shown = [Fault(when=moment(when), what=private.text(what)) for when, what in found[:FAULTS_SHOWN]]
    return shown, len(found) - len(shown)
