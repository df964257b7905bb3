"""A run's folder as figures: what `runs list`, `show` and `compare` print. Reads only; loads no torch."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whisper_tuner.errors import ExitStatus
from whisper_tuner.json_text import parse_json

from .event_fields import MOST
from .events import Attempt, RunEvents, Step, scan
from .folder import disk_use, is_running

RUNNING, FINISHED, INTERRUPTED, FAILED, BROKEN = "running", "finished", "interrupted", "failed", "broken"
NO_LAST_WORD = "the launcher ended without a last word (killed, or the machine went down)"
NONSENSE = "events.jsonl holds an event that makes no sense"
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)
Points = tuple[tuple[float, float], ...]


def _check_numbers(figures: HostFigures | RunSummary) -> None:
    """Raises ValueError for what cannot have been counted: infinite, no number, or too much."""
    for name, value in vars(figures).items():
        if isinstance(value, int | float) and not abs(value) < MOST:
            raise ValueError(f"{name} cannot be {value}")


@dataclass(frozen=True, kw_only=True)
class HostFigures:
    """One rank. `communicating` is None where events do not tell.

    memory: the most that was held after a step, of the accelerator's; of a rank on the CPU its resident size.
    """

    name: str
    device: str = ""
    steps: int = 0
    clips: int = 0
    clips_per_s: float | None = None
    communicating: float | None = None
    bytes: int = 0
    memory: int = 0

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class Curves:
    """(step, value); losses and rates are means over the ranks."""

    loss: Points = ()
    validation: Points = ()
    lr: Points = ()


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """`steps` are one rank's; `clips` are trained by all; `seconds` are of training, evaluation left out.

    `clips_per_s` counts all that was computed, also steps that a resumed run did twice.
    """

    id: str
    path: Path
    state: str
    created: float
    changed: float
    name: str = ""
    message: str = ""
    hosts: tuple[str, ...] = ()
    over_ssh: bool = False
    strategy: str = ""
    method: str = ""
    base_model: str = ""
    language: str = ""
    test: str = ""
    steps: int = 0
    total_steps: int = 0
    lost: dict[str, int] = field(default_factory=dict)  # how often each host was
    apart: dict[tuple[str, str], int] = field(default_factory=dict)  # pairs that could not reach each other
    rounds: int = 0
    clips: int = 0
    seconds: float = 0.0
    clips_per_s: float | None = None
    bytes: int = 0
    attempts: int = 0
    wer_before: float | None = None
    wer_after: float | None = None
    model: Path | None = None
    checkpoints: tuple[Path, ...] = ()
    checkpoint_step: int | None = None
    size: int = 0
    problems: tuple[str, ...] = ()
    per_host: tuple[HostFigures, ...] = ()
    curves: Curves = Curves()
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_numbers(self)

    @property
    def resumable(self) -> bool:
        return self.state in (INTERRUPTED, FAILED) and bool(self.checkpoints)

    @property
    def kind_of_work(self) -> tuple:
        """Runs alike in this do the same computation for a clip, so that their clips/s can be compared."""
        keys = ("batch_size", "audio_context", "precision", "gradient_checkpointing", "training clips")
        named = self.settings.get("shards")  # of one rank: it takes a batch of each shard in every step
        shards = len(named) if isinstance(named, list) else 0
        return self.base_model, self.method, shards or 1, *(str(self.settings.get(key)) for key in keys)


def read_run(run_dir: Path, *, only_asked: bool = False) -> RunSummary:
    """Never raises: what cannot be read makes the run `broken`, with the reason as its message.

    only_asked: events.jsonl, nearly all of the work, is taken for empty.
    """
    try:
        size, changed = disk_use(run_dir)
        events = RunEvents() if only_asked else scan(run_dir / "events.jsonl")
    except OSError as error:
        return _broken(run_dir, f"{error.filename}: {error.strerror}")
    except (*DAMAGE, RecursionError):
        return _broken(run_dir, NONSENSE)
    try:
        asked = parse_json((run_dir / "run.json").read_text(encoding="utf-8"))
        figures = _asked(asked)
    except FileNotFoundError:
        return _broken(run_dir, "there is no run.json: it is being prepared, or was given up before it began", changed)
    except OSError as error:
        return _broken(run_dir, f"run.json: {error.strerror}", changed)
    except DAMAGE:
        return _broken(run_dir, "run.json is damaged", changed)
    figures["settings"]["training clips"] = _clips_list(run_dir)
    try:
        figures |= _happened(events) | _on_disk(run_dir, events) | _rates(run_dir, events)
        state, message = _state(run_dir, events)
        return RunSummary(
            id=run_dir.name,
            path=run_dir,
            state=state,
            message=message,
            created=_created(run_dir, asked, events, changed),
            changed=max(changed, events.last_time or 0),
            size=size,
            **figures,
        )
    except DAMAGE:
        return _broken(run_dir, NONSENSE, changed)


def _broken(run_dir: Path, reason: str, changed: float = 0.0) -> RunSummary:
    created = date_in(run_dir.name) or changed
    size = 0
    with contextlib.suppress(OSError):
        size, changed = disk_use(run_dir)
    return RunSummary(
        id=run_dir.name,
        path=run_dir,
        state=BROKEN,
        message=reason,
        created=created or changed,
        changed=changed,
        size=size,
    )


def _asked(asked: dict[str, Any]) -> dict[str, Any]:
    """From run.json. Versions of this program differ in what they write: only what a run cannot lack is required."""
    ranks = asked["ranks"]
    spec = ranks[0]["spec"]
    profile = spec.get("profile") or {}
    chosen = {key: value for key, value in (spec.get("strategy_settings") or {}).items() if value is not None}
    strategy = {f"{spec['strategy']}: {key}": value for key, value in chosen.items()}
    settings = {key: value for key, value in profile.items() if key not in ("train", "validation", "test")}
    return {
        "name": str(asked["name"]),
        "hosts": tuple(str(rank["label"]) for rank in ranks),
        "over_ssh": any(rank.get("host") for rank in ranks),
        "strategy": str(spec["strategy"]),
        "method": str(profile.get("method", "")),
        "base_model": str(profile.get("base_model", "")),
        "language": str(profile.get("language") or ""),
        "test": str(asked.get("test") or ""),
        "settings": {**settings, "test": asked.get("test"), "strategy": spec["strategy"], **strategy},
        "versions": dict(asked.get("versions") or {}),
    }


def _happened(events: RunEvents) -> dict[str, Any]:
    attempts = events.attempts
    all_steps = [step for attempt in attempts for step in attempt.steps]
    steps, others = _kept(attempts)
    seconds = sum(attempt.seconds for attempt in attempts)
    starts = {event.get("host"): event for attempt in attempts for event in attempt.of_type("start")}
    rounds = [event for event in others if event["type"] == "round"]
    per_host = tuple(_host(name, attempts, starts) for name in _labels(attempts, all_steps))
    return {
        "steps": max((step.step for step in steps), default=0),
        "total_steps": _total_steps([*starts.values(), *(e for e in others if e["type"] == "plan")]),
        "lost": dict(Counter(str(e.get("host")) for attempt in attempts for e in attempt.of_type("lost"))),
        "apart": dict(_pairs(attempts)),
        "rounds": max((event["round"] for event in rounds), default=0),
        "clips": sum(step.samples for step in steps),
        "seconds": seconds,
        "clips_per_s": sum(step.samples for step in all_steps) / seconds if seconds > 0 else None,
        "bytes": sum(host.bytes for host in per_host),
        "attempts": len(attempts),
        "problems": _problems(attempts),
        "per_host": per_host,
        "curves": Curves(
            loss=_mean_by_step((step.step, step.loss) for step in steps),
            lr=_mean_by_step((step.step, step.lr) for step in steps),
            validation=_mean_by_step((e["step"], e.get("loss")) for e in others if e["type"] == "validation"),
        ),
    }


def _pairs(attempts: list[Attempt]) -> Counter[tuple[str, str]]:
    """How often each came apart: an event names those, too, that were apart already."""
    found: Counter[tuple[str, str]] = Counter()
    for attempt in attempts:
        now: set[tuple[str, str]] = set()
        for event in attempt.of_type("apart", "reached"):
            named = {(str(one), str(other)) for one, other in event["pairs"]}
            found.update(named - now if event["type"] == "apart" else ())
            now = now | named if event["type"] == "apart" else now - named
    return found


def _total_steps(events: list[dict]) -> int:
    """As the newest plan says: the beginning's, or the one after hosts have gone or come."""
    plans = [event for event in events if event["type"] == "plan"]
    return max((int(event.get("total_steps") or 0) for event in plans[-1:] or events), default=0)


def _kept(attempts: list[Attempt]) -> tuple[list[Step], list[dict]]:
    """What counts of a run that was resumed: later attempts replace the steps that they made once more."""
    steps: list[Step] = []
    others: list[dict] = []
    for attempt in attempts:
        if attempt.steps:
            first = min(step.step for step in attempt.steps)
            steps = [step for step in steps if step.step < first]
            others = [event for event in others if "step" not in event or int(event["step"]) < first]
        steps += attempt.steps
        others += attempt.others
    return steps, others


def _labels(attempts: list[Attempt], steps: list[Step]) -> list[str]:
    named = [str(name) for attempt in attempts for event in attempt.of_type("phase") for name in event.get("hosts", ())]
    return list(dict.fromkeys([*named, *(step.host for step in steps)]))


def _host(name: str, attempts: list[Attempt], starts: dict[str, dict]) -> HostFigures:
    own = [step for attempt in attempts for step in attempt.steps if step.host == name]
    seconds = sum(step.seconds for step in own)
    clips = sum(step.samples for step in own)
    sent, communicating = 0, None
    for attempt in attempts:
        steps = [step for step in attempt.steps if step.host == name]
        rounds = [event for event in attempt.of_type("round", "stop") if event.get("host") == name]
        # The last round of a run comes after its last step, whose own event does not have its bytes.
        by_step = {event["step"]: int(event.get("bytes") or 0) for event in rounds}
        sent += sum((by_step | {step.step: step.bytes for step in steps if step.bytes}).values())
        told = [step.communicating for step in steps if step.communicating is not None]
        if any(event["type"] == "round" for event in rounds):  # else what a stop took is no measure of all steps
            told = told or [float(event.get("seconds") or 0) for event in rounds]
        communicating = (communicating or 0) + sum(told) if told else communicating
    return HostFigures(
        name=name,
        device=str(starts.get(name, {}).get("device", "")),
        steps=max((step.step for step in own), default=0),
        clips=clips,
        clips_per_s=clips / seconds if seconds else None,
        communicating=communicating,
        bytes=sent,
        memory=max((step.memory for step in own), default=0),
    )


def _mean_by_step(pairs: Iterable[tuple[int, float | None]]) -> Points:
    sums: dict[int, tuple[float, int]] = {}
    for step, value in pairs:
        if value is not None:
            total, count = sums.get(step, (0.0, 0))
            sums[step] = total + value, count + 1
    return tuple((float(step), total / count) for step, (total, count) in sorted(sums.items()))


def _problems(attempts: list[Attempt]) -> tuple[str, ...]:
    found = (event for attempt in attempts for event in attempt.of_type("problem", "warning"))
    words = {"problem": "skipped: ", "warning": ""}
    lines = (f"{event.get('host') or 'data'}: {words[event['type']]}{event.get('what', '')}" for event in found)
    return tuple(dict.fromkeys(lines))


def _rates(run_dir: Path, events: RunEvents) -> dict[str, float | None]:
    """WER from the events, or from wer.json where they lack it."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, *DAMAGE):
        written = parse_json((run_dir / "wer.json").read_text(encoding="utf-8"))
        found = {when: rate for when in ("before", "after") if abs(rate := float(written[when]["wer"])) < MOST}
    for attempt in events.attempts:
        for event in attempt.of_type("evaluation"):
            if isinstance(event.get("wer"), int | float):
                found[event.get("when")] = float(event["wer"])
    return {"wer_before": found.get("before"), "wer_after": found.get("after")}


def _state(run_dir: Path, events: RunEvents) -> tuple[str, str]:
    last = events.attempts[-1] if events.attempts else Attempt()
    if is_running(run_dir):
        phases = [event["phase"] for event in last.of_type("phase") if "phase" in event]
        return RUNNING, "training" if last.steps and phases[-1:] != ["evaluate"] else " ".join(map(str, phases[-1:]))
    if events.damage:
        return BROKEN, events.damage
    ends = last.of_type("end")
    if not ends:
        return FAILED, NO_LAST_WORD if events.attempts else "it never began: see launcher.log"
    states = {ExitStatus.OK: FINISHED, ExitStatus.INTERRUPTED: INTERRUPTED}
    return states.get(ends[-1]["status"], FAILED), str(ends[-1].get("message") or "")


def _on_disk(run_dir: Path, events: RunEvents) -> dict[str, Any]:
    final, folder = run_dir / "final", run_dir / "checkpoints"
    found: list[Path] = []
    with contextlib.suppress(FileNotFoundError):  # a running run drops old ones, and at its end all
        found = sorted(path for path in folder.glob("[0-9]*") if any(path.glob("*.json")))
    saved = [e.get("step") for attempt in events.attempts for e in attempt.of_type("checkpoint")]
    return {
        "model": final if final.is_dir() and any(final.iterdir()) else None,
        "checkpoints": tuple(found),
        "checkpoint_step": saved[-1] if found and saved else None,
    }


def _clips_list(run_dir: Path) -> str:
    """How many clips were trained on, and which: two lists of the same rows have the same mark."""
    try:
        data = (run_dir / "train.csv").read_bytes()
    except OSError:
        return ""
    rows = max(0, data.count(b"\n") - 1)
    return f"{rows} (list {hashlib.sha256(data).hexdigest()[:6]})"


def _created(run_dir: Path, asked: dict[str, Any], events: RunEvents, changed: float) -> float:
    written = asked.get("created")
    if isinstance(written, int | float) and 0 < written < MOST:
        return float(written)
    return date_in(run_dir.name) or events.first_time or changed


def date_in(name: str) -> float | None:
    """When a run of this name was made."""
    try:
        return time.mktime(time.strptime(name[:15], "%Y%m%d-%H%M%S"))
    except (ValueError, OverflowError):
        return None
