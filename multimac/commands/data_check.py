"""`multimac data check`: what spoils training, found before it does; `--fix` writes manifests without it."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from distributed.hosts.keep_awake import awake
from distributed.hosts.paths import CHECKS, PROJECT, STORE
from distributed.plan.hosts_file import load_hosts
from distributed.plan.job import resolve
from distributed.run_dir.find import find_run
from distributed.run_dir.summary import read_run
from distributed.ssh.host import Host
from multimac.report import findings as report
from multimac.view.findings import by_kind, show
from multimac.view.models import fetch_model, folders_of, model_named, short_name, slug
from multimac.view.progress import counting, working
from multimac.view.terminal import Console
from whisper_tuner.config import ConfigFile
from whisper_tuner.data.audio import quiet_mp3
from whisper_tuner.data.checks import fix, gather, table
from whisper_tuner.data.checks.finding import Finding, Severity, of_row
from whisper_tuner.data.checks.material import PARTS, TRAIN, Heard, Material, Row
from whisper_tuner.data.checks.rows import CONTRADICTED, USELESS, contradiction, usual_cer
from whisper_tuner.data.dataset import MAX_DURATION_S, Manifest
from whisper_tuner.data.formats.lists import SUFFIXES
from whisper_tuner.data.formats.rows import AS_IT_IS, Reading
from whisper_tuner.data.labels import token_limit
from whisper_tuner.errors import ConfigError, DataError, ExitStatus, TunerError
from whisper_tuner.fact_store import CACHE, FactStore
from whisper_tuner.files import check_writable, expanded, like, shown
from whisper_tuner.hub import base_of, is_adapter
from whisper_tuner.languages import language_code, text_language
from whisper_tuner.text import counted

from .cut_long import cut_long, long_clips, told_of
from .options import CONFIG, MODEL, Config, Language, Set, command

MOST_LISTED = 30  # contradicted clips in the report
LIKE_A_FILE = re.compile(r"[/\\]|\.\w+$")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The data to check. base_model: the model whose tokenizer and decoder the texts are for, '' if there is none."""

    name: str
    manifests: Mapping[str, Path]
    language: str = ""
    task: str = "transcribe"
    base_model: str = ""
    max_duration_s: float = MAX_DURATION_S
    no_speech: bool = False
    reading: Reading = AS_IT_IS


@command("data check")
@awake()
def data_check(
    what: Annotated[
        list[str],
        Argument(metavar="PROFILE|MANIFEST...", help="A [profile:NAME], `last` (the newest run's), or manifests."),
    ],
    model: Annotated[str, Option("--model", help=f"Compare texts with what this model writes. {MODEL}")] = "",
    hosts: Annotated[
        Path | None, Option("--hosts", metavar="FILE", help="With --model: hosts that transcribe clips, too.")
    ] = None,
    fix_into: Annotated[
        Path | None, Option("--fix", metavar="NAME", help="Folder for new manifests without what was found.")
    ] = None,
    language: Language = "",
    settings: Set = None,
    out: Annotated[
        Path | None, Option(help="Folder for the report. [default: .multimac/checks/NAME in the program's folder]")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print only what was found, as JSON.")] = False,
    config: Config = CONFIG,
) -> ExitStatus:
    """Find what spoils training: bad audio, wrong texts, leaks between parts; exit status 4 if there are errors."""
    console = Console(stderr=as_json)
    if hosts and not model:
        raise ConfigError("--hosts needs --model", remedy="Name a model that the hosts run, or leave --hosts out.")
    helping = load_hosts(hosts).workers if hosts else ()
    asked = _asked(config, what, settings or (), language)
    into, corrections = fix_into and expanded(fix_into), fix.Corrections()
    if into:
        fix.check_target(into, asked.manifests.values())
        check_writable(into, "Choose another folder with --fix.")
        corrections = fix.read_corrections(into)
    if out:
        check_writable(out)
    model = model_named(model, config) if model else ""
    fetch_model(model)
    with quiet_mp3():
        material, notes = _material(console, asked, model)
    load = cache(lambda: _loaded(model))
    if model:
        material = replace(material, heard=_heard(console, asked, material, model, load, helping))
        notes += _about_model(material)
    long = _long(asked, material)
    cuts: fix.Cuts = {}
    if model and into and long:
        clips = long_clips(
            into, PROJECT / STORE, model, load, asked.max_duration_s, asked.language, asked.task, material.limit
        )
        cuts = cut_long(console, long, material, corrections, clips)
        notes += told_of(long, cuts)
    found = table.findings(material)
    folder = out or PROJECT / STORE / CHECKS / asked.name
    page = report.write(folder, asked.name, material.manifests, by_kind(found), _most_contradicted(material), notes)
    if not as_json:
        show(console, material, found, notes)
    written = _write(console, fix.fixed(material, found, corrections, long, cuts), into, corrections) if into else {}
    console.print(f"report: {shown(page.absolute())}", soft_wrap=True)
    if as_json:
        print(json.dumps(_record(material, found, notes, page, written), indent=1))
    has_errors = any(one.kind.severity == Severity.ERROR for one in found)
    return ExitStatus.DATA if has_errors and not into else ExitStatus.OK


def _asked(config: Path, what: Sequence[str], settings: Sequence[str], language: str) -> Asked:
    """Find out what is to be checked: manifests, or those of a profile. Raises ConfigError, DataError."""
    if [*what] == ["last"] and not (config.exists() and ConfigFile(config).has("profile", "last")):
        newest = read_run(find_run("last", folders_of(config)), only_asked=True)
        what = [newest.name or "last"]
    paths = [expanded(name) for name in what]
    is_imported = len(paths) == 1 and (paths[0] / f"{TRAIN}.csv").is_file()  # as `data import` leaves a folder
    if is_imported and not (config.exists() and ConfigFile(config).has("profile", what[0])):
        paths = [path for part in PARTS if (path := paths[0] / f"{part}.csv").is_file()]
        what = [*map(str, paths)]
    if missing := [name for name, path in zip(what, paths, strict=True) if not path.is_file()]:
        is_profile = len(what) == 1 and config.exists() and ConfigFile(config).has("profile", what[0])
        if expanded(missing[0]).is_dir() and not is_profile:
            tables = [path for path in sorted(expanded(missing[0]).iterdir()) if path.suffix.lower() in SUFFIXES]
            remedy = f"Run: multimac data import {shlex.quote(missing[0])} --out NAME; then check NAME/train.csv."
            if len(tables) == 1:
                remedy = f"Run: multimac data check {shlex.quote(str(shown(tables[0])))}"
            raise DataError(f"{missing[0]} is a folder, not a manifest or a profile", remedy=remedy)
        if len(what) > 1 or LIKE_A_FILE.search(what[0]):
            near = like(expanded(missing[0]))
            raise DataError(
                f"no such manifest: {missing[0]}{near}", remedy="Name manifests, or one profile of config.ini."
            )
        profile = resolve(ConfigFile(config), what[0], strategy="allreduce", settings=settings).profile
        spoken = language or profile.language
        return Asked(
            name=what[0],
            manifests={part: path for part in PARTS if (path := getattr(profile, part))},
            language=language_code(spoken) if spoken else "",
            task=profile.task,
            base_model=profile.base_model,
            max_duration_s=profile.max_duration_s,
            no_speech=profile.no_speech == "train",
            reading=Reading.of(profile),
        )
    if settings:
        raise ConfigError("--set changes a profile, not manifests", remedy="Name a profile, or use --language.")
    manifests = gather.parts_of(paths)
    folder, stem = paths[0].absolute().with_suffix("").parts[-2:]
    name = f"{folder}-{stem}" if len(paths) == 1 else folder
    code = language_code(language) if language else ""
    return Asked(name=slug(name, "manifest"), manifests=manifests, language=code)


def _material(console: Console, asked: Asked, model: str) -> tuple[Material, list[str]]:
    """Read what is to be checked; also returns which checks cannot be made."""
    store, manifests = PROJECT / STORE, {}
    for part, path in asked.manifests.items():
        with working(console, f"reading {shown(path)}"):
            manifests[part] = gather.read(
                path,
                store,
                max_duration_s=asked.max_duration_s,
                no_speech=asked.no_speech,
                reading=asked.reading,
                kind=part if part in PARTS else TRAIN,
            )
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
    with counting(console, "listening to the clips", len(material.rows)) as told:
        return gather.decode(material, store, told), notes


def _plain(model: str) -> str:
    """Return the base of an adapter, which has no sizes of its own; any other model itself. Raises ModelError."""
    if not is_adapter(model):
        return model

    return str(base_of(expanded(model)))


def _long(asked: Asked, material: Material) -> list[Row]:
    return [
        Row(part, manifest.path, sample)
        for part, manifest in material.manifests.items()
        for sample in gather.too_long(
            manifest, PROJECT / STORE, reading=asked.reading, kind=part if part in PARTS else TRAIN
        )
    ]


def _loaded(name: str) -> tuple:
    """Return model and processor."""
    from exogym import device as devices
    from whisper_tuner.export.final import load_model

    model, processor = load_model(name)
    return model.to(devices.choose()), processor  # type: ignore[arg-type]  # transformers' own type of it is wrong


def _heard(
    console: Console,
    asked: Asked,
    material: Material,
    name: str,
    load: Callable[[], tuple],
    hosts: Sequence[Host],
) -> dict[tuple[str, int], Heard]:
    """Return what a model hears in all clips, decoded greedily; texts of an earlier check come from the cache."""
    from distributed.launcher.evaluate import Listening, hear_together
    from exogym import device as devices
    from whisper_tuner.eval.evaluation import GREEDY, compared, generation_settings, heard_in
    from whisper_tuner.eval.text_cache import Decoding, TextCache

    device = devices.choose()
    heard: dict[tuple[str, int], Heard] = {}
    keys: dict[str, str | None] = {}
    unknown: dict[str, Manifest] = {}
    language, task = asked.language or None, asked.task
    texts = TextCache(FactStore(PROJECT / STORE / CACHE))
    for part, manifest in material.manifests.items():
        samples = tuple(row.sample for row in material.rows if row.part == part and row.text)
        keys[part] = texts.key(
            name, samples, Decoding(device=device.type, language=language, task=task, temperatures=GREEDY)
        )
        if (found := texts.read(keys[part], samples)) is None:
            unknown[part] = replace(manifest, samples=samples)
        else:
            heard |= heard_in(part, found)
    if not unknown:
        return heard
    model, processor = load()
    listening = Listening(name=name, model=model, processor=processor, language=language, task=task)
    count, began = sum(len(one.samples) for one in unknown.values()), time.perf_counter()
    with _told_if_stopped(console), counting(console, f"{short_name(name)} transcribes the clips", count) as told:
        together = hear_together(
            listening,
            unknown,
            hosts,
            progress=told,
            warn=lambda host, what: console.print(f"{host}: {what}", soft_wrap=True),
        )
    seconds = time.perf_counter() - began
    _, written = generation_settings(model, language=language, task=task)
    for part, manifest in unknown.items():
        found = compared(manifest.samples, together.transcripts[part], written, seconds)
        if together.devices <= {device.type}:
            texts.write(keys[part], found)
        heard |= heard_in(part, found)
    if len(together.counts) > 1:
        console.print(f"clips by: {', '.join(f'{name} {count}' for name, count in together.counts.items())}")
    return heard


@contextlib.contextmanager
def _told_if_stopped(console: Console) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        console.print("Stopped: what was heard is not kept, so the same command begins anew.")
        raise


def _about_model(material: Material) -> Iterator[str]:
    if (usual := usual_cer(material)) > USELESS:
        what = f"The model does not know this speech well (the median CER is {100 * usual:.0f} %)"
        yield f"{what}: the report lists where it differs from your texts, but not as findings."


def _most_contradicted(material: Material) -> list[tuple[Finding, str, float]]:
    known = [(row, heard) for row in material.rows if (heard := material.heard.get((row.part, row.sample.line)))]
    wrong = sorted((pair for pair in known if pair[1].cer), key=lambda pair: -contradiction(pair[1]))
    return [(of_row(CONTRADICTED, row, ""), heard.text, heard.cer) for row, heard in wrong[:MOST_LISTED]]


def _write(console: Console, result: fix.Fixed, folder: Path, corrections: fix.Corrections) -> dict[str, Path]:
    written = fix.write(result, folder, corrections)
    for part, path in written.items():
        counts = ", ".join(f"{count} {change}" for change, count in result.counted(part).items()) or "nothing changed"
        console.print(
            f"{shown(path.absolute())}: {counted(len(result.samples[part]), 'row')} ({counts})", soft_wrap=True
        )
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
        "findings": [report.record(row) for one in found for row in one.each()],
        "notes": list(notes),
        "report": str(page),
        "fixed": {part: str(path) for part, path in written.items()},
    }
