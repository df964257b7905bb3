"""What was measured of a run's models: error rates of each test set, of each speaker, and the worst clips.

Also a model card, `README.md` with a header that the Hugging Face hub reads.
"""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from distributed.run_dir.events import UNNAMED
from distributed.run_dir.summary import KEPT, RUNNING, RunSummary
from multimac.view.models import file_name, slug
from whisper_tuner.data.formats.layouts import part_of
from whisper_tuner.data.formats.lists import SUFFIXES
from whisper_tuner.data.formats.rows import LANGUAGE_COLUMNS, SPEAKER_COLUMNS, BadRow, ClipIds, cell
from whisper_tuner.data.splitting import LOOKS_BETTER
from whisper_tuner.errors import DataError
from whisper_tuner.eval.predictions import PREDICTIONS
from whisper_tuner.eval.terms import TERMS, read_counts, told_unsaid
from whisper_tuner.eval.wer import Difference, Interval, wer_difference, wer_interval
from whisper_tuner.files import read_table
from whisper_tuner.text import counted, wer_told

from .asked import listed_clips

SPEAKERS_SHOWN = 40
TERMS_SHOWN = 40
BASE, FINAL = "base", "final"
CROPPED = "-cropped"  # ends a folder of `evaluate --audio-context cropped`
FEW_CLIPS = 30
METHODS = {"lora": "LoRA, merged", "full": "all weights"}


@dataclass(frozen=True, kw_only=True)
class Clip:
    """A row of predictions.csv, with what its manifest says besides. normalized: (reference, hypothesis)."""

    id: str
    audio: Path
    reference: str
    hypothesis: str
    normalized: tuple[str, str]
    wer: float
    errors: int
    duration_s: float
    flags: tuple[str, ...] = ()
    normalizer: str = UNNAMED
    speaker: str = ""
    language: str = ""

    @property
    def counts(self) -> tuple[int, int]:
        return self.errors, len(self.normalized[0].split())


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The error rate of a model, in per cent. interval: of 95 %, None where the single clips are not known."""

    name: str
    wer: float
    interval: Interval | None = None
    clips: int = 0


@dataclass(frozen=True, kw_only=True)
class SpeakerRates:
    name: str
    clips: int
    before: Rates | None
    after: Rates | None
    difference: Difference | None


@dataclass(frozen=True, kw_only=True)
class TermRow:
    """A term of Profile.terms: how often it was written where it was said, before and after training."""

    term: str
    in_training: int
    said: int
    before: int
    after: int
    instead: str


@dataclass(frozen=True, kw_only=True)
class Test:
    """One test set. `difference` is of the model after training from the one before."""

    name: str
    rates: tuple[Rates, ...]
    clips: int = 0
    hours: float = 0.0
    difference: Difference | None = None
    change: str = ""  # the same in words
    not_compared: str = ""
    speakers: tuple[SpeakerRates, ...] = ()
    speakers_left_out: int = 0
    terms: tuple[TermRow, ...] = ()
    terms_left_out: int = 0
    terms_told: str = ""
    worst: tuple[Clip, ...] = ()
    worst_of: str = ""
    wrong_clips: int = 0
    source: str = ""  # the file with all clips, in the run's folder
    measured: float = 0.0  # when that was written
    normalizer: str = UNNAMED
    cropped: bool = False

    @property
    def is_small(self) -> bool:
        return 0 < self.clips < FEW_CLIPS


NAMES = {BASE: "before training", FINAL: "after training"}


def tests_of(run: RunSummary, worst_clips: int) -> list[Test]:
    """Return the test sets, the run's own first. worst_clips: for all of them together, shared out evenly."""
    folders = sorted({path.parent.parent for path in (run.path / "evaluation").glob(f"*/*/{PREDICTIONS}")})
    own = Path(run.test).stem if run.test else ""
    folders.sort(key=lambda folder: folder.name != own)
    found = []
    for folder in folders:
        for cropped in (False, True):
            models: dict[str, list[Clip]] = {}
            for path in sorted(folder.glob(f"*/{PREDICTIONS}")):
                name = path.parent.name
                own_name = name.removesuffix(CROPPED)
                is_other_way = own_name.startswith((f"{BASE}-", f"{FINAL}-"))  # greedy, or as another language
                if name.endswith(CROPPED) == cropped and not is_other_way and (clips := read_predictions(path)):
                    models[own_name] = clips
            if run.state == RUNNING and run.wer_after is None:  # measured before a resume: of an earlier model
                models.pop(FINAL, None)
            if models:  # the untouched one first
                models = dict(sorted(models.items(), key=lambda item: (item[0] != BASE, item[0] != FINAL, item[0])))
                found.append((folder, models, cropped))
    each = max(1, worst_clips // len(found)) if found else 0
    tests = [_test(run, *one, each) for one in found]
    known = {NAMES[BASE]: run.wer_before, NAMES[FINAL]: run.wer_after}
    rates = tuple(Rates(name=name, wer=wer) for name, wer in known.items() if wer is not None)
    if rates and not any(folder.name == own for folder in folders):  # its predictions are gone: events tell the rates
        change = ""
        if run.wer_before is not None and run.wer_after is not None:
            change = wer_told(run.wer_before, run.wer_after, run.wer_difference, run.clips_tested).partition(": ")[2]
        own_test = Test(name=Path(run.test).name, rates=rates, change=change, normalizer=", ".join(run.normalizers))
        tests.insert(0, own_test)
    return tests


def read_predictions(path: Path) -> list[Clip]:
    """Read what a model wrote for each clip. Damaged rows are left out; of a file that cannot be read, all."""
    clips = []
    with contextlib.suppress(OSError, UnicodeDecodeError, csv.Error), path.open(encoding="utf-8", newline="") as file:
        for row in read_table(file):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                clip = Clip(
                    id=row["id"],
                    audio=Path(row["audio"]),
                    reference=row["reference"],
                    hypothesis=row["hypothesis"],
                    normalized=(row["reference_normalized"], row["hypothesis_normalized"]),
                    wer=100 * float(row["wer"]),
                    errors=sum(int(row[name]) for name in ("substitutions", "deletions", "insertions")),
                    duration_s=float(row["duration_s"]),
                    flags=tuple((row["flags"] or "").split()),
                    normalizer=row.get("normalizer") or UNNAMED,
                )
                clips.append(clip)
    return clips


def _test(run: RunSummary, folder: Path, models: dict[str, list[Clip]], cropped: bool, worst_clips: int) -> Test:
    shown = FINAL if FINAL in models else next((name for name in reversed(models) if name != BASE), BASE)
    clips = models[shown]
    if run.test and Path(run.test).stem == folder.name:
        manifest: Path | None = Path(run.test)
    else:  # a list of that name in a folder that a clip lies in: most manifests name their audio from there
        lists = (above / f"{folder.name}{suffix}" for above in clips[0].audio.parents for suffix in SUFFIXES)
        manifest = next((path for path in lists if path.is_file()), None)
    told = _told_by(manifest) if manifest else {}

    def completed(clip: Clip) -> Clip:
        speaker, language = told.get(clip.id, ("", ""))
        return replace(clip, speaker=speaker, language=language)

    models = {name: [*map(completed, of_model)] for name, of_model in models.items()}
    clips = models[shown]
    before, after = models.get(BASE), models.get(FINAL)
    difference, not_compared, change = None, "", ""
    if before and after:
        if difference := _difference(after, before):
            rates = _rates(BASE, before).wer, _rates(FINAL, after).wer
            change = wer_told(*rates, (difference.low, difference.high), difference.clips).partition(": ")[2]
        not_compared = "" if difference else "The two models were measured on different clips."
    speakers = _speakers(before or [], after or [])
    terms = [] if cropped else _terms(folder)
    wrong = sorted((c for c in clips if c.errors), key=lambda clip: (-clip.wer, -clip.errors, clip.id))
    label = _label(folder.name, clips)
    name = manifest.name if manifest else label
    if folder.name.startswith(KEPT):
        name = unquote(folder.name.removeprefix(KEPT))
    kept_in = label if label == folder.name else f"…{label}"
    source = f"evaluation/{kept_in}/{shown}{CROPPED if cropped else ''}/{PREDICTIONS}"
    return Test(
        name=name,
        rates=tuple(_rates(NAMES.get(name, name), of_model) for name, of_model in models.items()),
        clips=len(clips),
        hours=sum(clip.duration_s for clip in clips) / 3600,
        difference=difference,
        change=change,
        not_compared=not_compared,
        speakers=tuple(speakers[:SPEAKERS_SHOWN]),
        speakers_left_out=len(speakers[SPEAKERS_SHOWN:]),
        terms=tuple(terms[:TERMS_SHOWN]),
        terms_left_out=len(terms[TERMS_SHOWN:]),
        terms_told="" if cropped else _told_of_terms(terms, folder),
        worst=tuple(wrong[:worst_clips]),
        worst_of=NAMES.get(shown, shown),
        wrong_clips=len(wrong),
        source=source,
        measured=(folder / f"{shown}{CROPPED if cropped else ''}" / PREDICTIONS).stat().st_mtime,
        cropped=cropped,
        normalizer=", ".join(dict.fromkeys(clip.normalizer for of_model in models.values() for clip in of_model)),
    )


def _rates(name: str, clips: Sequence[Clip]) -> Rates:
    counts = [clip.counts for clip in clips]
    words = sum(words for _, words in counts)
    wer = 100 * sum(errors for errors, _ in counts) / max(1, words)
    return Rates(name=name, wer=wer, interval=wer_interval(counts), clips=len(clips))


def _difference(after: Sequence[Clip], before: Sequence[Clip]) -> Difference | None:
    """Compare two models; None if they are of different clips."""
    if [clip.id for clip in after] != [clip.id for clip in before]:
        return None
    try:
        return wer_difference([clip.counts for clip in after], [clip.counts for clip in before])
    except ValueError:  # the manifest was changed between them
        return None


def _speakers(before: Sequence[Clip], after: Sequence[Clip]) -> list[SpeakerRates]:
    """Return the speakers with the highest rates first; none where the manifest names no speakers."""
    names = dict.fromkeys(clip.speaker for clip in (after or before))
    if not any(names):
        return []
    found = []
    for name in names:
        own_before, own_after = ([clip for clip in clips if clip.speaker == name] for clips in (before, after))
        rates = [_rates(name, clips) if clips else None for clips in (own_before, own_after)]
        difference = _difference(own_after, own_before) if own_before and own_after else None
        clips = len(own_after or own_before)
        found.append(SpeakerRates(name=name, clips=clips, before=rates[0], after=rates[1], difference=difference))
    return sorted(found, key=lambda speaker: -shown.wer if (shown := speaker.after or speaker.before) else 0.0)


def _terms(folder: Path) -> list[TermRow]:
    """Return the terms that were said in a test set, those first that are missed most often after training."""
    before = {one.term: one.found for one in read_counts(folder / BASE / TERMS)}
    rows = [
        TermRow(
            term=one.term,
            in_training=one.in_training,
            said=one.said,
            before=before[one.term],
            after=one.found,
            instead=one.instead,
        )
        for one in read_counts(folder / FINAL / TERMS)
        if one.said and one.term in before
    ]
    return sorted(rows, key=lambda row: (row.after - row.said, row.term))


def _told_of_terms(rows: Sequence[TermRow], folder: Path) -> str:
    unsaid = told_unsaid([one.term for one in read_counts(folder / FINAL / TERMS) if not one.said])
    if not rows:
        return unsaid
    said, before, after = (sum(getattr(row, name) for row in rows) for name in ("said", "before", "after"))
    told = f"Of {said} that were said, {before} were written before training, and {after} after it."
    return f"{told} {unsaid}".rstrip()


def _told_by(manifest: Path) -> dict[str, tuple[str, str]]:
    """Return speaker and language by a clip's id."""
    found = {}
    with contextlib.suppress(DataError, OSError):
        part, ids = part_of(manifest, kind="test"), ClipIds()
        for row in part.rows():
            with contextlib.suppress(BadRow):
                if isinstance(cells := row.cells, dict):
                    own_id = ids.of(row, cells, cell(cells, part.reading.audio_names))
                    found[own_id] = cell(cells, SPEAKER_COLUMNS), cell(cells, LANGUAGE_COLUMNS)
    return found


def _label(name: str, clips: Sequence[Clip]) -> str:
    """Return the name of a test set's folder, which may be the manifest's whole path, without the folders in it."""
    for folder in clips[0].audio.parents if clips else ():
        prefix = slug("-".join(folder.parts[1:]), "")
        if prefix and name.startswith(f"{prefix}-"):
            return name.removeprefix(f"{prefix}-")
    return name


def card(run: RunSummary | None, *, language: str | None, runtime: str, precision: str, usage: str) -> str:
    """Describe a model, and the run that made it if that is known."""
    lines = ["---", "pipeline_tag: automatic-speech-recognition", "tags: [whisper]"]
    if language:
        lines.append(f"language: {json.dumps(language)}")
    if run and run.base_model and run.base_model == file_name(run.base_model):
        lines.append(f"base_model: {json.dumps(run.base_model, ensure_ascii=False)}")
    title = (run.name or run.id) if run else "Whisper, fine-tuned"
    lines += ["---", "", f"# {title}", ""]
    lines += [f"A fine-tuned Whisper model for {runtime}, weights in {precision}.", ""]
    lines += _about_run(run) if run else []
    return "\n".join([*lines, "## Use", "", usage]).rstrip() + "\n"


def _about_run(run: RunSummary) -> list[str]:
    """Tell in a table what is known of a run."""
    clips, hours, _ = listed_clips(run.path / "train.csv") or (0, 0.0, "")
    tested = run.path / "evaluation" / Path(run.test).stem
    before, after = (read_predictions(tested / name / PREDICTIONS) if run.test else [] for name in ("base", "final"))
    told = {
        "trained from": f"`{file_name(run.base_model)}`" if run.base_model else "",
        "method": METHODS.get(run.method, run.method),
        "training data": f"{counted(clips, 'clip')}, {hours:.2f} hours" if clips else "",
        "training": "" if run.state == RUNNING else _trained(run),  # the model is that of an earlier stop
        "WER of the base model": _told(run.wer_before, before) if run.test else "",
        "WER of this model": _told(run.wer_after, after) if run.test else "",
        "difference": wer_told(run.wer_before, run.wer_after, run.wer_difference, run.clips_tested).partition(": ")[2],
        "but": "; ".join(problem for problem in run.problems if LOOKS_BETTER in problem),
        **{f"WER on {kept.name}": kept.told for kept in run.kept},
        "terms": run.terms,
    }
    rows = [f"| {name} | {value} |" for name, value in told.items() if value]
    lines = ["| | |", "|---|---|", *rows, ""] if rows else []
    if told["WER of this model"]:
        normalizer = ", ".join(run.normalizers) or UNNAMED
        where = f"on {counted(len(after), 'test clip')}" if after else "on the run's test clips"
        lines += [
            f"WER is the word error rate in per cent {where}, after {normalizer}, with its interval of "
            "95 %. It was measured before the export, with transformers.",
            "",
        ]
    return lines


def _trained(run: RunSummary) -> str:
    return f"{counted(run.steps, 'step')} on {counted(len(set(run.hosts)) or 1, 'host')}" if run.steps else ""


def _told(wer: float | None, clips: Sequence[Clip]) -> str:
    if wer is None:
        return ""
    return f"{wer:.1f} ({wer_interval([clip.counts for clip in clips])})" if clips else f"{wer:.1f}"
