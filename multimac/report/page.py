"""Gathers what a run's folder tells, and writes it as `report.html`."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from distributed.hosts.paths import PROJECT
from distributed.run_dir.figures import RunEvents
from distributed.run_dir.summary import (
    BROKEN,
    FAILED,
    FINISHED,
    INTERRUPTED,
    RECOVERED,
    REPORT,
    RUNNING,
    RunSummary,
    read_history,
)
from whisper_tuner.errors import RunError
from whisper_tuner.eval.intervals import Difference
from whisper_tuner.eval.predictions import Aligned, align
from whisper_tuner.files import DISK, write_atomically
from whisper_tuner.text import duration, size

from .asked import METHODS, DataSet, Setting, data_of, read_asked, settings_of
from .charts import Chart, number
from .happened import Fault, Host, charts_of, faults_of, hosts_of, moment
from .measured import Clip, Test, tests_of
from .players import MOST_BYTES, Player, Players
from .private import Private, file_name

WORST_CLIPS = 20
CLOCKS_APART_S = 2.0  # a file's time and an event's may be rounded differently
SIGNS = {"S": "≠", "D": "−", "I": "+", "": ""}
FLAGS = {  # of predictions.csv
    "empty": "nothing was written",
    "repetition": "repeats itself",
    "hallucination": "far more than was said",
    "too-short": "far less than was said",
}
COMMAND = "multimac"


@dataclass(frozen=True, kw_only=True)
class Heard:
    """A clip to listen to."""

    clip: Clip
    words: Sequence[Aligned]
    player: Player
    language: str


@dataclass(frozen=True, kw_only=True)
class Tested:
    """A test set as the page shows it. scale: the highest rate of its small diagram, in per cent."""

    test: Test
    heard: Sequence[Heard]
    verdict: str
    scale: float


@dataclass(frozen=True, kw_only=True)
class Contents:
    run: RunSummary
    title: str
    state: Sequence[str]
    facts: Sequence[tuple[str, str]]
    settings: Sequence[Setting]
    data: Sequence[DataSet]
    charts: Sequence[Chart]
    tests: Sequence[Tested]
    missing: Sequence[tuple[str, str]]
    hosts: Sequence[Host]
    faults: Sequence[Fault]
    faults_left_out: int
    versions: Sequence[tuple[str, str]]
    written: str
    without_sound: int


def write_report(found: Contents, out: Path | None = None) -> Path:
    """Write RUN/report.html, or `out`. Raises RunError with the reason if it cannot be written."""
    path, page = out or found.run.path / REPORT, rendered(found)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Half a character, which JSON may hold, is no UTF-8.
        write_atomically(path, page.encode("utf-8", "replace").decode("utf-8"))
    except OSError as error:
        remedy = "Free some space, or name another place with --out."
        raise RunError(f"{path}: {error.strerror}", remedy=remedy if error.errno in DISK else None) from None
    return path


def rendered(found: Contents) -> str:
    here = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=here, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters |= {"number": number, "duration": duration, "size": size, "hours": hours, "percent": percent}
    style = Markup((Path(__file__).parent / "page.css").read_text(encoding="utf-8"))
    about = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return pages.get_template("page.html").render(**about, style=style, signs=SIGNS, flags=FLAGS)


def contents(run_dir: Path, *, ended: bool = False, sound: int = MOST_BYTES) -> Contents:
    """ended: see read_history. sound: the most bytes of recordings."""
    run_dir = run_dir.absolute()
    run, events = read_history(run_dir, ended=ended)
    asked = read_asked(run)
    run = _completed(run, asked)
    private = Private([run_dir, run_dir.parent, PROJECT, Path.home(), *_folders_of(run, asked)])
    players = Players([Path(), run_dir, PROJECT], sound)
    tests = [_tested(run, test, players) for test in tests_of(run, WORST_CLIPS)]
    faults, faults_left_out = faults_of(events, private)
    return Contents(
        run=run,
        title=run.name or run.id,
        state=[private.text(line) for line in _state(run, events)],
        facts=_facts(run, tests),
        settings=settings_of(asked, private),
        data=_with_test_clips(run, data_of(run, asked), tests),
        charts=charts_of(run, events),
        tests=tests,
        missing=_missing(run, tests, max((event["time"] for event in events.of_type("model")), default=0.0)),
        hosts=hosts_of(run, events),
        faults=faults,
        faults_left_out=faults_left_out,
        versions=_versions(run, events),
        written=moment(time.time()) + time.strftime(" %z"),
        without_sound=sum(not heard.player.address for tested in tests for heard in tested.heard),
    )


def _completed(run: RunSummary, asked: dict[str, Any]) -> RunSummary:
    """With what a recovered run's spec tells; there is no run.json then."""
    if run.base_model or not asked:
        return run
    profile = asked["ranks"][0]["spec"].get("profile") or {}
    names = ("base_model", "method", "language", "task")
    told = {name: str(profile.get(name) or "") for name in names}
    strategy = asked["ranks"][0]["spec"].get("strategy")
    final = run.path / "final"
    return dataclasses.replace(run, **told, strategy=str(strategy or ""), model=final if final.is_dir() else None)


def _folders_of(run: RunSummary, asked: dict[str, Any]) -> list[Path]:
    manifests = asked.get("manifests")
    named = [*(manifests.values() if isinstance(manifests, dict) else ()), run.test, run.base_model]
    return [Path(name).parent for name in named if isinstance(name, str) and name.startswith("/")]


def _state(run: RunSummary, events: RunEvents) -> list[str]:
    steps = f"{run.steps:,} of {run.total_steps:,} steps" if run.total_steps else f"{run.steps:,} steps"
    told = {
        FINISHED: f"The run has finished. It trained {steps}.",
        INTERRUPTED: f"The run was interrupted. It had trained {steps}.",
        RUNNING: f"The run is still going. This page shows it after {steps}.",
        FAILED: f"The run broke off. It had trained {steps}.",
        RECOVERED: "What was asked and what happened is not in this run's folder.",
        BROKEN: "This run's folder is damaged or incomplete. The page shows what is left.",
    }
    if run.model and not events.of_type("model"):
        lines = ["The model was built from a host's checkpoint, by `runs recover`."]
        lines += [told[run.state]] if run.state != BROKEN else []
    else:
        lines = [told[run.state]]
    if run.state in (INTERRUPTED, FAILED, BROKEN):
        first, *more = [line.strip() for line in run.message.splitlines() if line.strip()] or [""]
        lines += [f"The reason: {first}"] if first else []
        lines += more
    if run.attempts > 1:
        lines.append(f"It was begun {run.attempts} times: it was stopped, or broke off, and was resumed.")
    if not run.model:
        lines.append("There is no model yet.")
    return [*lines, *([f"{run.left_out}."] if run.left_out else [])]


def _facts(run: RunSummary, tests: Sequence[Tested]) -> list[tuple[str, str]]:
    speed = f"{run.clips_per_s:.1f} clips a second" if run.clips_per_s else ""
    pairs = [
        ("base model", file_name(run.base_model)),
        ("method", METHODS.get(run.method, run.method)),
        ("language", run.language),
        ("task", run.task if run.task != "transcribe" else ""),
        ("strategy", run.strategy if len(run.hosts) > 1 else ""),
        ("begun", moment(run.created) if run.created else ""),
        ("time of training", ", ".join(filter(None, [duration(run.seconds or None), speed]))),
        ("steps", f"{run.steps:,}" if run.steps else ""),
        ("rounds", f"{run.rounds:,}" if run.rounds else ""),
        ("clips trained", f"{run.clips:,}, in all epochs together" if run.clips else ""),
        ("sent over the network", size(run.bytes) if run.bytes else ""),
        ("run", run.id),
    ]
    return [(label, value) for label, value in pairs if value]


def _tested(run: RunSummary, test: Test, players: Players) -> Tested:
    spoken = "en" if run.task == "translate" else run.language
    heard = [
        Heard(
            clip=clip,
            words=align(*clip.normalized),
            player=players.of(clip.audio),
            language="en" if run.task == "translate" else clip.language or spoken,
        )
        for clip in test.worst
    ]
    highest = [rates.interval.high if rates.interval else rates.wer for rates in test.rates]
    return Tested(
        test=test,
        heard=[dataclasses.replace(one, language=_tag(one.language)) for one in heard],
        verdict=verdict(test.difference) if test.difference else test.not_compared,
        scale=max([*highest, 1.0]),
    )


def _tag(language: str) -> str:
    """For the attribute `lang`. A name in words is none; readers and browsers then guess."""
    return language if re.fullmatch(r"[A-Za-z]{2,3}", language) else ""


def verdict(found: Difference) -> str:
    """The difference between after and before, in words."""
    chance = found.low <= 0 <= found.high
    p = f"p = {found.p:.3f}" if found.p >= 0.001 else "p < 0.001"
    if found.points == found.low == found.high == 0:
        return "Word for word the errors are as many as before training."
    which = "lower" if found.points <= 0 else "higher"
    better = "better" if found.points <= 0 else "worse"
    said = f"After training WER is {abs(found.points):.1f} points {which}"
    between = f"the interval of 95 % goes from {found.low:+.1f} to {found.high:+.1f} points"
    judged = f"This is no {better} than chance." if chance else f"This is {better} than chance would explain."
    return f"{said}; {between} ({p}). {judged}"


def _missing(run: RunSummary, tests: Sequence[Tested], saved: float) -> list[tuple[str, str]]:
    """What the page lacks, and the command that makes it. saved: when the model was."""
    found = []
    if not run.model:
        if run.resumable:
            kind = "distributed-train" if run.over_ssh else "finetune"
            found.append(("The run can go on. Then it measures WER at its end.", f"{COMMAND} {kind} --resume {run.id}"))
        return found
    measured = [name for tested in tests for name in (rates.name for rates in tested.test.rates)]
    evaluate = f"{COMMAND} evaluate {run.id}" + ("" if run.test else " --data test.csv")
    again = f"{COMMAND} report {run.id}"
    if not tests:
        why = "WER was not measured." if run.test else "WER was not measured: the run has no test set."
        found.append((f"{why} This measures it, and then writes the page anew:", f"{evaluate} && {again}"))
    elif any(tested.test.clips == 0 for tested in tests):
        what = "What the models wrote for each clip is not here any more. This measures it again:"
        found.append((what, f"{evaluate} && {again}"))
    elif not {"before training", "after training"} <= set(measured):
        found.append(("Only one of the two models was measured. This measures both:", f"{evaluate} && {again}"))
    elif any(tested.test.measured < saved - CLOCKS_APART_S for tested in tests):
        what = "Some of this was measured before the run was resumed, with an earlier model. This measures it again:"
        found.append((what, f"{evaluate} && {again}"))
    return found


def _with_test_clips(run: RunSummary, data: Sequence[DataSet], tests: Sequence[Tested]) -> list[DataSet]:
    """With what was measured: the run's folder has no list of its test set."""
    own = next(
        (one.test for one in tests if run.test and one.test.name == Path(run.test).name and one.test.clips), None
    )
    if own is None:
        return list(data)
    about = {"clips": own.clips, "hours": own.hours}
    return [dataclasses.replace(each, **about) if each.kind == "test" else each for each in data]


def _versions(run: RunSummary, events: RunEvents) -> list[tuple[str, str]]:
    found = [(str(name), str(version)) for name, version in run.versions.items()]
    commits = dict.fromkeys(event["commit"] for event in events.of_type("phase") if event.get("commit"))
    if commits:
        found.insert(0, ("commit of this program", ", ".join(str(commit)[:12] for commit in commits)))
    with contextlib.suppress(metadata.PackageNotFoundError):
        found.insert(0, ("multimac, which wrote this page", metadata.version("multimac-whisper")))
    return found


def hours(value: float | None) -> str:
    """`12 min`, or `3.4 h`."""
    if value is None:
        return ""
    return f"{value:,.1f} h" if value >= 1 else f"{value * 60:.1f} min"


def percent(value: float, of: float) -> str:
    """Where a value lies on a scale, for CSS."""
    return f"{100 * min(1.0, max(0.0, value / of)):.2f}%"
