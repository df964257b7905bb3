"""A run folder as one RunSummary, which `runs list`, `show` and `compare` print. It only reads, and loads no torch."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whisper_tuner.errors import ExitStatus
from whisper_tuner.text import duration, parse_json, wer_told

from .events import MOST, Event, terms_told
from .folder import date_in, disk_use, is_running
from .log import Attempt, RunEvents, scan

REPORT = "report.html"  # in the run's folder
KEPT = "keeps-"  # begins the name of a folder below evaluation/: of a set of Profile.keeps
PARTS = ("start", "training", "evaluation")  # of the time from the command to the model; the last with the report
RUNNING, FINISHED, INTERRUPTED, FAILED, BROKEN = "running", "finished", "interrupted", "failed", "broken"
RECOVERED = "recovered"  # by `runs recover`, without the run.json of the master that is gone
NOT_EVALUATED = "stopped before WER was measured; the model is in final/"
NO_LAST_WORD = "the launcher ended without saying why (it was killed, or the machine went down)"
NO_RUN_JSON = "there is no run.json: it is being prepared, or was given up before it started"
ONLY_A_MODEL = "its model was built by `runs recover`; what was asked and what happened is not in this folder"
NOT_AS_WRITTEN = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)  # by a damaged JSON file
FROM_PROFILE = ("lr", "weight_decay", "max_norm", "schedule", "warmup_steps")  # of a strategy: the profile has them
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class HostFigures:
    """One rank. `communicating` and `waiting` (for batches; seconds) are None where events do not tell.

    seconds: of its steps, exchanges in them included.
    memory: the most bytes that were held after a step: the accelerator's, or of a rank on the CPU its resident size.
    """

    name: str
    device: str = ""
    steps: int = 0
    clips: int = 0
    clips_per_s: float | None = None
    seconds: float = 0.0
    communicating: float | None = None
    waiting: float | None = None
    bytes: int = 0
    memory: int = 0


@dataclass(frozen=True, kw_only=True)
class Curves:
    """(step, value); losses and rates are means over the ranks. of_hosts: a rank's own losses, by its name."""

    loss: Points = ()
    of_hosts: dict[str, Points] = field(default_factory=dict)
    validation: Points = ()
    lr: Points = ()


@dataclass(frozen=True, kw_only=True)
class KeptRates:
    """WER on a set of Profile.keeps. difference: as RunSummary.wer_difference."""

    name: str
    before: float | None = None
    after: float | None = None
    difference: tuple[float, ...] = ()
    clips: int = 0

    @property
    def told(self) -> str:
        return wer_told(self.before, self.after, self.difference, self.clips)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """`steps` are one rank's, `clips` those of all ranks; `seconds` are spent on training, not on evaluation.

    `clips_per_s` counts every step that was computed, also those that a resumed run made twice. `left_out` tells of
    lines of events.jsonl that cannot be read.
    """

    id: str
    path: Path
    state: str
    created: float
    changed: float
    name: str = ""
    message: str = ""
    left_out: str = ""
    hosts: tuple[str, ...] = ()
    over_ssh: bool = False
    strategy: str = ""
    method: str = ""
    base_model: str = ""
    language: str = ""
    task: str = ""
    test: str = ""
    keeps: tuple[str, ...] = ()  # names of Profile.keeps
    steps: int = 0
    total_steps: int = 0
    best: str = ""  # whose weights the model has, in words, if not those of the last step
    lost: dict[str, str] = field(default_factory=dict)  # how often each host was, and for how long
    apart: dict[tuple[str, str], int] = field(default_factory=dict)  # pairs that could not reach each other
    rounds: int = 0
    clips: int = 0
    seconds: float = 0.0
    clips_per_s: float | None = None
    bytes: int = 0
    attempts: int = 0
    expected: tuple[float, ...] = ()  # seconds of each of PARTS, as they were forecast when it began
    took: tuple[float, ...] = ()  # likewise, of a run that has finished without a stop
    wer_before: float | None = None
    wer_after: float | None = None
    wer_difference: tuple[float, ...] = ()  # the ends of the interval of 95 % of after less before, if they are known
    clips_tested: int = 0
    kept: tuple[KeptRates, ...] = ()
    terms: str = ""  # what became of Profile.terms, in words
    normalizers: tuple[str, ...] = ()  # that WER was measured with
    model: Path | None = None
    report: Path | None = None
    checkpoints: tuple[Path, ...] = ()
    checkpoint_step: int | None = None
    size: int = 0
    problems: tuple[str, ...] = ()
    per_host: tuple[HostFigures, ...] = ()
    curves: Curves = field(default_factory=Curves)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def needs_all_hosts(self) -> bool:
        """Tell whether each host has a part of the model."""
        return self.strategy == "pipeline"

    @property
    def resumable(self) -> bool:
        return self.state in (INTERRUPTED, FAILED) and self.has_checkpoints

    @property
    def has_checkpoints(self) -> bool:
        """Tell whether some are here, or on other hosts alone, as where this one was left out."""
        return bool(self.checkpoints) or self.checkpoint_step is not None

    @property
    def kind_of_work(self) -> tuple:
        """Return what is equal in runs that do the same computation for a clip: their clips/s can be compared."""
        keys = ("batch_size", "audio_context", "precision", "gradient_checkpointing", "training clips")
        named = self.settings.get("shards")  # of one rank: it takes a batch of each shard in every step
        shards = len(named) if isinstance(named, list) else 0
        return self.base_model, self.method, shards or 1, *(str(self.settings.get(key)) for key in keys)


def read_run(run_dir: Path, *, only_asked: bool = False) -> RunSummary:
    """Read a run's folder. Never raises: what cannot be read makes the run `broken`, with the reason as its message.

    only_asked: without its events, and what it takes on the disk; they are nearly all of the work.
    """
    return read_history(run_dir, only_asked=only_asked)[0]


def read_history(
    run_dir: Path, *, only_asked: bool = False, ended: bool = False, read: RunEvents | None = None
) -> tuple[RunSummary, RunEvents]:
    """Do the same, and return the events it was made of.

    ended: the launcher, if it lives, has said its last word. read: all events, by one who has them already.
    """
    events = read or RunEvents()
    size, changed = 0, 0.0
    if not only_asked:
        with contextlib.suppress(OSError):
            size, changed = disk_use(run_dir)
    known: dict[str, Any] = {"id": run_dir.name, "path": run_dir, "size": size, "changed": changed}
    known["created"] = date_in(run_dir.name) or changed  # where run.json does not tell
    try:
        asked = _asked(run_dir)
        entered = asked.pop("entered")
        known |= asked
        if not only_asked and read is None:
            events = scan(run_dir / "events.jsonl")
        state, message = _state(run_dir, events.attempts, ended=ended)
        # Other hosts have theirs until all is trained.
        is_elsewhere = known["over_ssh"] and state != FINISHED and not message.startswith(NOT_EVALUATED)
        known |= _on_disk(run_dir, events, is_elsewhere=is_elsewhere) | figures(events)
        went_through = state == FINISHED
        if message.startswith(NOT_EVALUATED) and _is_measured(known):  # by somebody, since
            state, message = FINISHED, ""
        if went_through and known["expected"] and len(events.attempts) == 1:
            known["took"] = events.attempts[0].parts(entered)
        return RunSummary(state=state, message=message, left_out=events.left_out, **known), events
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
    except ValueError as error:
        reason = str(error)
    if reason == NO_RUN_JSON and (model := _model_in(run_dir)) and not (run_dir / "events.jsonl").exists():
        return RunSummary(state=RECOVERED, message=ONLY_A_MODEL, model=model, **known), events
    return RunSummary(state=BROKEN, message=reason, **known), events


def _is_measured(known: dict[str, Any]) -> bool:
    """Tell whether WER after training is known of the test set, if there is one, and of all sets to keep."""
    kept = {one.name for one in known["kept"] if one.after is not None}
    return (known["wer_after"] is not None or not known["test"]) and kept >= {*known["keeps"]}


def _asked(run_dir: Path) -> dict[str, Any]:
    """Return the fields that run.json tells. Raises OSError, and ValueError with the reason.

    settings: every one that may differ between two runs. Versions of this program differ in what they write: only what
    a run cannot lack is required.
    """
    try:
        asked = parse_json((run_dir / "run.json").read_text(encoding="utf-8"))
        ranks, test, created = asked["ranks"], asked.get("test"), asked.get("created")
        spec = ranks[0]["spec"]
        strategy, profile = spec["strategy"], spec.get("profile") or {}
        words = {"name": asked["name"], "test": test, "strategy": strategy}
        words |= {key: profile.get(key) for key in ("method", "base_model", "language", "task")}
        settings = {key: value for key, value in profile.items() if key not in ("train", "validation", "test")}
        settings |= {"test": test, "strategy": strategy}
        chosen = spec.get("strategy_settings") or {}
        own = {key: value for key, value in chosen.items() if value is not None and key not in FROM_PROFILE}
        settings |= {f"{strategy}: {key}": value for key, value in own.items()}
        fields = {
            **{key: _text(value) for key, value in words.items()},
            "hosts": tuple(_text(rank["label"]) for rank in ranks),
            "over_ssh": any(rank.get("host") for rank in ranks),
            "versions": dict(asked.get("versions") or {}),
            "keeps": tuple(_text(kept["name"]) for kept in asked.get("keeps") or ()),
            "settings": settings | {"training clips": _clips_list(run_dir)},
        }
        forecast = asked.get("forecast") or {}
        fields["expected"] = tuple(float(forecast["parts"][part]) for part in PARTS) if forecast else ()
        fields["entered"] = float(forecast["entered"]) if forecast else 0.0
        if isinstance(created, int | float) and 0 < created < MOST:
            fields["created"] = float(created)
        return fields
    except FileNotFoundError:
        raise ValueError(NO_RUN_JSON) from None
    except NOT_AS_WRITTEN:
        raise ValueError("run.json is damaged") from None


def _text(value: Any) -> str:
    """Raise TypeError for what is neither a text nor null."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value or ""


def _state(run_dir: Path, attempts: Sequence[Attempt], *, ended: bool) -> tuple[str, str]:
    """Return a run's state, with the message of its end, or what it is doing now."""
    last = attempts[-1] if attempts else Attempt()
    if not ended and is_running(run_dir):
        phase = next((event.phase for event in reversed(last.of_type("phase"))), "")
        is_paused = [event.type for event in last.of_type("generation", "paused")][-1:] == ["paused"]
        training = "paused" if is_paused else "training"
        return RUNNING, training if last.steps and phase != "evaluate" else phase
    ends = last.of_type("end")
    if not ends:
        return FAILED, NO_LAST_WORD if attempts else "it never started: see launcher.log"
    states = {ExitStatus.OK: FINISHED, ExitStatus.INTERRUPTED: INTERRUPTED}
    return states.get(ends[-1].status, FAILED), ends[-1].message


def _on_disk(run_dir: Path, events: RunEvents, *, is_elsewhere: bool) -> dict[str, Any]:
    """Return what is in the folder. is_elsewhere: checkpoints may be on other hosts alone."""
    folder, report = run_dir / "checkpoints", run_dir / REPORT
    found: list[Path] = []
    with contextlib.suppress(FileNotFoundError):  # a running run drops old ones, and at its end all
        found = sorted(path for path in folder.glob("[0-9]*") if any(path.glob("*.json")))
    saved: list[int] = []
    for event in events.of_type(
        "checkpoint", "resume"
    ):  # what was saved after the step that a run went on from is gone
        kept = [step for step in saved if step <= event.step] if event.type == "resume" else saved
        saved = [*kept, event.step] if event.type == "checkpoint" or event.step else kept
    return {
        "model": _model_in(run_dir),
        "report": report if report.is_file() else None,
        "checkpoints": tuple(found),
        "checkpoint_step": saved[-1] if saved and (found or is_elsewhere) else None,
    }


def _model_in(run_dir: Path) -> Path | None:
    final = run_dir / "final"
    return final if final.is_dir() and any(final.iterdir()) else None


def _clips_list(run_dir: Path) -> str:
    """Tell how many clips were trained on, with a mark that is the same for two lists of the same rows."""
    try:
        data = (run_dir / "train.csv").read_bytes()
    except OSError:
        return ""
    rows = max(0, data.count(b"\n") - 1)
    return f"{rows} (list {hashlib.sha256(data).hexdigest()[:6]})"


def figures(events: RunEvents) -> dict[str, Any]:
    """Return the fields of a RunSummary that events tell."""
    steps: list[Event] = []
    others: list[Event] = []
    for attempt in events.attempts:  # what a resumed run did again replaces what it had done before
        if attempt.steps:
            first = min(step.step for step in attempt.steps)
            own = _went_on_with(attempt)
            steps = [step for step in steps if step.step < own.get(step.host, first)]
            others = [event for event in others if not event.step or event.step < first]
            others = [event for event in others if event.when != "after"]  # WER of a model that is trained further
        steps += attempt.steps
        others += attempt.others
    all_steps = [step for attempt in events.attempts for step in attempt.steps]
    seconds = sum(attempt.seconds for attempt in events.attempts)
    named = [name for event in events.of_type("phase") for name in event.hosts]
    kept = _by_host(steps)
    by_host = [(_by_host(attempt.steps), _by_host(attempt.others)) for attempt in events.attempts]
    hosts = [
        _host(name, [Attempt(one.get(name, []), more.get(name, [])) for one, more in by_host], kept.get(name, []))
        for name in dict.fromkeys([*named, *(name for one, _ in by_host for name in one)])
    ]
    planned = [event for event in others if event.type == "plan"] or events.of_type("start")
    rated = [event for event in others if event.type == "evaluation"]
    measured = {event.when: event for event in rated if not event.kept}
    rates = {when: event.wer for when, event in measured.items()}
    after = measured.get("after")
    return {
        "steps": max([*(step.step for step in steps), *_gone_on_from(events)], default=0),
        "total_steps": planned[-1].total_steps if planned else 0,
        "best": next((event.line for event in reversed(others) if event.type == "best"), ""),
        "lost": {event.host or "": _lost(event.host or "", events) for event in events.of_type("lost")},
        "apart": dict(_apart(events.attempts)),
        "rounds": max((event.round for event in others if event.type == "round"), default=0),
        "clips": sum(step.samples for step in steps),
        "seconds": seconds,
        "clips_per_s": _rate(all_steps, seconds),
        "bytes": sum(host.bytes for host in hosts),
        "attempts": len(events.attempts),
        "wer_before": rates.get("before"),
        "wer_after": rates.get("after"),
        "wer_difference": tuple(after.wer_difference) if after else (),
        "clips_tested": after.clips if after else 0,
        "terms": next((terms_told(event) for event in reversed(others) if event.type == "terms"), ""),
        "kept": tuple(_kept(name, rated) for name in dict.fromkeys(event.kept for event in rated if event.kept)),
        "normalizers": tuple(dict.fromkeys(event.normalizer for event in measured.values())),
        "problems": tuple(dict.fromkeys(event.line for event in events.of_type("problem", "warning"))),
        "per_host": tuple(hosts),
        "curves": Curves(
            loss=_means((step.step, step.loss) for step in steps),
            of_hosts={
                name: tuple((float(step.step), step.loss) for step in own if step.loss is not None)
                for name, own in kept.items()
            },
            lr=_means((step.step, step.lr) for step in steps),
            validation=_means((event.step, event.loss) for event in others if event.type == "validation"),
        ),
    }


def _kept(name: str, rated: Sequence[Event]) -> KeptRates:
    measured = {event.when: event for event in rated if event.kept == name}
    before, after = measured.get("before"), measured.get("after")
    return KeptRates(
        name=name,
        before=before.wer if before else None,
        after=after.wer if after else None,
        difference=tuple(after.wer_difference) if after else (),
        clips=after.clips if after else 0,
    )


def _lost(name: str, events: RunEvents) -> str:
    """Tell how often a host was lost, such as `2 times, 1:20 in all`; for how long only if it came back each time."""
    times = sum(event.host == name for event in events.of_type("lost"))
    away, since, is_back = 0.0, None, True
    for event in events.of_type("lost", "back", "away", "resume", "end"):
        if event.type == "away" and not event.found:
            continue
        if event.type == "lost" and event.host == name:
            since, is_back = event.time if since is None else since, False
        elif event.type == "end" or event.host == name:  # while the run is stopped nobody is away
            away, since = away + (event.time - since if since is not None else 0.0), None
            is_back |= event.type != "end"
    told = "once" if times == 1 else f"{times} times"
    if not is_back:
        return f"{told}, not back"
    return f"{told}, for {duration(away)}" if times == 1 else f"{told}, for {duration(away)} in all"


def _apart(attempts: Sequence[Attempt]) -> Counter[tuple[str, str]]:
    """Count how often each pair of hosts came apart; an event also names pairs that were apart before it."""
    found: Counter[tuple[str, str]] = Counter()
    for attempt in attempts:
        now: set[tuple[str, str]] = set()
        for event in attempt.of_type("apart", "reached"):
            named = {(one, other) for one, other in event.pairs}
            found.update(named - now if event.type == "apart" else ())
            now = now | named if event.type == "apart" else now - named
    return found


def _by_host(events: Iterable[Event]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {}
    for event in events:
        found.setdefault(event.host or "", []).append(event)
    return found


def _gone_on_from(events: RunEvents) -> list[int]:
    """Return the steps from which the last launcher went on: those before a full disk may not be recorded."""
    return [event.step for attempt in events.attempts[-1:] for event in attempt.of_type("resume")]


def _went_on_with(attempt: Attempt) -> dict[str | None, int]:
    """Return the first step of each host that a resumed run began with: they may have been stopped in other ones."""
    begun = min(step.time for step in attempt.steps)
    return {event.host: event.step + 1 for event in attempt.of_type("resume") if event.time <= begun}


def _host(name: str, own: Sequence[Attempt], kept: Sequence[Event]) -> HostFigures:
    """Return the figures of one rank from its own events. kept: its steps that no resumed run has made again."""
    steps = [step for attempt in own for step in attempt.steps]
    seconds = sum(step.seconds for step in steps)
    devices = [event.device for attempt in own for event in attempt.of_type("start")]
    exchanged = [_exchanged(attempt) for attempt in own]
    told = [seconds for _, seconds in exchanged if seconds is not None]
    waited = [step.seconds_waiting for step in steps if step.seconds_waiting is not None]
    return HostFigures(
        name=name,
        device=devices[-1] if devices else "",
        steps=len(kept),
        clips=sum(step.samples for step in kept),
        clips_per_s=_rate(steps, seconds),
        seconds=seconds,
        communicating=sum(told) if told else None,
        waiting=sum(waited) if waited else None,
        bytes=sum(sent for sent, _ in exchanged),
        memory=max((step.memory for step in steps), default=0),
    )


def _rate(steps: Sequence[Event], seconds: float) -> float | None:
    """Return clips a second; None where a damaged line makes that infinite."""
    return sum(step.samples for step in steps) / seconds if seconds > 1e-6 else None


def _exchanged(attempt: Attempt) -> tuple[int, float | None]:
    """Return the bytes that one host sent, and the seconds that it spent in exchanges; None if events do not tell.

    A step's event has the bytes of the round that it ended, so each counts once; the last round of a run comes after
    its last step, whose event lacks them. Only a step that ended with an exchange which is no round tells its seconds.
    """
    sent = {step.step: step.bytes for step in attempt.steps if step.bytes}
    told = [(step.step, seconds) for step in attempt.steps if (seconds := step.seconds_communicating) is not None]
    without_round = {step for step, _ in told}
    rounds = attempt.of_type("round")
    for event in attempt.of_type("round", "stop"):
        if event.step not in sent:
            sent[event.step] = event.bytes
        elif event.type == "round" and event.step in without_round:
            sent[event.step] += event.bytes
    if not told and not rounds:
        return sum(sent.values()), None  # a stop's seconds alone are no measure of all steps
    ends = [*rounds, *(stop for stop in attempt.of_type("stop") if stop.step not in without_round)]
    return sum(sent.values()), sum(seconds for _, seconds in told) + sum(event.seconds for event in ends)


def _means(values: Iterable[tuple[int, float | None]]) -> Points:
    """Return the mean of each step's values."""
    by_step: dict[int, tuple[float, int]] = {}
    for step, value in values:
        if value is not None:
            total, count = by_step.get(step, (0.0, 0))
            by_step[step] = total + value, count + 1
    return tuple((float(step), total / count) for step, (total, count) in sorted(by_step.items()))
