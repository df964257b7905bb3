"""`multimac export`: a trained model for other runtimes, and whether they write the same with it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from distributed.hosts.keep_awake import awake
from distributed.hosts.paths import PROJECT, STORE
from distributed.run_dir.folder import disk_use
from distributed.run_dir.summary import RunSummary, read_run
from multimac.commands.runs import folders_of
from multimac.view.comparison import origin_of
from multimac.view.model_card import About, Rate, card
from multimac.view.models import model_named
from multimac.view.progress import progress, working
from multimac.view.terminal import Console
from multimac.view.transfers import fetch_model
from whisper_tuner.data.check import check_manifest, check_usable
from whisper_tuner.data.dataset import MAX_DURATION_S, Manifest
from whisper_tuner.data.formats.rows import Reading
from whisper_tuner.data.labels import is_multilingual
from whisper_tuner.errors import ConfigError, ExitStatus, RunError
from whisper_tuner.eval.evaluation import GREEDY, Evaluation, evaluate
from whisper_tuner.eval.exported import LIMIT, decoded, is_off, speech_of
from whisper_tuner.eval.intervals import counts, wer_difference, wer_interval
from whisper_tuner.eval.predictions import PREDICTIONS
from whisper_tuner.export.final import load_model
from whisper_tuner.export.formats import Format, chosen
from whisper_tuner.export.merged import Merged, Speech
from whisper_tuner.files import read_table
from whisper_tuner.paths import shown
from whisper_tuner.text import size

BEFORE, ROUNDED = "before the export", "in float16"


@dataclass(frozen=True, kw_only=True)
class Exported:
    which: Format
    precision: str
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.which.name} {self.precision}"


@awake()
def export(
    config: Path,
    name: str,
    to: Sequence[str],
    *,
    precision: str,
    out: Path | None,
    verify: bool,
    data: Path | None,
    language: str,
    as_json: bool,
) -> ExitStatus:
    """Without `data` a verification takes the test set of the run that made the model."""
    console = Console(highlight=False, markup=False, stderr=as_json)
    wanted = chosen(to, precision)
    for which, how in wanted:
        which.require(how, running=verify)
    path = model_named(name, lambda: folders_of(config, None))
    origin = origin_of(path)
    manifest = _manifest(data, origin) if verify else None
    fetch_model(path)
    with working(console, "loading the model"):
        model, processor = load_model(path)
    merged = Merged(model=model.eval(), processor=processor)
    for which, _ in wanted:
        which.check(merged)
    asked = language or (origin.language if origin else ""), origin.task if origin else ""
    speech = speech_of(merged.model, *asked)
    found = []
    for which, how in wanted:
        one = Exported(which=which, precision=how, folder=_folder(out, path, origin) / f"{which.name}-{how}")
        with working(console, f"writing {one.name}"):
            which.write(merged, one.folder, how, _card(one, merged, speech, origin))
        console.print(f"{one.name}: {shown(one.folder.absolute())}, {size(disk_use(one.folder)[0])}", soft_wrap=True)
        found.append(one)
    verified = _verified(console, found, merged, manifest, speech) if manifest else None
    if as_json:
        print(json.dumps(_as_json(found, verified), indent=2))
    elif verified:
        console.print(_table(verified))
    if verified:
        _raise_if_off(verified)
    return ExitStatus.OK


def _manifest(data: Path | None, origin: RunSummary | None) -> Manifest:
    path = data or (Path(origin.test) if origin and origin.test else None)
    if path is None:
        raise ConfigError("nothing to verify with", remedy="Name a manifest of test clips with --data.")
    reading = Reading.of(origin.settings if origin and not data else {})
    manifest = check_manifest(path, MAX_DURATION_S, PROJECT / STORE, reading=reading, kind="test")
    check_usable(manifest)
    return manifest


def _folder(out: Path | None, path: str, origin: RunSummary | None) -> Path:
    if out or origin:
        return out or origin.path / "export"
    return Path("export") / (re.sub(r"[^\w.-]+", "-", path).strip("-.") or "model")


def _card(one: Exported, merged: Merged, speech: Speech, origin: RunSummary | None) -> str:
    usage = one.which.usage(one.folder.name, speech, one.precision, is_multilingual=is_multilingual(merged.model))
    about = _about(origin) | {"runtime": one.which.runtime, "precision": one.precision, "usage": usage}
    return card(About(language=speech.language or "", **about))


def _about(run: RunSummary | None) -> dict:
    """What its run tells of a model."""
    if run is None:
        return {"title": "Whisper, fine-tuned"}
    run = read_run(run.path)  # with its events
    about = {"title": run.name or run.id, "base_model": run.base_model, "method": run.method}
    about |= {"hosts": len(set(run.hosts)) or 1, "steps": run.steps}
    durations = [float(row["duration_s"] or 0) for row in _rows(run.path / "train.csv") if "duration_s" in row]
    about |= {"clips": len(durations), "hours": sum(durations) / 3600}
    if run.test:
        tested = run.path / "evaluation" / Path(run.test).stem
        about |= {"before": _rate(run.wer_before, tested / "base"), "after": _rate(run.wer_after, tested / "final")}
        about["test_clips"] = len(_rows(tested / "final" / PREDICTIONS))
    return about


def _rate(wer: float | None, folder: Path) -> Rate | None:
    if wer is None:
        return None
    clips = [_errors_and_words(row) for row in _rows(folder / PREDICTIONS)]
    return Rate(wer=wer, interval=wer_interval(clips) if clips else None)


def _errors_and_words(row: dict[str, str]) -> tuple[int, int]:
    errors = sum(int(row[name]) for name in ("substitutions", "deletions", "insertions"))
    return errors, len(row["reference_normalized"].split())


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(read_table(file))
    except OSError:
        return []


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What each runtime wrote for the test clips. alike: transformers' own, by precision of the weights."""

    manifest: Manifest
    alike: dict[str, Evaluation]
    results: list[tuple[Exported, Evaluation]]


def _verified(
    console: Console, exported: Sequence[Exported], merged: Merged, manifest: Manifest, speech: Speech
) -> Verified:
    results = []
    with progress(console) as bar:

        def shown_by(name: str):
            task = bar.add_task(name, total=len(manifest.samples))
            return lambda done, total: bar.update(task, completed=done)

        # Greedily, as by the runtimes: what chance draws where a text is in doubt is another text in each of them.
        known = {"language": speech.language, "task": speech.task, "temperatures": GREEDY}
        reference = evaluate(merged.model, merged.processor, manifest.samples, **known, progress=shown_by("before"))
        alike = {"float32": reference}
        if any(one.precision == "float16" for one in exported):
            rounded = copy.deepcopy(merged.model).half().float()
            at = shown_by(ROUNDED)
            alike["float16"] = evaluate(rounded, merged.processor, manifest.samples, **known, progress=at)
        for one in exported:
            results.append((one, decoded(one.which, one.folder, manifest.samples, speech, shown_by(one.name))))
    return Verified(manifest=manifest, alike=alike, results=results)


def _table(verified: Verified) -> Table:
    clips, reference = len(verified.manifest.samples), verified.alike["float32"]
    table = Table(header_style="bold", title=f"{verified.manifest.path}: {clips} clips")
    for column in ("", "WER", "95 %", "points more", "95 %", "size", "audio s/s"):
        table.add_column(column, justify="left" if not column else "right", overflow="fold")
    table.add_row(BEFORE, *_rates(reference))
    if rounded := verified.alike.get("float16"):
        table.add_row(ROUNDED, *_rates(rounded), *_more(rounded, reference))
    for one, result in verified.results:
        about = [size(disk_use(one.folder)[0]), f"{result.speed:.1f}"]
        table.add_row(one.name, *_rates(result), *_more(result, reference), *about)
    return table


def _as_json(exported: Sequence[Exported], verified: Verified | None) -> dict[str, Any]:
    """`exports`; with a verification also `before`, and `before in float16` where the table has it."""
    told = {one.name: {"to": one.which.name, "precision": one.precision, "folder": str(one.folder)} for one in exported}
    for one in exported:
        told[one.name]["bytes"] = disk_use(one.folder)[0]
    found: dict[str, Any] = {"exports": [*told.values()]}
    if verified:
        reference, rounded = verified.alike["float32"], verified.alike.get("float16")
        found |= {"data": str(verified.manifest.path), "clips": len(verified.manifest.samples)}
        found["before"] = _figures(reference)
        found |= {"before in float16": _figures(rounded, reference)} if rounded else {}
        for one, result in verified.results:
            told[one.name] |= _figures(result, reference) | {"speed": round(result.speed, 2)}
    return found


def _figures(result: Evaluation, reference: Evaluation | None = None) -> dict[str, Any]:
    """Per cent, and points more than the reference, with intervals of 95 %."""
    interval = wer_interval(counts(result.rows))
    figures = {"wer": round(100 * result.normalized.wer, 2)}
    figures["wer_interval"] = [round(interval.low, 2), round(interval.high, 2)] if interval else None
    if reference and (more := wer_difference(counts(result.rows), counts(reference.rows))):
        figures |= {"points_more": round(more.points, 2), "points_interval": [round(more.low, 2), round(more.high, 2)]}
    return figures


def _raise_if_off(verified: Verified) -> None:
    """Each runtime must write what transformers writes with weights of the same precision. Raises RunError."""
    wrong = []
    for one, result in verified.results:
        alike = verified.alike.get(one.precision)
        if is_off(off := alike and wer_difference(counts(result.rows), counts(alike.rows))):
            wrong.append(f"{one.name} by {off.points:+.1f} points")
    if wrong:
        what = f"at the same precision WER is more than {LIMIT} points from transformers': {', '.join(wrong)}"
        remedy = "The export stays where it is. Please report it, with the versions of the packages."
        raise RunError(what, remedy=remedy)


def _rates(result: Evaluation) -> list[str]:
    return [f"{100 * result.normalized.wer:.1f}", str(wer_interval(counts(result.rows)) or "")]


def _more(result: Evaluation, reference: Evaluation) -> list[str]:
    found = wer_difference(counts(result.rows), counts(reference.rows))
    return [f"{found.points:+.1f}", str(found.interval)] if found else ["", ""]
