"""`multimac data check`: what spoils training, found before it does; `--fix` writes manifests without it."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from distributed.hosts.keep_awake import awake
from distributed.hosts.paths import PROJECT, STORE
from distributed.plan.hosts_file import load_hosts
from distributed.plan.job import resolve
from distributed.ssh.host import Host
from multimac.commands.cut_long import cut_long, told_of
from multimac.commands.runs import folders_of
from multimac.report import findings as report
from multimac.view.findings import about_parts, by_kind, show, total
from multimac.view.models import model_named
from multimac.view.progress import progress, working
from multimac.view.terminal import Console
from whisper_tuner.config import ConfigFile, Profile
from whisper_tuner.data.checks import fix, gather, table
from whisper_tuner.data.checks.finding import Finding, Severity, of_row
from whisper_tuner.data.checks.material import PARTS, TRAIN, Heard, Material, Row
from whisper_tuner.data.checks.rows import CONTRADICTED, USELESS, contradiction, usual_cer
from whisper_tuner.data.dataset import MAX_DURATION_S
from whisper_tuner.data.formats.rows import AS_IT_IS, Reading
from whisper_tuner.data.labels import token_limit
from whisper_tuner.errors import ConfigError, DataError, ExitStatus, TunerError
from whisper_tuner.fact_store import CACHE, FactStore
from whisper_tuner.hub import is_adapter
from whisper_tuner.languages import language_code, text_language
from whisper_tuner.paths import expanded, shown

CHECKS = "checks"  # the folder of reports below the store
MOST_LISTED = 30  # contradicted clips in the report
LIKE_A_FILE = re.compile(r"[/\\]|\.\w+$")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to check. base_model: whose tokenizer and decoder the texts are for, '' if there is none."""

    name: str
    manifests: Mapping[str, Path]
    language: str = ""
    task: str = "transcribe"
    base_model: str = ""
    max_duration_s: float = MAX_DURATION_S
    no_speech: bool = False
    reading: Reading = AS_IT_IS


@awake()
def data_check(
    config: Path,
    what: Sequence[str],
    *,
    settings: Sequence[str] = (),
    language: str = "",
    model: str = "",
    hosts: Path | None = None,
    fix_into: Path | None = None,
    out: Path | None = None,
    as_json: bool = False,
) -> ExitStatus:
    """Status DATA if there is an error that is not fixed."""
    console = Console(highlight=False, markup=False, stderr=as_json)
    if hosts and not model:
        raise ConfigError("--hosts: there is nothing for hosts to do", remedy="Name a model to be heard: --model MODEL")
    helping = load_hosts(hosts).workers if hosts else ()
    asked = _asked(config, what, settings, language)
    if fix_into:
        fix.check_target(expanded(fix_into), asked.manifests.values())
    corrections = fix.read_corrections(expanded(fix_into)) if fix_into else fix.Corrections()
    model = model_named(model, lambda: folders_of(config, None)) if model else ""
    material, notes = _material(console, asked, model)
    load = cache(lambda: _loaded(model))
    if model:
        material = replace(material, heard=_heard(console, asked, material, model, load, helping))
        if (usual := usual_cer(material)) > USELESS:
            what = f"The model does not know this speech well (the median CER is {100 * usual:.0f} %)"
            notes.append(f"{what}: where it hears something else is listed in the report, and counts as no finding.")
    long, cuts = _long(asked, material), {}
    if model and fix_into and long:
        about = {"longest_s": asked.max_duration_s, "language": asked.language, "task": asked.task}
        into = expanded(fix_into)
        about |= {"store": PROJECT / STORE, "model": model, "load": load}
        cuts = cut_long(console, long, material, into, corrections, **about)
        notes += told_of(long, cuts)
    found = table.findings(material)
    folder = out or PROJECT / STORE / CHECKS / asked.name
    page = report.write(folder, asked.name, material.manifests, by_kind(found), _most_contradicted(material), notes)
    if not as_json:
        _print(console, material, found, notes)
    written = {}
    if fix_into:
        result = fix.fixed(material, found, corrections, long, cuts)
        written = _write(console, result, expanded(fix_into), corrections)
    console.print(f"report: {shown(page.absolute())}", soft_wrap=True)
    if as_json:
        print(json.dumps(_record(material, found, notes, page, written), indent=1))
    has_errors = any(one.kind.severity == Severity.ERROR for one in found)
    return ExitStatus.DATA if has_errors and not fix_into else ExitStatus.OK


def _asked(config: Path, what: Sequence[str], settings: Sequence[str], language: str) -> Asked:
    """Raises ConfigError, DataError."""
    paths = [expanded(name) for name in what]
    if missing := [name for name, path in zip(what, paths, strict=True) if not path.is_file()]:
        if len(what) > 1 or LIKE_A_FILE.search(what[0]):
            raise DataError(f"no such manifest: {missing[0]}", remedy="Name manifests, or one profile of config.ini.")
        if paths[0].is_dir() and not ConfigFile(config).has("profile", what[0]):
            remedy = f"Run: multimac data import {shlex.quote(what[0])} --out NAME; then check NAME/train.csv."
            raise DataError(f"{what[0]} is a folder, not a manifest or a profile", remedy=remedy)
        profile = resolve(ConfigFile(config), what[0], strategy="allreduce", settings=settings).profile
        return _of_profile(what[0], profile, language)
    if settings:
        raise ConfigError("--set changes a profile, not manifests", remedy="Name a profile, or use --language.")
    manifests = gather.parts_of(paths)
    folder, stem = paths[0].absolute().with_suffix("").parts[-2:]
    name = f"{folder}-{stem}" if len(paths) == 1 else folder
    slug = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "manifest"
    return Asked(name=slug, manifests=manifests, language=language_code(language) if language else "")


def _of_profile(name: str, profile: Profile, language: str) -> Asked:
    spoken = language or profile.language
    return Asked(
        name=name,
        manifests={part: path for part in PARTS if (path := getattr(profile, part))},
        language=language_code(spoken) if spoken else "",
        task=profile.task,
        base_model=profile.base_model,
        max_duration_s=profile.max_duration_s,
        no_speech=profile.no_speech == "train",
        reading=Reading.of(profile),
    )


def _material(console: Console, asked: Asked, model: str) -> tuple[Material, list[str]]:
    """What is checked, and which checks could not be made."""
    store, manifests = PROJECT / STORE, {}
    for part, path in asked.manifests.items():
        with working(console, f"reading {shown(path)}"):
            about = {"max_duration_s": asked.max_duration_s, "no_speech": asked.no_speech, "reading": asked.reading}
            manifests[part] = gather.read(path, store, kind=part if part in PARTS else TRAIN, **about)
    written = text_language(asked.language, asked.task) or ""
    material, notes = Material(manifests=manifests, language=written), []
    base = asked.base_model or model
    try:
        with working(console, "loading the tokenizer"):
            if base:
                base = _plain(base)
                limit = token_limit(base, language=asked.language or "en", task=asked.task)
                material = replace(material, limit=limit, read_back=gather.reading_back(base))
    except TunerError as error:
        notes.append(f"Tokens were not counted: {error.args[0]}.")
    if not base:
        notes.append("Tokens were not counted: that needs a profile, or a model (--model).")
    with progress(console) as bar:
        shown_as = bar.add_task("listening to the clips", total=len(material.rows))
        told = lambda done, total: bar.update(shown_as, completed=done, total=total)  # noqa: E731
        return gather.decode(material, store, told), notes


def _plain(model: str) -> str:
    """The base of an adapter, which has no sizes of its own; any other model itself. Raises ModelError."""
    if not is_adapter(model):
        return model
    from whisper_tuner.export.final import base_of

    return str(base_of(expanded(model)))


def _long(asked: Asked, material: Material) -> list[Row]:
    """The rows whose clips are too long."""
    found = []
    for part, manifest in material.manifests.items():
        kind = part if part in PARTS else TRAIN
        some = gather.too_long(manifest, PROJECT / STORE, reading=asked.reading, kind=kind)
        found += [Row(part, manifest.path, sample) for sample in some]
    return found


def _loaded(name: str) -> tuple:
    """Model and processor."""
    from exogym import device as devices
    from whisper_tuner.export.final import load_model

    model, processor = load_model(name)
    return model.to(devices.choose()), processor


def _heard(
    console: Console,
    asked: Asked,
    material: Material,
    name: str,
    load: Callable[[], tuple],
    hosts: Sequence[Host],
) -> dict[tuple[str, int], Heard]:
    """What a model hears in all clips, decoded greedily; texts of an earlier check are taken from the cache."""
    from distributed.launcher.hearing import Listening, hear_together
    from exogym import device as devices
    from multimac.view.transfers import fetch_model
    from whisper_tuner.eval.evaluation import GREEDY, compared, generation_settings
    from whisper_tuner.eval.hearing import heard_in
    from whisper_tuner.eval.text_cache import Decoding, TextCache

    fetch_model(name)
    device, heard, keys, unknown = devices.choose(), {}, {}, {}
    spoken = {"language": asked.language or None, "task": asked.task}
    texts = TextCache(FactStore(PROJECT / STORE / CACHE))
    for part, manifest in material.manifests.items():
        samples = tuple(row.sample for row in material.rows if row.part == part and row.text)
        keys[part] = texts.key(name, samples, Decoding(device=device.type, temperatures=GREEDY, **spoken))
        if (found := texts.read(keys[part], samples)) is None:
            unknown[part] = replace(manifest, samples=samples)
        else:
            heard |= heard_in(part, found)
    if not unknown:
        return heard
    model, processor = load()
    listening = Listening(name=name, model=model, processor=processor, **spoken)
    with progress(console) as bar:
        task = bar.add_task(f"{name[-30:]} hears the clips", total=sum(len(one.samples) for one in unknown.values()))
        told = lambda done, total: bar.update(task, completed=done)  # noqa: E731
        warn = lambda host, what: console.print(f"{host}: {what}", soft_wrap=True)  # noqa: E731
        began = time.perf_counter()
        together = hear_together(listening, unknown, hosts, progress=told, warn=warn)
        seconds = time.perf_counter() - began
    _, written = generation_settings(model, **spoken)
    for part, manifest in unknown.items():
        found = compared(manifest.samples, together.transcripts[part], written, seconds)
        if together.devices <= {device.type}:
            texts.write(keys[part], found)
        heard |= heard_in(part, found)
    if len(together.counts) > 1:
        console.print(f"heard by: {', '.join(f'{name} {count}' for name, count in together.counts.items())} clips")
    return heard


def _most_contradicted(material: Material) -> list[tuple[Finding, str, float]]:
    known = [(row, heard) for row in material.rows if (heard := material.heard.get((row.part, row.sample.line)))]
    wrong = sorted((pair for pair in known if pair[1].cer), key=lambda pair: -contradiction(pair[1]))
    return [(of_row(CONTRADICTED, row, ""), heard.text, heard.cer) for row, heard in wrong[:MOST_LISTED]]


def _print(console: Console, material: Material, found: Sequence[Finding], notes: Sequence[str]) -> None:
    for line in about_parts(material.manifests):
        console.print(line, soft_wrap=True)
    show(console, found)
    for note in notes:
        console.print(note)
    rows = len(material.rows) + sum(len(manifest.problems) for manifest in material.manifests.values())
    console.print(f"{total(found)} in {rows:,} rows", style="bold")


def _write(console: Console, result: fix.Fixed, folder: Path, corrections: fix.Corrections) -> dict[str, Path]:
    written = fix.write(result, folder, corrections)
    for part, path in written.items():
        counts = ", ".join(f"{count} {change}" for change, count in result.counted(part).items()) or "nothing changed"
        console.print(f"{shown(path.absolute())}: {len(result.samples[part]):,} rows ({counts})", soft_wrap=True)
    for note in result.notes:
        console.print(note)
    if result.unknown:
        console.print(f"no row has these ids of {fix.BLACKLIST} or {fix.PATCHES}: {', '.join(result.unknown[:5])}")
    console.print(f"what was done to each row: {shown((folder / fix.CHANGES).absolute())}", soft_wrap=True)
    console.print("To train on it, set in the [dataset:NAME] of config.ini:")
    for part, path in written.items():
        if part in PARTS:
            console.print(f"    {part} = {shown(path.absolute())}", soft_wrap=True)
    return written


def _record(
    material: Material, found: Sequence[Finding], notes: Sequence[str], page: Path, written: Mapping[str, Path]
) -> dict:
    parts = {
        part: {"manifest": str(manifest.path), "rows": len(manifest.samples) + len(manifest.problems)}
        for part, manifest in material.manifests.items()
    }
    counts = {kind.name: sum(one.rows for one in rows) for kind, rows in by_kind(found)}
    return {
        "parts": parts,
        "counts": counts,
        "findings": [report.record(one) for one in found],
        "notes": list(notes),
        "report": str(page),
        "fixed": {part: str(path) for part, path in written.items()},
    }
