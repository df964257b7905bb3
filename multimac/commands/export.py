"""`multimac export`: a trained model for other runtimes, and whether they write the same with it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from typer import Argument, Option

from distributed.hosts.keep_awake import awake
from distributed.hosts.paths import PROJECT, STORE
from distributed.run_dir.folder import disk_use
from distributed.run_dir.summary import RunSummary, read_run
from multimac.report.measured import card
from multimac.view.models import fetch_model, model_named, origin_of, slug, unfinished
from multimac.view.progress import counting, working
from multimac.view.terminal import Console, fitting
from whisper_tuner.data.check import check_manifest, check_usable
from whisper_tuner.data.dataset import MAX_DURATION_S, Manifest
from whisper_tuner.data.formats.rows import Reading
from whisper_tuner.data.labels import added_words, is_multilingual
from whisper_tuner.errors import ConfigError, ExitStatus, MissingProgram, RunError
from whisper_tuner.eval.predictions import counts
from whisper_tuner.eval.wer import wer_difference, wer_interval
from whisper_tuner.export.formats import Format, Merged, Speech, chosen
from whisper_tuner.files import check_writable, shown
from whisper_tuner.languages import language_code
from whisper_tuner.text import counted, size

from .options import CONFIG, MODEL, Config, Language, command

if TYPE_CHECKING:
    from torch import nn

    from whisper_tuner.eval.evaluation import Evaluation

BEFORE, ROUNDED = "before the export", "in float16"
ADDED_WORDS = "Words were added to the vocabulary. `pipeline` leaves them out: use `generate` and `batch_decode`."


@dataclass(frozen=True, kw_only=True)
class Exported:
    which: Format
    precision: str
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.which.name} {self.precision}"


@command("export")
@awake()
def export(
    model: Annotated[str, Argument(help=MODEL)],
    to: Annotated[list[str], Option("--to", help="transformers, faster-whisper, whisper.cpp, mlx, onnx or openai.")],
    precision: Annotated[
        str,
        Option(help="float32 or float16; int8, q8_0 or q5_0. [default: float16; of transformers and onnx float32]"),
    ] = "",
    out: Annotated[Path | None, Option(help="Folder to write to. [default: RUN/export]")] = None,
    verify: Annotated[bool, Option("--verify", help="Decode test clips with each runtime, and compare.")] = False,
    data: Annotated[Path | None, Option(help="Manifest to verify with. [default: the run's test set]")] = None,
    language: Language = "",
    as_json: Annotated[bool, Option("--json", help="Print only folders and figures, as JSON.")] = False,
    config: Config = CONFIG,
) -> ExitStatus:
    """Write a trained model, adapters merged, in the format of another program."""
    console = Console(stderr=as_json)
    wanted = chosen(to, precision)
    for which, how in wanted:
        which.require(how, running=False)
    language = language_code(language) if language else ""
    path = model_named(model, config)
    origin = origin_of(path)
    if said := unfinished(path):
        console.print(said, style="yellow", markup=False, soft_wrap=True)
    manifest = _manifest(data, origin) if verify else None
    folder = out or (origin.path / "export" if origin else Path("export") / slug(path))
    check_writable(folder)
    fetch_model(path)
    with working(console, "loading the model"):
        from whisper_tuner.eval.exported import speech_of
        from whisper_tuner.export.final import load_model

        loaded, processor = load_model(path)
    merged = Merged(model=loaded.eval(), processor=processor)
    for which, _ in wanted:
        which.check(merged)
    speech = speech_of(merged.model, language or (origin.language if origin else ""), origin.task if origin else "")
    found = [_written(console, which, how, folder, merged, speech, origin) for which, how in wanted]
    runnable, lacking = _divided(found if verify else [])
    verified = _verified(console, runnable, merged, manifest, speech) if manifest and runnable else None
    if as_json:
        print(json.dumps(_as_json(found, verified), indent=2))
    elif verified:
        console.print(fitting(console, _table(verified), folds=True))
    if verified:
        _raise_if_off(verified)
    if lacking:
        raise MissingProgram("\n".join(f"written, but not verified: {error}" for error in lacking))
    return ExitStatus.OK


def _divided(written: Sequence[Exported]) -> tuple[list[Exported], list[MissingProgram]]:
    """Return what can be verified here, and what lacks to verify the others."""
    runnable, lacking = [], []
    for one in written:
        try:
            one.which.require(one.precision, running=True)
            runnable.append(one)
        except MissingProgram as error:
            lacking.append(error)
    return runnable, lacking


def _manifest(data: Path | None, origin: RunSummary | None) -> Manifest:
    """Read the clips to verify with: `data`, else the test set of the run that made the model."""
    path = data or (Path(origin.test) if origin and origin.test else None)
    if path is None:
        raise ConfigError("nothing to verify with", remedy="Name a manifest of test clips with --data.")
    reading = Reading.of(origin.settings if origin and not data else {})
    manifest = check_manifest(path, MAX_DURATION_S, PROJECT / STORE, reading=reading, kind="test")
    check_usable(manifest)
    return manifest


def _written(
    console: Console,
    which: Format,
    precision: str,
    out: Path,
    merged: Merged,
    speech: Speech,
    origin: RunSummary | None,
) -> Exported:
    one = Exported(which=which, precision=precision, folder=out / f"{which.name}-{precision}")
    run = read_run(origin.path) if origin else None  # with its events
    usage = which.usage(one.folder.name, speech, precision, is_multilingual=is_multilingual(merged.model))
    if added_words(merged.processor.tokenizer):
        usage += f"\n{ADDED_WORDS}\n"
        console.print(ADDED_WORDS, soft_wrap=True)
    readme = card(run, language=speech.language, runtime=which.runtime, precision=precision, usage=usage)
    with working(console, f"writing {one.name}"):
        which.write(merged, one.folder, precision, readme)
    console.print(f"{one.name}: {shown(one.folder.absolute())}, {size(disk_use(one.folder)[0])}", soft_wrap=True)
    return one


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Texts of each runtime for the test clips. alike: transformers' own, by precision of the weights."""

    manifest: Manifest
    alike: dict[str, Evaluation]
    results: list[tuple[Exported, Evaluation]]


def _verified(
    console: Console, exported: Sequence[Exported], merged: Merged, manifest: Manifest, speech: Speech
) -> Verified:
    """Let transformers and each runtime transcribe the clips.

    They do so greedily, since what chance draws where a text is in doubt is another text in each of them.
    """
    from whisper_tuner.eval.evaluation import GREEDY, evaluate
    from whisper_tuner.eval.exported import decoded

    def heard(model: nn.Module, name: str) -> Evaluation:
        with counting(console, name, len(manifest.samples)) as show:
            return evaluate(
                model,
                merged.processor,
                manifest.samples,
                language=speech.language,
                task=speech.task,
                temperatures=GREEDY,
                progress=show,
            )

    alike, results = {"float32": heard(merged.model, "before")}, []
    if any(one.precision == "float16" for one in exported):
        alike["float16"] = heard(copy.deepcopy(merged.model).half().float(), ROUNDED)
    for one in exported:
        with counting(console, one.name, len(manifest.samples)) as show:
            results.append((one, decoded(one.which, one.folder, manifest.samples, speech, show)))
    return Verified(manifest=manifest, alike=alike, results=results)


def _table(verified: Verified) -> Table:
    clips, reference = len(verified.manifest.samples), verified.alike["float32"]
    caption = f"WER after {reference.normalizers[0]}, all decoded greedily, as the runtimes do."
    caption += " `evaluate` decodes again what is in doubt, so its WER may be another one."
    title = f"{verified.manifest.path}: {counted(clips, 'clip')}"
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, caption=caption)
    table.add_column("", overflow="fold")
    for column in ("WER", "95 %", "points\nmore", "95 %", "size", "audio\ns/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_row(BEFORE, *_rates(reference))
    if rounded := verified.alike.get("float16"):
        table.add_row(ROUNDED, *_rates(rounded), *_more(rounded, reference))
    for one, result in verified.results:
        about = [size(disk_use(one.folder)[0]), f"{result.speed:.1f}"]
        table.add_row(one.name, *_rates(result), *_more(result, reference), *about)
    return table


def _as_json(exported: Sequence[Exported], verified: Verified | None) -> dict[str, Any]:
    """Return `exports`; with a verification also `before`, and `before in float16` where the table has it."""
    told: dict[str, dict[str, Any]] = {
        one.name: {"to": one.which.name, "precision": one.precision, "folder": str(one.folder)} for one in exported
    }
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
    """Return WER in per cent, and points more than the reference, with intervals of 95 %."""
    interval = wer_interval(counts(result.rows))
    figures: dict[str, Any] = {"wer": round(100 * result.normalized.wer, 2), "normalizer": result.normalizers[0]}
    figures["wer_interval"] = [interval.low, interval.high] if interval else None
    if reference and (more := wer_difference(counts(result.rows), counts(reference.rows))):
        figures |= {"points_more": round(more.points, 2), "points_interval": [round(more.low, 2), round(more.high, 2)]}
    return figures


def _raise_if_off(verified: Verified) -> None:
    """Each runtime must write what transformers writes with weights of the same precision. Raises RunError."""
    from whisper_tuner.eval.exported import LIMIT, is_off

    wrong = []
    for one, result in verified.results:
        alike = verified.alike.get(one.precision)
        off = wer_difference(counts(result.rows), counts(alike.rows)) if alike else None
        if off and is_off(off):
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
