"""What `multimac evaluate` adds to the models' records and to the runs that they came from."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distributed.plan.job import OtherSet
from distributed.run_dir.summary import KeptRates, RunSummary, read_run
from multimac.view.error_rates import Candidate, Measured
from whisper_tuner.errors import ConfigError, DataError, RunError
from whisper_tuner.eval.predictions import PREDICTIONS

if TYPE_CHECKING:
    from whisper_tuner.eval.evaluation import Evaluation


def count_terms(terms: Sequence[str], measured: Sequence[Measured]) -> None:
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


def trained_on(model: Candidate, result: Evaluation) -> int:
    """Count the clips that the model's run was trained on: by their paths, as its list has them."""
    if model.untouched or not model.origin:
        return 0
    try:
        with (model.origin.path / "train.csv").open(encoding="utf-8", newline="") as file:
            trained = {Path(row.get("audio_path") or "").resolve() for row in csv.DictReader(file)}
    except (OSError, ValueError, csv.Error):
        return 0
    return sum(one.sample.audio.resolve() in trained for one in result.rows)


def record_in_runs(measured: Sequence[Measured], keeps: Mapping[Path, OtherSet]) -> None:
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
