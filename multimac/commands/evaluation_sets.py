"""What `multimac evaluate` measures on, and where it writes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from distributed.hosts.paths import PROJECT, STORE
from distributed.plan.job import Job, OtherSet
from distributed.plan.launch import Launch
from distributed.run_dir.summary import read_run
from multimac.view.error_rates import Candidate, labels
from multimac.view.terminal import Console
from whisper_tuner.data.check import check_manifest, check_usable, described
from whisper_tuner.data.dataset import MAX_DURATION_S, Manifest
from whisper_tuner.data.formats.rows import Reading
from whisper_tuner.errors import ConfigError, RunError
from whisper_tuner.files import check_writable


def manifests_of(
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


def _keeps(chosen: Sequence[Candidate]) -> list[OtherSet]:
    """Return the sets that the models' runs were to keep (Profile.keeps)."""
    found: dict[Path, OtherSet] = {}
    for run in dict.fromkeys(model.origin.path for model in chosen if model.origin):
        with contextlib.suppress(RunError):  # without a run.json, as where its master is gone
            found |= {kept.clips: kept for kept in Launch.load(run).keeps}
    return [*found.values()]


def lacking(console: Console, chosen: Sequence[Candidate], manifests: Sequence[Manifest]) -> set[Path]:
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


def folders_of(
    chosen: Sequence[Candidate],
    manifests: Sequence[Manifest],
    out: Path | None,
    other_way: str,
    asked: tuple[str, str],
    keeps: Mapping[Path, OtherSet],
    fewer: Collection[Path],
) -> dict[tuple[Candidate, Path], Path]:
    """Return the folders for the predictions of each model on each manifest. Raises ConfigError.

    other_way: the end of their names, where it is not the usual way to decode, whose predictions stay. asked: language
    and task; other ones than a model's run has are another way, too. fewer: the runs' own test sets with fewer clips
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
            others += "-fewer" if path in fewer else ""  # what the run has measured stays
            folders[model, path] = folder.with_name(folder.name + other_way + others)
    for folder in folders.values():
        check_writable(folder)
    return folders


def terms_of(console: Console, given: Path | None, chosen: Sequence[Candidate]) -> tuple[str, ...]:
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
