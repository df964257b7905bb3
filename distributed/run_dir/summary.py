"""A run folder as one RunSummary, which `runs list`, `show` and `compare` print. It only reads, and loads no torch."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whisper_tuner.errors import ExitStatus
from whisper_tuner.json_text import parse_json

from .figures import Attempt, Curves, HostFigures, RunEvents, figures, scan
from .folder import date_in, disk_use, is_running
from .log import MOST

REPORT = "report.html"  # in the run's folder
RUNNING, FINISHED, INTERRUPTED, FAILED, BROKEN = "running", "finished", "interrupted", "failed", "broken"
RECOVERED = "recovered"  # by `runs recover`, without the run.json of the master that is gone
NO_LAST_WORD = "the launcher ended without a last word (killed, or the machine went down)"
NO_RUN_JSON = "there is no run.json: it is being prepared, or was given up before it started"
ONLY_A_MODEL = "its model was built by `runs recover`; what was asked and what happened is not in this folder"
NOT_AS_WRITTEN = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)  # by a damaged JSON file


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
    def resumable(self) -> bool:
        return self.state in (INTERRUPTED, FAILED) and bool(self.checkpoints)

    @property
    def kind_of_work(self) -> tuple:
        """Runs that are equal in this do the same computation for a clip, so their clips/s can be compared."""
        keys = ("batch_size", "audio_context", "precision", "gradient_checkpointing", "training clips")
        named = self.settings.get("shards")  # of one rank: it takes a batch of each shard in every step
        shards = len(named) if isinstance(named, list) else 0
        return self.base_model, self.method, shards or 1, *(str(self.settings.get(key)) for key in keys)


def read_run(run_dir: Path, *, only_asked: bool = False) -> RunSummary:
    """Never raises: what cannot be read makes the run `broken`, with the reason as its message.

    only_asked: without its events, and what it takes on the disk; they are nearly all of the work.
    """
    return read_history(run_dir, only_asked=only_asked)[0]


def read_history(run_dir: Path, *, only_asked: bool = False, ended: bool = False) -> tuple[RunSummary, RunEvents]:
    """The same, with the events that it was made of. ended: the launcher, if still there, has said its last word."""
    events = RunEvents()
    size, changed = 0, 0.0
    if not only_asked:
        with contextlib.suppress(OSError):
            size, changed = disk_use(run_dir)
    known: dict[str, Any] = {"id": run_dir.name, "path": run_dir, "size": size, "changed": changed}
    known["created"] = date_in(run_dir.name) or changed  # where run.json does not tell
    try:
        known |= _asked(run_dir)
        events = events if only_asked else scan(run_dir / "events.jsonl")
        state, message = _state(run_dir, events.attempts, ended=ended)
        known |= _on_disk(run_dir, events) | figures(events)
        return RunSummary(state=state, message=message, left_out=events.left_out, **known), events
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
    except ValueError as error:
        reason = str(error)
    if reason == NO_RUN_JSON and (model := _model_in(run_dir)) and not (run_dir / "events.jsonl").exists():
        return RunSummary(state=RECOVERED, message=ONLY_A_MODEL, model=model, **known), events
    return RunSummary(state=BROKEN, message=reason, **known), events


def _asked(run_dir: Path) -> dict[str, Any]:
    """The fields that run.json tells. Raises OSError, and ValueError with the reason.

    Versions of this program differ in what they write: only what a run cannot lack is required.
    """
    try:
        fields = _fields(parse_json((run_dir / "run.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ValueError(NO_RUN_JSON) from None
    except NOT_AS_WRITTEN:
        raise ValueError("run.json is damaged") from None
    fields["settings"]["training clips"] = _clips_list(run_dir)
    return fields


def _fields(asked: dict[str, Any]) -> dict[str, Any]:
    """settings: every one that may differ between two runs."""
    ranks, test, created = asked["ranks"], asked.get("test"), asked.get("created")
    spec = ranks[0]["spec"]
    strategy, profile = spec["strategy"], spec.get("profile") or {}
    words = {"name": asked["name"], "test": test, "strategy": strategy}
    words |= {key: profile.get(key) for key in ("method", "base_model", "language", "task")}
    settings = {key: value for key, value in profile.items() if key not in ("train", "validation", "test")}
    settings |= {"test": test, "strategy": strategy}
    chosen = spec.get("strategy_settings") or {}
    settings |= {f"{strategy}: {key}": value for key, value in chosen.items() if value is not None}
    is_a_time = isinstance(created, int | float) and 0 < created < MOST
    return {
        **({"created": float(created)} if is_a_time else {}),
        **{key: _text(value) for key, value in words.items()},
        "hosts": tuple(_text(rank["label"]) for rank in ranks),
        "over_ssh": any(rank.get("host") for rank in ranks),
        "versions": dict(asked.get("versions") or {}),
        "settings": settings,
    }


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value or ""


def _state(run_dir: Path, attempts: Sequence[Attempt], *, ended: bool) -> tuple[str, str]:
    """With the message of its end, or what it is doing now."""
    last = attempts[-1] if attempts else Attempt()
    if not ended and is_running(run_dir):
        phase = next((event["phase"] for event in reversed(last.of_type("phase"))), "")
        return RUNNING, "training" if last.steps and phase != "evaluate" else phase
    ends = last.of_type("end")
    if not ends:
        return FAILED, NO_LAST_WORD if attempts else "it never started: see launcher.log"
    states = {ExitStatus.OK: FINISHED, ExitStatus.INTERRUPTED: INTERRUPTED}
    return states.get(ends[-1]["status"], FAILED), ends[-1]["message"]


def _on_disk(run_dir: Path, events: RunEvents) -> dict[str, Any]:
    folder, report = run_dir / "checkpoints", run_dir / REPORT
    found: list[Path] = []
    with contextlib.suppress(FileNotFoundError):  # a running run drops old ones, and at its end all
        found = sorted(path for path in folder.glob("[0-9]*") if any(path.glob("*.json")))
    saved = [event.get("step") for event in events.of_type("checkpoint")]
    return {
        "model": _model_in(run_dir),
        "report": report if report.is_file() else None,
        "checkpoints": tuple(found),
        "checkpoint_step": saved[-1] if found and saved else None,
    }


def _model_in(run_dir: Path) -> Path | None:
    final = run_dir / "final"
    return final if final.is_dir() and any(final.iterdir()) else None


def _clips_list(run_dir: Path) -> str:
    """How many clips were trained on, and a mark that is the same for two lists of the same rows."""
    try:
        data = (run_dir / "train.csv").read_bytes()
    except OSError:
        return ""
    rows = max(0, data.count(b"\n") - 1)
    return f"{rows} (list {hashlib.sha256(data).hexdigest()[:6]})"
