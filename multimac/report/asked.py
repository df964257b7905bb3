"""What a run was asked to do: its settings, those that somebody has chosen first, and its data."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.plan.job import FROM_PROFILE
from distributed.plan.run_spec import SPEC
from distributed.run_dir.summary import NOT_AS_WRITTEN, RunSummary
from exogym.strategy import STRATEGIES
from multimac.view.models import file_name
from multimac.view.run_tables import as_text
from whisper_tuner.config import Profile
from whisper_tuner.data.check import PROBLEMS_FILE
from whisper_tuner.data.formats.rows import LANGUAGE_COLUMNS
from whisper_tuner.files import read_table
from whisper_tuner.text import counted, parse_json

from .template import Private

ELSEWHERE = {"runs_dir", "test", "training clips"}  # told in another place of the report, or a folder
KINDS = {"train": "training", "validation": "validation", "test": "test"}
METHODS = {
    "full": "all weights were trained",
    "lora": "LoRA: an adapter was trained",
    "decoder": "the decoder's weights were trained",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    name: str
    value: str
    default: str
    meaning: str
    differs: bool


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """clips and hours: what was used; None where no list of them is left."""

    kind: str
    file: str
    clips: int | None = None
    hours: float | None = None
    languages: str = ""
    left_out: str = ""


def read_asked(run: RunSummary) -> dict[str, Any]:
    """Read run.json, or what a recovered run has instead, the spec of a rank; {} without both."""
    with contextlib.suppress(OSError, *NOT_AS_WRITTEN):
        asked = parse_json((run.path / "run.json").read_text(encoding="utf-8"))
        if isinstance(asked, dict) and asked["ranks"][0]["spec"]:
            return asked
    for path in sorted([*run.path.glob(f"recovered/*/*{SPEC}"), *run.path.glob(f"checkpoints/*{SPEC}")]):
        with contextlib.suppress(OSError, *NOT_AS_WRITTEN):
            spec = parse_json(path.read_text(encoding="utf-8"))
            if isinstance(spec, dict) and isinstance(spec.get("profile"), dict):
                return {"ranks": [{"label": "", "spec": spec}]}
    return {}


def settings_of(asked: dict[str, Any], private: Private) -> list[Setting]:
    """Return all settings, those first that the user has made, and that differ from their defaults."""
    with contextlib.suppress(*NOT_AS_WRITTEN):
        spec = asked["ranks"][0]["spec"]
        strategy = spec.get("strategy") or ""
        fields = {field.name: field for field in dataclasses.fields(Profile)}
        found = [
            _setting(key, value, fields.get(key), private)
            for key, value in (spec.get("profile") or {}).items()
            if key not in {*KINDS, *ELSEWHERE}
        ]
        found.append(Setting(name="strategy", value=str(strategy), default="", meaning="", differs=True))
        chosen = STRATEGIES[strategy][0] if strategy in STRATEGIES else None
        own = {field.name: field for field in dataclasses.fields(chosen)} if chosen else {}
        found += [
            _setting(key, value, own.get(key), private, f"{strategy}: ")
            for key, value in (spec.get("strategy_settings") or {}).items()
            if value is not None and key not in FROM_PROFILE
        ]
        if stated := asked.get("stated"):
            names = ["H" if key == "communication_interval" else key for key in stated]
            made = {f"{group}{name}" for name in names for group in ("", f"{strategy}: ")}
            found = [dataclasses.replace(one, differs=one.differs and one.name in made) for one in found]
        return sorted(found, key=lambda setting: not setting.differs)
    return []


def _setting(key: str, value: Any, field: dataclasses.Field | None, private: Private, group: str = "") -> Setting:
    default = field.default if field and field.default is not dataclasses.MISSING else None
    shown = file_name(value) if key == "base_model" else private.text(_text(value))
    meaning = str(field.metadata.get("help", "")) if field else ""
    return Setting(
        name=f"{group}{key}",
        value=shown,
        default=_text(default),
        meaning=meaning,
        differs=_text(value) != _text(default),
    )


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return as_text(value)


def data_of(run: RunSummary, asked: dict[str, Any]) -> list[DataSet]:
    """Return the sets for training, validation and test; the clips of a test set are told with its error rates."""
    manifests = asked.get("manifests")
    manifests = manifests if isinstance(manifests, dict) else {}
    left_out = _left_out(run.path / PROBLEMS_FILE)
    found = []
    for kind in ("train", "validation"):
        path = run.path / f"{kind}.csv"
        if kind not in manifests and not path.is_file():
            continue
        name, rows, others = str(manifests.get(kind) or ""), _rows(path), []
        for other, count in reversed(_added(asked).items() if kind == "train" else ()):
            others.append((str(Path(*Path(other).parts[-2:])), rows[len(rows) - count :], ""))
            rows = rows[: len(rows) - count]
        for file, of_file, left in ((Path(name).name, rows, left_out.get(name, "")), *reversed(others)):
            clips, hours, languages = _clips_of(of_file) or (None, None, "")
            found.append(
                DataSet(kind=KINDS[kind], file=file, clips=clips, hours=hours, languages=languages, left_out=left)
            )
    if run.test:
        known = asked.get("test_clips")
        clips = known if isinstance(known, int) and known else None
        name, left = Path(run.test).name, left_out.get(run.test, "")
        found.append(DataSet(kind=KINDS["test"], file=name, clips=clips, left_out=left))
    return found


def _added(asked: dict[str, Any]) -> dict[str, int]:
    """Return how many of the last rows of a run's training clips are of which other lists."""
    added = asked.get("added")
    counts = added if isinstance(added, dict) else {}
    return {str(name): count for name, count in counts.items() if isinstance(count, int) and count > 0}


def listed_clips(path: Path) -> tuple[int, float, str] | None:
    """Return clips, hours and languages of a run's list of clips, each counted once; None if it cannot be read."""
    return _clips_of(_rows(path))


def _rows(path: Path) -> list[dict[str, str]]:
    with contextlib.suppress(OSError, csv.Error, *NOT_AS_WRITTEN), path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
    return []


def _clips_of(rows: list[dict[str, str]]) -> tuple[int, float, str] | None:
    try:
        rows = list({row["audio_path"]: row for row in rows}.values())
        seconds = sum(float(row["duration_s"]) for row in rows)
    except NOT_AS_WRITTEN:
        return None
    if not rows:
        return None
    languages = Counter(filter(None, (row.get(LANGUAGE_COLUMNS[0]) for row in rows)))
    told = ", ".join(f"{name}: {counted(count, 'clip')}" for name, count in languages.most_common())
    return len(rows), seconds / 3600, told


def _left_out(path: Path) -> dict[str, str]:
    """Tell how many rows of each manifest could not be used, and why."""
    counts: dict[str, Counter[str]] = {}
    with contextlib.suppress(OSError, csv.Error, *NOT_AS_WRITTEN), path.open(encoding="utf-8", newline="") as file:
        for row in read_table(file):
            counts.setdefault(row["manifest"], Counter())[row["kind"]] += 1
    return {name: ", ".join(f"{n:,} {kind}" for kind, n in found.most_common()) for name, found in counts.items()}
