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

from distributed.hosts.paths import PROJECT
from distributed.run_dir.log import RunEvents
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
from multimac.view.models import file_name
from multimac.view.run_tables import clips_told, forecast_told
from whisper_tuner.eval.predictions import Aligned, align
from whisper_tuner.files import write_atomically
from whisper_tuner.text import counted, duration, size

from .asked import METHODS, data_of, read_asked, settings_of
from .happened import charts_of, faults_of, hosts_of
from .measured import NAMES, Clip, Test, tests_of
from .template import MOST_BYTES, Player, Players, Private, moment, rendered, told_as_run_error
from .timeline import timeline_of

WORST_CLIPS = 20
CLOCKS_APART_S = 2.0  # a file's time and an event's may be rounded differently
SIGNS = {"S": "≠", "D": "−", "I": "+", "": ""}
FLAGS = {  # of predictions.csv
    "empty": "nothing was written",
    "repetition": "repeats itself",
    "hallucination": "far more than was said",
    "too-short": "far less than was said",
}
LANES = {
    "starting": "starting, loading, coming back",
    "training": "training",
    "lost": "lost",
    "away": "left out, or paused",
    "evaluating": "measuring WER",
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


def write_report(found: dict[str, Any], out: Path | None = None) -> Path:
    """Write RUN/report.html, or `out`. Raises RunError with the reason if it cannot be written."""
    path, page = out or found["run"].path / REPORT, html_of(found)
    with told_as_run_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page)
    return path


def html_of(found: dict[str, Any]) -> str:
    return rendered("page.html", **found)


def contents(
    run_dir: Path,
    *,
    ended: bool = False,
    sound: int = MOST_BYTES,
    read: RunEvents | None = None,
    tests: Sequence[Tested] | None = None,
) -> dict[str, Any]:
    """Gather what a run's folder tells, by the names that page.html has for it.

    ended, read: as in read_history. sound: the most bytes of recordings. tests: as they were found before.
    """
    run_dir = run_dir.absolute()
    run, events = read_history(run_dir, ended=ended, read=read)
    asked = read_asked(run)
    run = _completed(run, asked)
    manifests = asked.get("manifests")
    named = [*(manifests.values() if isinstance(manifests, dict) else ()), run.test, run.base_model]
    folders = [Path(name).parent for name in named if isinstance(name, str) and name.startswith("/")]
    private = Private([run_dir, run_dir.parent, PROJECT, Path.home(), *folders])
    players = Players([Path(), run_dir, PROJECT], sound)
    if tests is None:
        tests = [_tested(run, test, players) for test in tests_of(run, WORST_CLIPS)]
    faults, faults_left_out = faults_of(events, private)
    data, own_test = data_of(run, asked), Path(run.test).name if run.test else None
    for own in [one.test for one in tests if one.test.name == own_test and one.test.clips][:1]:
        # What was measured of the test set tells its size: the run's folder has no list of it.
        data = [dataclasses.replace(s, clips=own.clips, hours=own.hours) if s.kind == "test" else s for s in data]
    return {
        "run": run,
        "title": run.name or run.id,
        "state": [private.text(line) for line in _state(run, events)],
        "facts": _facts(run),
        "settings": settings_of(asked, private),
        "data": data,
        "charts": charts_of(run, events),
        "tests": tests,
        "missing": _missing(run, tests, max((event.time for event in events.of_type("model")), default=0.0)),
        "hosts": hosts_of(run),
        "timeline": timeline_of(events, time.time() if run.state == RUNNING else None),
        "faults": faults,
        "faults_left_out": faults_left_out,
        "versions": _versions(run, events),
        "without_sound": sum(not heard.player.address for tested in tests for heard in tested.heard),
        "signs": SIGNS,
        "flags": FLAGS,
        "kinds": LANES,
    }


def _completed(run: RunSummary, asked: dict[str, Any]) -> RunSummary:
    """Add what the spec of a recovered run tells; there is no run.json then."""
    if run.base_model or not asked:
        return run
    profile = asked["ranks"][0]["spec"].get("profile") or {}
    names = ("base_model", "method", "language", "task")
    told: dict[str, Any] = {name: str(profile.get(name) or "") for name in names}
    strategy = asked["ranks"][0]["spec"].get("strategy")
    final = run.path / "final"
    return dataclasses.replace(run, **told, strategy=str(strategy or ""), model=final if final.is_dir() else None)


def _state(run: RunSummary, events: RunEvents) -> list[str]:
    steps = counted(run.steps, "step")
    if run.total_steps:
        steps = f"{run.steps:,} of {counted(run.total_steps, 'step')}"
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
    lines += [f"{run.best[0].upper()}{run.best[1:]}."] if run.best else []
    if run.attempts > 1:
        lines.append(f"It was begun {run.attempts} times: it was stopped, or broke off, and was resumed.")
    if not run.model:
        lines.append("There is no model yet.")
    return [*lines, *([f"{run.left_out}."] if run.left_out else [])]


def _facts(run: RunSummary) -> list[tuple[str, str]]:
    speed = f"{run.clips_per_s:.1f} clips a second" if run.clips_per_s else ""
    pairs = [
        ("base model", file_name(run.base_model)),
        ("method", METHODS.get(run.method, run.method)),
        ("language", run.language),
        ("task", run.task if run.task != "transcribe" else ""),
        ("strategy", run.strategy if len(run.hosts) > 1 else ""),
        ("begun", moment(run.created) if run.created else ""),
        ("time of training", ", ".join(filter(None, [duration(run.seconds or None), speed]))),
        ("from its start to its end", forecast_told(run)),
        ("steps", f"{run.steps:,}" if run.steps else ""),
        ("rounds", f"{run.rounds:,}" if run.rounds else ""),
        ("clips trained", clips_told(run)),
        ("sent over the network", size(run.bytes) if run.bytes else ""),
        ("run", run.id),
    ]
    return [(label, value) for label, value in pairs if value]


def _tested(run: RunSummary, test: Test, players: Players) -> Tested:
    heard = []
    for clip in test.worst:
        language = "en" if run.task == "translate" else clip.language or run.language
        if not re.fullmatch(r"[A-Za-z]{2,3}", language):  # a name in words is none: readers and browsers then guess
            language = ""
        player = players.of(clip.audio)
        heard.append(Heard(clip=clip, words=align(*clip.normalized), player=player, language=language))
    highest = [rates.interval.high if rates.interval else rates.wer for rates in test.rates]
    return Tested(
        test=test,
        heard=heard,
        verdict=f"The change from before to after training: {test.change}." if test.difference else test.not_compared,
        scale=max([*highest, 1.0]),
    )


def _missing(run: RunSummary, tests: Sequence[Tested], saved: float) -> list[tuple[str, str]]:
    """Tell what the page lacks, and the command that makes it. saved: when the model was."""
    if run.state == RUNNING:
        return []
    if not run.model:
        kind = "distributed-train" if run.over_ssh else "finetune"
        resume = ("The run can go on. Then it measures WER at its end.", f"{COMMAND} {kind} --resume {run.id}")
        return [resume] if run.resumable else []
    if not tests:
        why = "WER was not measured." if run.test else "WER was not measured: the run has no test set."
        why += " This measures it, and then writes the page anew:"
    elif any(tested.test.clips == 0 for tested in tests):
        why = "What the models wrote for each clip is not here any more. This measures it again:"
    elif not set(NAMES.values()) <= {rates.name for tested in tests for rates in tested.test.rates}:
        why = "Only one of the two models was measured. This measures both:"
    elif any(tested.test.measured < saved - CLOCKS_APART_S for tested in tests):
        why = "Some of this was measured before the run was resumed, with an earlier model. This measures it again:"
    else:
        return []
    data = "" if run.test else " --data test.csv"
    return [(why, f"{COMMAND} evaluate {run.id}{data} && {COMMAND} report {run.id}")]


def _versions(run: RunSummary, events: RunEvents) -> list[tuple[str, str]]:
    found = [(str(name), str(version)) for name, version in run.versions.items()]
    commits = dict.fromkeys(commit for event in events.of_type("phase") if (commit := event.written.get("commit")))
    if commits:
        found.insert(0, ("commit of this program", ", ".join(str(commit)[:12] for commit in commits)))
    with contextlib.suppress(metadata.PackageNotFoundError):
        found.insert(0, ("multimac, which wrote this page", metadata.version("multimac-whisper")))
    return found
