"""`multimac evaluate`: WER and CER of several models on several test sets, and what each of them wrote."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from multimac.view.transfers import fetch_model
from whisper_tuner.config import ConfigFile, Profile
from whisper_tuner.errors import ConfigError, ExitStatus
from whisper_tuner.text import duration

if TYPE_CHECKING:
    from multimac.view.comparison import Candidate
    from whisper_tuner.data.dataset import Manifest
    from whisper_tuner.eval.evaluation import Evaluation

ELSEWHERE = "Free some space, or choose another folder with --out."
FIGURES = {"wer": "WER", "cer": "CER", "wer_raw": "WER as\nwritten", "cer_raw": "CER as\nwritten"}


def evaluate(
    config: Path,
    models: Sequence[str],
    *,
    data: Sequence[Path] = (),
    profile: str = "",
    language: str = "",
    batch_size: int = 8,
    base: bool = True,
    out: Path | None = None,
    worst: int = 5,
    as_json: bool = False,
) -> ExitStatus:
    """Without `data` the profile's test set is used, else those of the runs that made the models."""
    from multimac.view.comparison import candidates, check_models, labels

    console = Console(highlight=False, markup=False, stderr=as_json)
    used = ConfigFile(config).profile(profile) if profile else None
    language, task = language or (used.language if used else ""), used.task if used else ""
    chosen = candidates(models, with_base=base)
    manifests = _manifests(console, data or _test_sets(used, chosen))
    for candidate in chosen:
        fetch_model(candidate.path)
    with console.status("loading the models"):
        check_models(chosen)
    folders = _make_folders(chosen, labels([manifest.path for manifest in manifests]), out)
    results = []
    for candidate in chosen:
        for manifest, result in _measure(console, candidate, manifests, language, task, batch_size):
            folder = folders[candidate, manifest.path]
            results.append((candidate, manifest, result, _record(console, candidate, manifest, result, folder)))
    results.sort(key=lambda result: manifests.index(result[1]))
    records = [record for *_, record in results]
    if as_json:
        print(json.dumps(records, indent=2))
        return ExitStatus.OK
    console.print(_table(manifests, records))
    for candidate, manifest, result, _ in results:
        if worst and (not candidate.untouched or len(chosen) == 1):
            _show_worst(console, candidate, manifest, result, worst)
    for record in records:
        console.print(f"predictions: {record['predictions']}", soft_wrap=True)
    return ExitStatus.OK


def _test_sets(profile: Profile | None, chosen: Sequence[Candidate]) -> list[Path]:
    if profile and profile.test:
        return [profile.test]
    found = dict.fromkeys(model.origin.test for model in chosen if model.origin and model.origin.test)
    if not found:
        what = "nothing to evaluate on"
        raise ConfigError(what, remedy="Name a manifest with --data, or a profile that has a test set.")
    return list(found)


def _make_folders(
    chosen: Sequence[Candidate], names: Mapping[Path, str], out: Path | None
) -> dict[tuple[Candidate, Path], Path]:
    """The folder for the predictions of each model on each manifest, made before hours are spent on them."""
    folders = {
        (model, data): model.predictions_folder(out, data, name) for model in chosen for data, name in names.items()
    }
    for folder in folders.values():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}", remedy=ELSEWHERE) from None
    return folders


def _manifests(console: Console, data: Sequence[Path]) -> list[Manifest]:
    from distributed.hosts.paths import PROJECT, STORE
    from whisper_tuner.data.check import check_manifest, check_usable, described
    from whisper_tuner.data.dataset import MAX_DURATION_S

    manifests = [check_manifest(path, MAX_DURATION_S, PROJECT / STORE) for path in dict.fromkeys(data)]
    for manifest in manifests:
        check_usable(manifest)
        if manifest.problems:
            console.print(f"{manifest.path}: {described(manifest.problems)}", soft_wrap=True)
    return manifests


def _measure(
    console: Console,
    candidate: Candidate,
    manifests: Sequence[Manifest],
    language: str,
    task: str,
    batch_size: int,
) -> Iterator[tuple[Manifest, Evaluation]]:
    from exogym import device as devices
    from whisper_tuner.eval.evaluation import evaluate
    from whisper_tuner.export.final import load_model

    model, processor = load_model(candidate.path)
    model, origin = model.to(devices.choose()), candidate.origin
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        for manifest in manifests:
            shown = bar.add_task(f"{candidate.name[-30:]} {manifest.path.name}", total=len(manifest.samples))
            yield (
                manifest,
                evaluate(
                    model,
                    processor,
                    manifest.samples,
                    language=language or (origin.language if origin else "") or None,
                    task=task or (origin.task if origin else None),
                    batch_size=batch_size,
                    progress=lambda done, total, shown=shown: bar.update(shown, completed=done),
                ),
            )


def _record(
    console: Console, candidate: Candidate, manifest: Manifest, result: Evaluation, folder: Path
) -> dict[str, object]:
    """The figures of one model on one test set; its predictions are written."""
    from distributed.launcher.evaluate import summary
    from whisper_tuner.eval.predictions import PREDICTIONS, write_predictions

    for problem in result.problems:
        console.print(f"{manifest.path.name}: skipped: {problem}", soft_wrap=True)
    try:
        path = write_predictions(folder / PREDICTIONS, result.rows)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}", remedy=ELSEWHERE) from None
    return {
        "model": candidate.path,
        "base": candidate.untouched,
        "data": str(manifest.path),
        **summary(result),
        "speed": round(result.speed, 2),
        "flags": dict(Counter(flag for prediction in result.rows for flag in prediction.flags)),
        "skipped": len(manifest.problems) + len(result.problems),
        "predictions": str(path),
    }


def _table(manifests: Sequence[Manifest], records: Sequence[dict]) -> Table:
    """A section for each test set; the rate columns come right after the model, as scripts expect."""
    table = Table(
        header_style="bold", caption="per cent; WER and CER after Whisper's text normaliser; speed: audio s/s"
    )
    for column in ("model", *FIGURES.values(), "clips", "speed"):
        table.add_column(column, justify="left" if column == "model" else "right", overflow="fold")
    for manifest in manifests:
        seconds = sum(sample.duration_s for sample in manifest.samples)
        if len(manifests) == 1:
            table.title = f"{manifest.path}: {len(manifest.samples)} clips, {duration(seconds)}"
        else:
            table.add_section()
            table.add_row(f"{manifest.path}, {duration(seconds)}", style="bold")
        for record in records:
            if record["data"] == str(manifest.path):
                figures = (f"{record[key]:.1f}" for key in FIGURES)
                name = f"{record['model']} (base)" if record["base"] else record["model"]
                table.add_row(name, *figures, str(record["clips"]), f"{record['speed']:.1f}")
    return table


def _show_worst(console: Console, candidate: Candidate, manifest: Manifest, result: Evaluation, count: int) -> None:
    from multimac.view.alignment import side_by_side
    from whisper_tuner.eval.predictions import worst

    found = worst(result.rows, count)
    if found:
        console.print(f"\nworst of {manifest.path.name} by {candidate.path}:", soft_wrap=True)
    for prediction in found:
        rates, flags = prediction.rates, " ".join(prediction.flags)
        errors = f"{rates.substitutions} S, {rates.deletions} D, {rates.insertions} I"
        head = f"{prediction.sample.id}: WER {100 * rates.wer:.1f}: {errors}  {flags}".rstrip()
        console.print(head, soft_wrap=True)
        for line in side_by_side(*prediction.normalized, width=console.width):
            console.print(line, soft_wrap=True)
