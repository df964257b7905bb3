"""`multimac evaluate`: WER and CER of several models on several test sets, and what each of them wrote."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from distributed.hosts.keep_awake import awake
from distributed.hosts.paths import PROJECT, STORE
from distributed.plan.job import OtherSet, resolve
from distributed.run_dir.summary import read_run
from exogym.config import nearest
from multimac.view.error_rates import (
    LIST,
    Candidate,
    Measured,
    candidates,
    check_models,
    described_set,
    differences,
    key_of_rates,
    name_doubtful,
    rates_table,
    show_worst,
    terms_table,
)
from multimac.view.models import fetch_model, model_named, short_name, unfinished
from multimac.view.progress import counting, working
from multimac.view.run_tables import print_next
from multimac.view.terminal import Console, fitting
from whisper_tuner.config import ConfigFile
from whisper_tuner.data.dataset import Manifest
from whisper_tuner.errors import ConfigError, ExitStatus
from whisper_tuner.eval.predictions import PREDICTIONS, counts, write_predictions
from whisper_tuner.eval.terms import told_unsaid
from whisper_tuner.eval.wer import wer_interval
from whisper_tuner.fact_store import CACHE, FactStore
from whisper_tuner.files import shown, write_shared
from whisper_tuner.languages import language_code, language_name
from whisper_tuner.text import counted

from .evaluation_record import count_terms, record_in_runs, trained_on
from .evaluation_sets import folders_of, lacking, manifests_of, terms_of
from .options import CONFIG, MODEL, Config, command

if TYPE_CHECKING:
    from whisper_tuner.eval.evaluation import Evaluation
    from whisper_tuner.eval.text_cache import Decoding

CAPTIONS = {
    "full": "audio padded to 30 s, as other programs do",
    "cropped": "audio cropped to its own length; other programs pad it to 30 s",
}


@command("evaluate")
@awake()
def evaluate(
    models: Annotated[list[str], Argument(help=MODEL)],
    data: Annotated[list[Path] | None, Option(help="Manifest to evaluate on; may be given several times.")] = None,
    profile: Annotated[str, Option(help="Take test set, language and task from this [profile:NAME].")] = "",
    language: Annotated[
        str,
        Option(help="Language of the speech: multilingual models are told it, texts are compared by its rules."),
    ] = "",
    batch_size: Annotated[int, Option(min=1, help="Clips at a time.")] = 8,
    audio_context: Annotated[
        str,
        Option(help="full: pad clips to 30 s, as other programs do; cropped: not, to compare."),
    ] = "full",
    fallback: Annotated[
        bool, Option(help="Decode again what repeats itself or is improbable, as OpenAI's program does.")
    ] = True,
    base: Annotated[bool, Option(help="Also evaluate the untouched base of a trained model.")] = True,
    out: Annotated[Path | None, Option(help="Folder for predictions. [default: the run's, or ./evaluation]")] = None,
    terms: Annotated[
        Path | None, Option(help="Names and terms, one a line: count them. [default: the profile's, or the run's]")
    ] = None,
    worst: Annotated[int, Option(min=0, help="How many of the worst clips to show.")] = 5,
    as_json: Annotated[bool, Option("--json", help="Print only the figures, as JSON.")] = False,
    config: Config = CONFIG,
) -> ExitStatus:
    """Measure WER and CER of models on test sets, and save their transcripts."""
    if audio_context not in CAPTIONS:
        what = f"--audio-context {audio_context}: no such audio context{nearest(audio_context, CAPTIONS)}"
        raise ConfigError(what, remedy=f"Known: {', '.join(CAPTIONS)}.")
    language = language_code(language) if language else ""
    console = Console(stderr=as_json)
    job = resolve(ConfigFile(config), profile, strategy="allreduce") if profile else None
    used = job.profile if job else None
    chosen = candidates([model_named(name, config) for name in models], with_base=base)
    manifests, keeps = manifests_of(console, data, job, chosen)
    listed = terms_of(console, terms or (used.terms if used else None), chosen)
    other_way = ("" if fallback else "-greedy") + ("" if audio_context == "full" else f"-{audio_context}")
    asked = (language or (used.language if used else ""), used.task if used else "")
    fewer = lacking(console, chosen, manifests)
    folders = folders_of(chosen, manifests, out, other_way, asked, keeps, fewer)
    _announce(console, chosen, manifests)
    with working(console, "loading torch") as tell:
        decoding = _decoding(*asked, audio_context, fallback=fallback)
        check_models(chosen, tell)
    results: list[Measured] = []
    ways = {model: _ways(decoding, model, chosen, manifests, keeps) for model in chosen}
    if data and not asked[0]:
        _tell_language(console, ways)
    for model in chosen:
        results += _results(console, model, manifests, ways[model], batch_size, folders)
    results.sort(key=lambda one: manifests.index(one.manifest))
    count_terms(listed, results)
    record_in_runs(results, keeps)
    _show(console, manifests, results, worst, as_json=as_json)
    return ExitStatus.OK


def _announce(console: Console, chosen: Sequence[Candidate], manifests: Sequence[Manifest]) -> None:
    """Say what is evaluated on what, and fetch models that are not here."""
    for manifest in manifests:
        console.print(f"test set: {described_set(manifest)}", soft_wrap=True)
    console.print(f"with {', then '.join(model.name for model in chosen)}", soft_wrap=True)
    for model in chosen:
        fetch_model(model.path)
        if said := unfinished(model.path):
            console.print(said, style="yellow", markup=False, soft_wrap=True)


def _decoding(language: str, task: str, audio_context: str, *, fallback: bool) -> Decoding:
    from exogym import device as devices
    from whisper_tuner.eval.evaluation import FALLBACK, GREEDY
    from whisper_tuner.eval.text_cache import Decoding

    return Decoding(
        device=devices.choose().type,
        language=language,
        task=task,
        audio_context=audio_context,
        temperatures=FALLBACK if fallback else GREEDY,
    )


def _ways(
    asked: Decoding,
    model: Candidate,
    chosen: Sequence[Candidate],
    manifests: Sequence[Manifest],
    keeps: Mapping[Path, OtherSet],
) -> dict[Path, Decoding]:
    """Return how to decode each test set.

    Language and task that nobody asked for are those of the model's run, else of the others' runs if these agree; of a
    set to keep the language is its own.
    """
    runs = [model.origin] if model.origin else [one.origin for one in chosen if one.origin]
    ways = {(run.language, run.task) for run in runs}
    language, task = ways.pop() if len(ways) == 1 else ("", None)
    way = replace(asked, language=asked.language or language or None, task=asked.task or task)
    of_all = {manifest.path: way for manifest in manifests}
    return of_all | {path: replace(way, language=kept.language or None, task=kept.task) for path, kept in keeps.items()}


def _tell_language(console: Console, ways: Mapping[Candidate, Mapping[Path, Decoding]]) -> None:
    """Say by which language texts are compared that nobody has named: a test set may be in another one."""
    codes = {way.language for of_model in ways.values() for way in of_model.values() if way.language}
    if names := " and ".join(map(language_name, sorted(codes))):
        told = f"Texts are compared as {names}, the language of the run. Is the test set in another? Give --language."
        console.print(told, style="yellow", soft_wrap=True)


def _results(
    console: Console,
    chosen: Candidate,
    manifests: Sequence[Manifest],
    ways: Mapping[Path, Decoding],
    batch_size: int,
    folders: dict[tuple[Candidate, Path], Path],
) -> Iterator[Measured]:
    """Measure one model on all test sets. ways: of each to decode it."""
    from exogym import device as devices
    from whisper_tuner.eval.evaluation import evaluate as evaluate_model
    from whisper_tuner.eval.text_cache import TextCache
    from whisper_tuner.export.final import load_model

    texts, loaded = TextCache(FactStore(PROJECT / STORE / CACHE)), None
    for manifest in manifests:
        decoding = ways[manifest.path]
        key = texts.key(chosen.path, manifest.samples, decoding)
        if (result := texts.read(key, manifest.samples)) is None:
            model, processor = loaded = loaded or load_model(chosen.path)
            with counting(console, f"{short_name(chosen.path)} {manifest.path.name}", len(manifest.samples)) as show:
                result = evaluate_model(
                    model.to(devices.choose()),  # type: ignore[arg-type]  # transformers' own type of it is wrong
                    processor,
                    manifest.samples,
                    language=decoding.language,
                    task=decoding.task,
                    audio_context=decoding.audio_context,
                    temperatures=decoding.temperatures,
                    batch_size=batch_size,
                    progress=show,
                )
            texts.write(key, result)
        yield _measured(console, chosen, manifest, result, folders[chosen, manifest.path], decoding.audio_context)


def _measured(
    console: Console, model: Candidate, manifest: Manifest, result: Evaluation, folder: Path, audio_context: str
) -> Measured:
    """Write what the model wrote, and put its figures together."""
    from distributed.launcher.evaluate import summary

    for problem in result.problems:
        console.print(f"{manifest.path.name}: skipped: {problem}", soft_wrap=True)
    path = write_predictions(folder / PREDICTIONS, result.rows)
    write_shared(folder.parent / LIST, f"{manifest.path.resolve()}\n")
    record = {
        "model": model.path,
        "base": model.untouched,
        "data": str(manifest.path),
        "audio_context": audio_context,
        **summary(result),
        "wer_interval": [between.low, between.high] if (between := wer_interval(counts(result.rows))) else None,
        "speed": round(result.speed, 2),
        "cached": result.cached,
        "flags": dict(Counter(flag for prediction in result.rows for flag in prediction.flags)),
        "skipped": len(manifest.problems) + len(result.problems),
        "trained_on": trained_on(model, result),
        "predictions": str(path),
    }
    return Measured(model=model, manifest=manifest, result=result, record=record)


def _show(
    console: Console, manifests: Sequence[Manifest], measured: Sequence[Measured], worst: int, *, as_json: bool
) -> None:
    compared = differences(measured)
    if as_json:
        print(json.dumps([one.record for one in measured], indent=2))
        return
    alone = len({one.model for one in measured}) == 1
    for one in measured:
        if not one.model.untouched or alone:
            name_doubtful(console, one)
            show_worst(console, one, worst)
    console.print(fitting(console, rates_table(manifests, measured)))
    console.print(key_of_rates(measured, CAPTIONS[measured[0].record["audio_context"]]), style="italic")
    for one in measured:
        if count := one.record["trained_on"]:
            what = f"{one.model.name} was trained on {count} of the {counted(one.record['clips'], 'clip')}"
            told = f"{what} of {one.manifest.path.name}: they say nothing about speech that is new to it."
            console.print(told, style="yellow", soft_wrap=True)
    for line in compared:
        console.print(line, soft_wrap=True)
    for manifest in manifests:
        own = [one for one in measured if one.manifest is manifest and "terms" in one.record]
        if own and (table := terms_table(own)).row_count:
            console.print(f"\nterms in {manifest.path.name}, of those said how many are written:")
            console.print(fitting(console, table))
        unsaid = [count["term"] for count in own[0].record["terms"]["counts"] if not count["said"]] if own else []
        if unsaid:
            console.print(told_unsaid(unsaid, f" in {manifest.path.name}"), markup=False, soft_wrap=True)
    if kept := dict.fromkeys(one.model.name for one in measured if one.record["cached"]):
        console.print(f"cached, from an earlier evaluation: {', '.join(kept)}", soft_wrap=True)
    console.print(f"transcripts: {PREDICTIONS} in")
    for one in measured:
        console.print(f"  {shown(Path(one.record['predictions']).absolute().parent)}", soft_wrap=True)
    runs = {one.model.origin.path for one in measured if one.model.origin and not one.model.untouched}
    if len(runs) == 1:
        print_next(console, read_run(runs.pop()))
