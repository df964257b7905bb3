"""`multimac evaluate`: WER and CER of several models on several test sets, and what each of them wrote."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from distributed.hosts.keep_awake import awake
from distributed.hosts.paths import PROJECT, STORE
from distributed.launcher.evaluate import summary
from exogym import device as devices
from multimac.commands.runs import folders_of
from multimac.view.alignment import side_by_side
from multimac.view.comparison import Candidate, candidates, check_models, labels
from multimac.view.models import model_named
from multimac.view.progress import progress, working
from multimac.view.terminal import Console
from multimac.view.transfers import fetch_model
from whisper_tuner.config import ConfigFile, Profile
from whisper_tuner.data.check import check_manifest, check_usable, described
from whisper_tuner.data.dataset import MAX_DURATION_S, Manifest
from whisper_tuner.data.formats.rows import Reading
from whisper_tuner.errors import ConfigError, ExitStatus
from whisper_tuner.eval.evaluation import AUDIO_CONTEXTS, FALLBACK, GREEDY, Evaluation
from whisper_tuner.eval.evaluation import evaluate as evaluate_model
from whisper_tuner.eval.intervals import Interval, counts, wer_difference, wer_interval
from whisper_tuner.eval.predictions import (
    EMPTY,
    PREDICTIONS,
    REPETITION,
    TOO_LONG,
    TOO_SHORT,
    Prediction,
    worst,
    write_predictions,
)
from whisper_tuner.eval.text_cache import Decoding, TextCache
from whisper_tuner.export.final import load_model
from whisper_tuner.fact_store import CACHE, FactStore
from whisper_tuner.settings import nearest
from whisper_tuner.text import duration

ELSEWHERE = "Free some space, or choose another folder with --out."
FIGURES = {
    "wer": "WER",
    "wer_greedy": "WER\ngreedy",
    "cer": "CER",
    "wer_raw": "WER as\nwritten",
}
NAMED = 8  # clips of a kind
KINDS = {
    REPETITION: "repeats itself",
    EMPTY: "nothing was heard",
    TOO_LONG: "far more was heard than said",
    TOO_SHORT: "far less was heard than said",
}
CAPTIONS = {
    "full": "audio padded to 30 s, as other programs do",
    "cropped": "audio cropped to its own length; other programs pad it to 30 s",
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One model on one test set. `record` are its figures, as --json prints them."""

    model: Candidate
    manifest: Manifest
    predictions: list[Prediction]
    record: dict


@awake()
def evaluate(
    config: Path,
    models: Sequence[str],
    data: Sequence[Path],
    profile: str,
    language: str,
    *,
    batch_size: int,
    audio_context: str,
    fallback: bool,
    base: bool,
    out: Path | None,
    worst_rows: int,
    as_json: bool,
) -> ExitStatus:
    """Without `data` the profile's test set is used, else those of the runs that made the models."""
    if audio_context not in AUDIO_CONTEXTS:
        what = f"--audio-context {audio_context}: no such audio context{nearest(audio_context, AUDIO_CONTEXTS)}"
        raise ConfigError(what, remedy=f"Known: {', '.join(AUDIO_CONTEXTS)}.")
    console = Console(highlight=False, markup=False, stderr=as_json)
    used = ConfigFile(config).profile(profile) if profile else None
    asked = {"language": language or (used.language if used else ""), "task": used.task if used else ""}
    chosen = candidates([model_named(name, lambda: folders_of(config, None)) for name in models], with_base=base)
    origin = next((model.origin for model in chosen if model.origin), None)
    reading = Reading.of(used or (origin.settings if origin and not data else {}))
    manifests = _manifests(console, data or _test_sets(used, chosen), reading)
    for model in chosen:
        fetch_model(model.path)
    with working(console, "loading the models"):
        check_models(chosen)
    temperatures = FALLBACK if fallback else GREEDY
    other_way = ("" if fallback else "-greedy") + ("" if audio_context == "full" else f"-{audio_context}")
    folders = _make_folders(chosen, manifests, out, other_way)
    measured = []
    for model in chosen:
        for manifest, result in _results(console, model, manifests, asked, batch_size, audio_context, temperatures):
            folder = folders[model, manifest.path]
            measured.append(_measured(console, model, manifest, result, folder, audio_context))
    measured.sort(key=lambda one: manifests.index(one.manifest))
    differences = _differences(measured)
    if as_json:
        print(json.dumps([one.record for one in measured], indent=2))
        return ExitStatus.OK
    console.print(_table(manifests, measured, CAPTIONS[audio_context]))
    for line in differences:
        console.print(line, soft_wrap=True)
    for one in measured:
        if not one.model.untouched or len(chosen) == 1:
            _name_doubtful(console, one)
            _show_worst(console, one, worst_rows)
    if kept := dict.fromkeys(one.model.name for one in measured if one.record["cached"]):
        console.print(f"cached, from an earlier evaluation: {', '.join(kept)}", soft_wrap=True)
    for one in measured:
        console.print(f"predictions: {one.record['predictions']}", soft_wrap=True)
    return ExitStatus.OK


def _test_sets(profile: Profile | None, chosen: Sequence[Candidate]) -> list[Path]:
    if profile and profile.test:
        return [profile.test]
    found = [Path(model.origin.test) for model in chosen if model.origin and model.origin.test]
    if not found:
        what = "nothing to evaluate on"
        raise ConfigError(what, remedy="Name a manifest with --data, or a profile that has a test set.")
    return found


def _manifests(console: Console, data: Sequence[Path], reading: Reading) -> list[Manifest]:
    store = PROJECT / STORE
    manifests = [
        check_manifest(path, MAX_DURATION_S, store, reading=reading, kind="test") for path in dict.fromkeys(data)
    ]
    for manifest in manifests:
        check_usable(manifest)
        for note in manifest.notes:
            console.print(note, soft_wrap=True)
        if manifest.problems:
            console.print(f"{manifest.path}: {described(manifest.problems)}", soft_wrap=True)
    return manifests


def _make_folders(
    chosen: Sequence[Candidate], manifests: Sequence[Manifest], out: Path | None, other_way: str
) -> dict[tuple[Candidate, Path], Path]:
    """The folder for the predictions of each model on each manifest, made before hours are spent on them.

    other_way: of decoding, at the end of the folders' names, since the predictions of the usual way stay.
    """
    names = labels([manifest.path for manifest in manifests])
    folders = {(model, path): model.predictions_folder(out, path, names[path]) for model in chosen for path in names}
    folders = {which: folder.with_name(folder.name + other_way) for which, folder in folders.items()}
    for folder in folders.values():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}", remedy=ELSEWHERE) from None
    return folders


def _results(
    console: Console,
    chosen: Candidate,
    manifests: Sequence[Manifest],
    asked: dict[str, str],
    batch_size: int,
    audio_context: str,
    temperatures: tuple[float, ...],
) -> Iterator[tuple[Manifest, Evaluation]]:
    """asked: language and task; where they are empty, those of the run that made the model."""
    origin, device, loaded = chosen.origin, devices.choose(), None
    decoding = Decoding(
        device=device.type,
        language=asked["language"] or (origin.language if origin else "") or None,
        task=asked["task"] or (origin.task if origin else None),
        audio_context=audio_context,
        temperatures=temperatures,
    )
    texts = TextCache(FactStore(PROJECT / STORE / CACHE))
    with progress(console) as bar:
        for manifest in manifests:
            key = texts.key(chosen.path, manifest.samples, decoding)
            if (result := texts.read(key, manifest.samples)) is None:
                model, processor = loaded = loaded or load_model(chosen.path)
                shown = bar.add_task(f"{chosen.name[-30:]} {manifest.path.name}", total=len(manifest.samples))
                result = evaluate_model(
                    model.to(device),
                    processor,
                    manifest.samples,
                    language=decoding.language,
                    task=decoding.task,
                    audio_context=audio_context,
                    temperatures=temperatures,
                    batch_size=batch_size,
                    progress=lambda done, total, shown=shown: bar.update(shown, completed=done),
                )
                texts.write(key, result)
            yield manifest, result


def _measured(
    console: Console, model: Candidate, manifest: Manifest, result: Evaluation, folder: Path, audio_context: str
) -> Measured:
    """Its predictions are written."""
    for problem in result.problems:
        console.print(f"{manifest.path.name}: skipped: {problem}", soft_wrap=True)
    try:
        path = write_predictions(folder / PREDICTIONS, result.rows)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}", remedy=ELSEWHERE) from None
    record = {
        "model": model.path,
        "base": model.untouched,
        "data": str(manifest.path),
        "audio_context": audio_context,
        **summary(result),
        "wer_interval": _rounded(wer_interval(counts(result.rows))),
        "speed": round(result.speed, 2),
        "cached": result.cached,
        "flags": dict(Counter(flag for prediction in result.rows for flag in prediction.flags)),
        "skipped": len(manifest.problems) + len(result.problems),
        "predictions": str(path),
    }
    return Measured(model=model, manifest=manifest, predictions=result.rows, record=record)


def _differences(measured: Sequence[Measured]) -> list[str]:
    """Each model against the first one on the same test set, in words; also put into the records."""
    lines, first = [], {}
    for one in measured:
        reference = first.setdefault(one.manifest.path, one)
        if one is reference or _ids(one) != _ids(reference):  # a clip that only one of them could read
            continue
        if found := wer_difference(counts(one.predictions), counts(reference.predictions)):
            one.record["against"] = {"model": reference.model.path, "p": round(found.p, 4)}
            one.record["against"] |= {name: round(getattr(found, name), 2) for name in ("points", "low", "high")}
            lines.append(f"{one.model.name} on {one.manifest.path.name}: WER {found}, against {reference.model.name}")
    return lines


def _ids(one: Measured) -> list[str]:
    return [row.sample.id for row in one.predictions]


def _rounded(interval: Interval | None) -> list[float] | None:
    return [round(interval.low, 2), round(interval.high, 2)] if interval else None


def _table(manifests: Sequence[Manifest], measured: Sequence[Measured], way: str) -> Table:
    """A section for each test set."""
    explained = (
        "per cent; WER and CER after Whisper's text normaliser, WER with its interval of 95 %; greedy: before a text "
        "that repeats itself or is improbable was decoded again; loops: clips in whose text a phrase repeats itself"
    )
    caption = f"{explained}; {way}"
    table = Table(header_style="bold", caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", overflow="fold")
    for column in (*FIGURES.values(), "loops"):
        table.add_column(column, justify="right", no_wrap=True)
    for manifest in manifests:
        seconds = sum(sample.duration_s for sample in manifest.samples)
        if len(manifests) == 1:
            table.title = f"{manifest.path}: {len(manifest.samples)} clips, {duration(seconds)}"
        else:
            table.add_section()
            table.add_row(f"{manifest.path}, {duration(seconds)}", style="bold")
        for one in measured:
            if one.manifest is manifest:
                rates = [f"{one.record[key]:.1f}" for key in FIGURES]
                if between := one.record["wer_interval"]:
                    rates[0] += f"\n{between[0]:.1f}-{between[1]:.1f}"
                table.add_row(one.model.name, *rates, str(one.record["loops"]))
    return table


def _name_doubtful(console: Console, measured: Measured) -> None:
    again = [row for row in measured.predictions if row.was_in_doubt]
    found = {"in doubt, so decoded again, or left empty as silence": again}
    found |= {what: [row for row in measured.predictions if flag in row.flags] for flag, what in KINDS.items()}
    for what, rows in found.items():
        if rows:
            names = ", ".join(row.sample.id for row in rows[:NAMED])
            more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
            console.print(f"{measured.model.name}: {what}: {names}{more}", soft_wrap=True)


def _show_worst(console: Console, measured: Measured, count: int) -> None:
    found = worst(measured.predictions, count)
    if found:
        console.print(f"\nthe worst of {measured.manifest.path.name} by {measured.model.path}:", soft_wrap=True)
    for prediction in found:
        rates, flags = prediction.rates, " ".join(prediction.flags)
        errors = f"{rates.substitutions} S, {rates.deletions} D, {rates.insertions} I"
        head = f"{prediction.sample.id}: WER {100 * rates.wer:.1f}: {errors}  {flags}".rstrip()
        for line in (head, *side_by_side(*prediction.normalized, width=console.width)):
            console.print(line, soft_wrap=True)
