"""`multimac evaluate`: WER and CER of several models on several test sets, and what each of them wrote."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from distributed.hosts.keep_awake import awake
from distributed.hosts.paths import PROJECT, STORE
from distributed.plan.job import Job, OtherSet, resolve
from distributed.plan.launch import Launch
from distributed.run_dir.summary import KeptRates, RunSummary, read_run
from exogym.config import nearest
from multimac.view.error_rates import (
    Candidate,
    Measured,
    candidates,
    check_models,
    described_set,
    key_of_rates,
    labels,
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
from whisper_tuner.data.check import check_manifest, check_usable, described
from whisper_tuner.data.dataset import MAX_DURATION_S, Manifest
from whisper_tuner.data.formats.rows import Reading
from whisper_tuner.errors import ConfigError, DataError, ExitStatus, RunError
from whisper_tuner.eval.predictions import PREDICTIONS, counts, difference, write_predictions
from whisper_tuner.eval.wer import wer_interval
from whisper_tuner.fact_store import CACHE, FactStore
from whisper_tuner.files import check_writable, shown
from whisper_tuner.languages import language_code
from whisper_tuner.text import counted, wer_told

from .options import CONFIG, MODEL, Config, Language, command

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
    language: Language = "",
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
    manifests, keeps = _manifests(console, data, job, chosen)
    listed = _terms_of(console, terms or (used.terms if used else None), chosen)
    other_way = ("" if fallback else "-greedy") + ("" if audio_context == "full" else f"-{audio_context}")
    asked = (language or (used.language if used else ""), used.task if used else "")
    lacking = _lacking(console, chosen, manifests)
    folders = _folders(chosen, manifests, out, other_way, asked, keeps, lacking)
    _announce(console, chosen, manifests)
    with working(console, "loading torch") as tell:
        from exogym import device as devices
        from whisper_tuner.eval.evaluation import FALLBACK, GREEDY
        from whisper_tuner.eval.text_cache import Decoding

        check_models(chosen, tell)
    decoding = Decoding(
        device=devices.choose().type,
        language=asked[0],
        task=asked[1],
        audio_context=audio_context,
        temperatures=FALLBACK if fallback else GREEDY,
    )
    results: list[Measured] = []
    for model in chosen:
        ways = _ways(decoding, model, chosen, manifests, keeps)
        results += _results(console, model, manifests, ways, batch_size, folders)
    results.sort(key=lambda one: manifests.index(one.manifest))
    _count_terms(listed, results)
    _record_in_runs(results, keeps)
    _show(console, manifests, results, worst, as_json=as_json)
    return ExitStatus.OK


def _keeps(chosen: Sequence[Candidate]) -> list[OtherSet]:
    """Return the sets that the models' runs were to keep (Profile.keeps)."""
    found: dict[Path, OtherSet] = {}
    for run in dict.fromkeys(model.origin.path for model in chosen if model.origin):
        with contextlib.suppress(RunError):  # without a run.json, as where its master is gone
            found |= {kept.clips: kept for kept in Launch.load(run).keeps}
    return [*found.values()]


def _manifests(
    console: Console, data: Sequence[Path] | None, job: Job | None, chosen: Sequence[Candidate]
) -> tuple[list[Manifest], dict[Path, OtherSet]]:
    """Read the named test sets, else the profile's, else those of the runs that made the models.

    Also returns by their paths which of them are sets to keep. A run's and a profile's are read as training reads them.
    """
    origins = [model.origin for model in chosen if model.origin]
    own = vars(job.profile) if job else origins[0].settings if origins and not data else {}
    longest = own.get("max_duration_s")  # anybody may have written a run.json
    read = partial(
        check_manifest,
        max_duration_s=longest if isinstance(longest, float) and not data else MAX_DURATION_S,
        store=PROJECT / STORE,
        no_speech=not data and own.get("no_speech") == "train",
        kind="test",
    )
    others = [] if data else job.keeps if job else _keeps(chosen)
    if not data:
        data = [job.profile.test] if job and job.profile.test else [Path(run.test) for run in origins if run.test]
    manifests = [read(path, reading=Reading.of(own)) for path in dict.fromkeys(data)]
    keeps = {(manifest := read(kept.clips, reading=kept.reading)).path: (kept, manifest) for kept in others}
    manifests += [manifest for path, (_, manifest) in keeps.items() if path not in {each.path for each in manifests}]
    if not manifests:
        what = "nothing to evaluate on"
        raise ConfigError(what, remedy="Name a manifest with --data, or a profile that has a test set.")
    for manifest in manifests:
        check_usable(manifest)
        for note in manifest.notes:
            console.print(note, soft_wrap=True)
        if manifest.problems:
            console.print(f"{manifest.path}: {described(manifest.problems)}", soft_wrap=True)
    return manifests, {path: kept for path, (kept, _) in keeps.items()}


def _lacking(console: Console, chosen: Sequence[Candidate], manifests: Sequence[Manifest]) -> set[Path]:
    """Return the runs' own test sets that have fewer clips now than when the runs measured them."""
    runs = {Path(run.test).resolve(): run.path for model in chosen if (run := model.origin) and run.test}
    had = {test: read_run(path).clips_tested for test, path in runs.items()}
    found = set()
    for manifest in manifests:
        if (count := len(manifest.samples)) < (before := had.get(manifest.path.resolve(), 0)):
            what = f"{manifest.path.name}: {count} of the {before} clips that the run was measured on"
            console.print(f"{what}: its WER stays as it is", style="yellow", soft_wrap=True)
            found.add(manifest.path)
    return found


def _folders(
    chosen: Sequence[Candidate],
    manifests: Sequence[Manifest],
    out: Path | None,
    other_way: str,
    asked: tuple[str, str],
    keeps: Mapping[Path, OtherSet],
    lacking: Collection[Path],
) -> dict[tuple[Candidate, Path], Path]:
    """Return the folders for the predictions of each model on each manifest. Raises ConfigError.

    other_way: the end of their names, where it is not the usual way to decode, whose predictions stay. asked: language
    and task; other ones than a model's run has are another way, too. lacking: the runs' own test sets with fewer clips
    than the runs had.
    """
    names, folders = labels([manifest.path for manifest in manifests]), {}
    names |= {path: kept.folder for path, kept in keeps.items()}
    for model in chosen:
        for path, name in names.items():
            folder = model.predictions_folder(out, path, name)
            own = (model.origin.language, model.origin.task) if model.origin else asked
            changed = () if path in keeps else zip(asked, own, strict=True)  # those have their own language
            others = "".join(f"-{one}" for one, of_run in changed if one and one != of_run)
            others += "-fewer" if path in lacking else ""  # what the run has measured stays
            folders[model, path] = folder.with_name(folder.name + other_way + others)
    for folder in folders.values():
        check_writable(folder)
    return folders


def _announce(console: Console, chosen: Sequence[Candidate], manifests: Sequence[Manifest]) -> None:
    """Say what is evaluated on what, and fetch models that are not here."""
    for manifest in manifests:
        console.print(f"test set: {described_set(manifest)}", soft_wrap=True)
    console.print(f"with {', then '.join(model.name for model in chosen)}", soft_wrap=True)
    for model in chosen:
        fetch_model(model.path)
        if said := unfinished(model.path):
            console.print(said, style="yellow", markup=False, soft_wrap=True)


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
    return of_all | {path: replace(way, language=kept.language or None) for path, kept in keeps.items()}


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
        "trained_on": _trained_on(model, result),
        "predictions": str(path),
    }
    return Measured(model=model, manifest=manifest, result=result, record=record)


def _terms_of(console: Console, given: Path | None, chosen: Sequence[Candidate]) -> tuple[str, ...]:
    """Read the list of terms that was given, else that of the models' runs, if these have one alike."""
    from whisper_tuner.eval.terms import read_terms

    if given:
        return read_terms(given)
    found = {str(model.origin.settings.get("terms") or "") for model in chosen if model.origin}
    if len(found) != 1 or found == {""}:
        return ()
    try:
        return read_terms(Path(found.pop()))
    except ConfigError as error:  # it was there when the run began
        console.print(f"terms are not counted: {error}", style="yellow", soft_wrap=True)
        return ()


def _count_terms(terms: Sequence[str], measured: Sequence[Measured]) -> None:
    """Put what became of each term into the model's record, and beside its predictions if these are no run's."""
    from distributed.launcher.evaluate import texts_of_training
    from whisper_tuner.eval.terms import TERMS, shares, terms_in, write_terms

    for one in measured if terms else ():
        training: list[str] = []
        if one.model.origin:
            with contextlib.suppress(DataError):
                training = texts_of_training(one.model.origin.path)
        counts, _ = terms_in(terms, one.result, training)
        if not one.model.origin:
            write_terms(Path(one.record["predictions"]).with_name(TERMS), counts)
        recall, precision = shares(counts)
        found = [dataclasses.asdict(count) for count in counts]
        one.record["terms"] = {"recall": recall, "precision": precision, "counts": found}


def _trained_on(model: Candidate, result: Evaluation) -> int:
    """Count the clips that the model's run was trained on: by their paths, as its list has them."""
    if model.untouched or not model.origin:
        return 0
    try:
        with (model.origin.path / "train.csv").open(encoding="utf-8", newline="") as file:
            trained = {Path(row.get("audio_path") or "").resolve() for row in csv.DictReader(file)}
    except (OSError, ValueError, csv.Error):
        return 0
    return sum(one.sample.audio.resolve() in trained for one in result.rows)


def _record_in_runs(measured: Sequence[Measured], keeps: Mapping[Path, OtherSet]) -> None:
    """Add what was measured on a run's own sets to its events, from which `runs` shows WER, and renew its report."""
    from distributed.launcher.evaluate import AFTER, NAMES
    from multimac.report.page import contents, write_report

    renewed: dict[Path, bool] = {}
    for one in measured:
        run, kept = one.model.origin, keeps.get(one.manifest.path)
        if not run or one.model.untouched or not (kept or run.test):
            continue
        folder = run.path / "evaluation" / (kept.folder if kept else Path(run.test).stem)
        if Path(one.record["predictions"]) == folder / NAMES[AFTER] / PREDICTIONS:
            with contextlib.suppress(RunError):  # it runs again: at its end it is measured anew
                if _record(one, run, kept, _base_of(one, measured), folder):
                    renewed[run.path] = bool(run.report)
    for path, had_report in renewed.items():
        if had_report:
            with contextlib.suppress(RunError):
                write_report(contents(path))


def _base_of(one: Measured, measured: Sequence[Measured]) -> Evaluation | None:
    """Return what the untouched base of a run wrote on the same test set, if it was measured in the same way."""

    def asked(run: RunSummary | None) -> tuple | None:
        return (run.base_model, run.language, run.task) if run else None

    for other in measured:
        is_base = other.model.untouched and other.manifest is one.manifest
        if is_base and asked(other.model.origin) == asked(one.model.origin):
            return other.result
    return None


def _record(one: Measured, run: RunSummary, kept: OtherSet | None, base: Evaluation | None, folder: Path) -> bool:
    """Tell the run of what is new to it; False if nothing is, or if fewer clips were measured than it has."""
    from distributed.launcher.evaluate import AFTER, BEFORE, record_in_run, summary, terms_event, texts_of_training
    from whisper_tuner.eval.terms import read_terms

    history = read_run(run.path)
    rates = KeptRates(
        name="", before=history.wer_before, after=history.wer_after, clips=history.clips_tested
    )  # of its own test set
    if kept:
        rates = next((each for each in history.kept if each.name == kept.name), KeptRates(name=kept.name))
    if len(one.result.rows) < rates.clips:
        return False
    results = ({BEFORE: base} if base else {}) | {AFTER: one.result}
    known = {BEFORE: rates.before, AFTER: rates.after}
    is_new = any(known[when] != summary(result)["wer"] for when, result in results.items())
    more = []
    if (listed := run.settings.get("terms")) and not kept and base and (is_new or not history.terms):
        with contextlib.suppress(ConfigError, DataError):
            training = texts_of_training(run.path)
            more.append(terms_event(read_terms(Path(str(listed))), results, training, folder))
    if not (is_new or more):
        return False
    record_in_run(run.path, results, kept=kept.name if kept else "", more=more)
    return True


def _show(
    console: Console, manifests: Sequence[Manifest], measured: Sequence[Measured], worst: int, *, as_json: bool
) -> None:
    differences = _differences(measured)
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
    for line in differences:
        console.print(line, soft_wrap=True)
    for manifest in manifests:
        own = [one for one in measured if one.manifest is manifest and "terms" in one.record]
        if own and (table := terms_table(own)).row_count:
            console.print(f"\nterms in {manifest.path.name}, of those said how many are written:")
            console.print(fitting(console, table))
    if kept := dict.fromkeys(one.model.name for one in measured if one.record["cached"]):
        console.print(f"cached, from an earlier evaluation: {', '.join(kept)}", soft_wrap=True)
    console.print(f"transcripts: {PREDICTIONS} in")
    for one in measured:
        console.print(f"  {shown(Path(one.record['predictions']).absolute().parent)}", soft_wrap=True)
    runs = {one.model.origin.path for one in measured if one.model.origin and not one.model.untouched}
    if len(runs) == 1:
        print_next(console, read_run(runs.pop()))


def _differences(measured: Sequence[Measured]) -> list[str]:
    """Compare each model with the first one on the same test set, in words; the figures go into the records."""
    lines: list[str] = []
    first: dict[Path, Measured] = {}
    for one in measured:
        reference = first.setdefault(one.manifest.path, one)
        if one.record["normalizer"] != reference.record["normalizer"]:
            what = f"{one.model.name} and {reference.model.name} are not compared on {one.manifest.path.name}"
            ways = f"{one.record['normalizer']} and {reference.record['normalizer']}"
            lines.append(f"{what}: their texts are normalised in two ways, {ways}. Give all one --language.")
        elif one is not reference and (found := difference(one.predictions, reference.predictions)):
            one.record["against"] = {"model": reference.model.path, "p": round(found.p, 4)}
            one.record["against"] |= {name: round(getattr(found, name), 2) for name in ("points", "low", "high")}
            lines.append(f"{one.model.name} against {reference.model.name}, on {one.manifest.path.name}:")
            trained = f", with {count} clips of its training" if (count := one.record["trained_on"]) else ""
            told = wer_told(reference.record["wer"], one.record["wer"], (found.low, found.high), found.clips)
            lines.append(f"  WER {told}{trained}")
    return lines
