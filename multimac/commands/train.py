"""`multimac finetune`, `distributed-train` and `demo`."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from distributed.checkup.preflight import Report, preflight
from distributed.checkup.speed import measure, remember, remembered
from distributed.checkup.this_machine import one_machine
from distributed.hosts.keep_awake import awake
from distributed.hosts.paths import PROJECT, STORE
from distributed.hosts.sync import lacking
from distributed.plan.automatic import Measured, may_choose
from distributed.plan.forecast import HERE, Speed, can_forecast, forecast, key_of, ratios_of, step_of_all
from distributed.plan.hosts_file import EXAMPLE_FILE, HOSTS_FILE, load_hosts, meeting_address
from distributed.plan.job import BESIDE, Job, resolve
from distributed.plan.launch import Launch
from distributed.plan.prepare import STAGES, Prepared, prepare_run
from distributed.plan.run_spec import PIPELINE
from distributed.run_dir.find import run_dirs
from distributed.run_dir.folder import is_running, new_run
from distributed.run_dir.summary import read_run
from distributed.ssh.host import Hosts
from exogym.config import nearest
from multimac.view.preflight_view import show_preflight
from multimac.view.progress import working
from multimac.view.terminal import Console
from multimac.view.transfers import STEPS_EVERYWHERE, send, transfers
from whisper_tuner.config import ConfigFile
from whisper_tuner.data.check import PROBLEMS_FILE, check_manifest, described
from whisper_tuner.data.formats.layouts import doubtful
from whisper_tuner.data.formats.rows import Reading
from whisper_tuner.data.importing import allowed, outside_of
from whisper_tuner.errors import ConfigError, ExitStatus, TunerError
from whisper_tuner.files import shown
from whisper_tuner.text import counted, duration, in_words, size

from .attach_stop import start
from .options import CONFIG, Config, Detach, Resume, Set, Watching, command
from .resume import resume_run

NO_TEST = "there is no test set, so WER is not measured"
PARTS = 3  # training, validation and test: no text may be in two of them


@command("finetune")
@awake()
def finetune(
    profile: Annotated[str, Argument(help="A [profile:NAME].")] = "",
    settings: Set = None,
    resume: Resume = "",
    watch: Watching = False,
    detach: Detach = False,
    config: Config = CONFIG,
) -> ExitStatus:
    """Train a profile on this machine."""
    if resume:
        _only_new(settings)
        return resume_run(config, resume, name=profile, watch=watch, detach=detach)
    return train_here(config, _named(profile), settings=settings or (), watch=watch, detach=detach)


@command("demo")
@awake()
def demo() -> ExitStatus:
    """Train the bundled model on the bundled speech: two ranks on this machine, about two minutes."""
    return train_here(PROJECT / "config.ini", "demo-diloco", ranks=2)


def train_here(
    config: Path, name: str, *, settings: Sequence[str] = (), ranks: int = 1, watch: bool = False, detach: bool = False
) -> ExitStatus:
    """Train a profile on this machine, in `ranks` processes. Raises TunerError."""
    console, entered = Console(), time.time()
    job = resolve(ConfigFile(config), name, strategy="allreduce", settings=settings)  # alone, none to agree with
    _check_device(job.profile.device)
    _tell_of_others(console, job.profile.runs_dir)
    if job.distribution.strategy == PIPELINE:  # alone it is only worth a try
        ranks = max(ranks, STAGES)
    with new_run(job.profile.runs_dir, job.name) as run_dir:
        prepared = prepare_run(
            job, run_dir, local_ranks=ranks, show_status=partial(working, console), measured=one_machine
        )
        speeds = remembered(job, HERE) if ranks == 1 else []
        launch, told = _with_forecast(job, prepared, speeds, one_machine(), entered)
        launch.save(run_dir)
    _announce(console, job, prepared, run_dir, told=told)
    if job.distribution.strategy == PIPELINE:
        console.print(prepared.rounds, soft_wrap=True)
    return start(console, run_dir, watch=watch, detach=detach)


@command("distributed-train")
@awake()
def distributed_train(
    profile: Annotated[str, Argument(help="A [distributed:NAME], or a [profile:NAME] trained with DiLoCo.")] = "",
    hosts: Annotated[
        Path | None, Option("--hosts", help="Hosts file. [default: hosts_config, or distributed_hosts.json]")
    ] = None,
    only: Annotated[
        str, Option("--only", metavar="HOSTS", help="Of the workers in the hosts file only these, as h2,h3.")
    ] = "",
    settings: Set = None,
    resume: Resume = "",
    dry_run: Annotated[bool, Option("--dry-run", help="Show the plan and do nothing.")] = False,
    no_sync: Annotated[bool, Option("--no-sync", help="Trust that every host has the files it needs.")] = False,
    watch: Watching = False,
    detach: Detach = False,
    config: Config = CONFIG,
) -> ExitStatus:
    """Train a profile on all machines of a hosts file."""
    if resume:
        _only_new(settings, only=only, dry_run=dry_run)
        return resume_run(config, resume, name=profile, hosts_file=hosts, no_sync=no_sync, watch=watch, detach=detach)
    entered = time.time()
    console, job = Console(), resolve(ConfigFile(config), _named(profile), settings=settings or ())
    _tell_of_others(console, job.profile.runs_dir)
    hosts = hosts or job.distribution.hosts_config or _usual_hosts_file(console, job, config)
    machines = _chosen(load_hosts(hosts), only, hosts)
    console.print(f"looking at {', '.join(host.address for host in machines.all)}")
    with preflight(job, machines, sync=not no_sync, hosts_file=hosts) as report:
        show_preflight(console, report)
        job = report.settled(job)
        speeds: list[Speed] = []

        def measured() -> Measured:
            nonlocal speeds
            speeds = remembered(job, machines)
            if not speeds and may_choose(job, len(machines.all)) and not (dry_run or no_sync):
                speeds = _measure_steps(console, job, machines, report)
            return dataclasses.replace(report.measured, step_s=step_of_all(speeds, job.profile.batch_size))

        with new_run(job.profile.runs_dir, job.name, keep=not dry_run) as run_dir:
            prepared = prepare_run(
                job,
                run_dir,
                hosts=machines,
                address=report.meeting or meeting_address(machines, report.remotes),
                show_status=partial(working, console),
                machine_workers=report.machine_workers,
                measured=measured,
            )
            launch, told = _with_forecast(job, prepared, speeds, report.measured, entered)
            _announce(console, job, prepared, run_dir, told=told, dry_run=dry_run)
            if prepared.rounds:
                console.print(prepared.rounds, soft_wrap=True)
            if dry_run:
                _show_plan(console, prepared, {} if no_sync else lacking(report.remotes, prepared.items))
                return ExitStatus.OK
            if not no_sync:
                send(console, prepared.items, report.remotes)
            launch.save(run_dir)
    return start(console, run_dir, watch=watch, detach=detach)


def _named(profile: str) -> str:
    if not profile:
        raise typer.BadParameter("name a profile, or a run with --resume.", param_hint="PROFILE")
    return profile


def _tell_of_others(console: Console, runs_dir: Path) -> None:
    """Say which runs this machine, the first host of all its runs, is training already."""
    known: list[Path] = []
    with contextlib.suppress(ConfigError):  # the folder cannot be read, which is told where the run is made
        known = run_dirs([runs_dir])
    for run_dir in known:
        if is_running(run_dir):
            hosts = ", ".join(read_run(run_dir, only_asked=True).hosts)
            what = f"run {run_dir.name} is still going on, on {hosts}: both will take longer"
            console.print(what, style="yellow", soft_wrap=True)


def _chosen(machines: Hosts, only: str, file: Path) -> Hosts:
    """Return the master and those workers that --only names. Raises ConfigError."""
    names = {name.strip() for name in only.split(",") if name.strip()}
    known = [host.address for host in machines.workers]
    if unknown := sorted(names - {*known, machines.master.address}):
        remedy = f"Its workers: {', '.join(known) or 'none'}."
        raise ConfigError(f"--only {only}: {file} has no {unknown[0]}{nearest(unknown[0], known)}", remedy=remedy)
    return Hosts(
        master=machines.master, workers=tuple(host for host in machines.workers if host.address in names or not names)
    )


def _with_forecast(
    job: Job, prepared: Prepared, speeds: Sequence[Speed], known: Measured, entered: float
) -> tuple[Launch, str]:
    """Return the launch with how long it will take, and a line that tells it; '' if its hosts were not measured."""
    if not can_forecast(job, speeds):
        return prepared.launch, ""
    hosts = [rank.host or HERE.master for rank in prepared.launch.ranks]
    key = key_of(job, hosts)
    expected = forecast(
        job,
        prepared.clips,
        speeds,
        bytes_s=known.bytes_s,
        spare_bytes=known.spare_bytes,
        before_s=time.time() - entered,
        ratios=ratios_of(key),
    )
    less = ", less if it stops early" if job.profile.early_stopping else ""
    told = f"by steps that were measured, it will take {in_words(expected.seconds)} to the model and its WER{less}"
    return dataclasses.replace(prepared.launch, forecast=expected.kept(key, entered)), told


def _only_new(settings: Sequence[str] | None, *, only: str = "", dry_run: bool = False) -> None:
    if settings:
        raise ConfigError("--set is for a new run; --resume keeps its settings", remedy="Leave one of them out.")
    if only:
        remedy = "Name a hosts file that has only these: --hosts FILE"
        raise ConfigError("--only is for a new run; --resume goes on with all hosts of the run", remedy=remedy)
    if dry_run:
        raise ConfigError("--dry-run shows a new run, --resume continues one", remedy="Leave one of them out.")


def _measure_steps(console: Console, job: Job, hosts: Hosts, report: Report) -> list[Speed]:
    """Measure each host; what could not be measured stops nobody from training."""
    console.print(
        "measuring three training steps on each host, once for hosts and a profile like these", soft_wrap=True
    )
    try:
        reading = Reading.of(job.profile)
        samples = check_manifest(
            job.profile.train, job.profile.max_duration_s, PROJECT / STORE, reading=reading
        ).samples
        with tempfile.TemporaryDirectory() as scratch, transfers(console, STEPS_EVERYWHERE) as show:
            speeds = measure(job, samples, hosts, report.remotes, Path(scratch), show, report.machine_workers)
        remember(job, hosts, speeds)
    except (TunerError, OSError) as error:
        console.print(f"the time of a step could not be measured: {error}", style="yellow", soft_wrap=True)
        return []
    for speed in speeds:
        if speed.problem:
            console.print(f"{speed.host}: {speed.problem}", style="yellow", soft_wrap=True)
    return speeds


def _check_device(wanted: str) -> None:
    """Only torch knows, and its import takes seconds: so only if a GPU is asked for by name."""
    if wanted in ("auto", "cpu"):
        return
    from exogym import device as devices
    from exogym.errors import SettingError

    try:
        devices.choose(wanted)
    except SettingError as error:
        raise ConfigError(f"device = {wanted}: {error}", remedy="Set device to auto or cpu.") from None


def _usual_hosts_file(console: Console, job: Job, config: Path) -> Path:
    """Return the hosts file beside config.ini. Raises ConfigError."""
    path = shown((config.parent / HOSTS_FILE).absolute())
    if not path.is_file():
        what = f"{job.name}: no hosts file: neither --hosts, nor hosts_config in the profile, nor {path}"
        remedy = f"Run: multimac hosts pair. Or: python wizard.py. Or: cp {EXAMPLE_FILE} {path}, and edit it."
        raise ConfigError(what, remedy=remedy)
    console.print(f"hosts file: {path}", soft_wrap=True)
    return path


def _announce(
    console: Console, job: Job, prepared: Prepared, run_dir: Path, *, told: str = "", dry_run: bool = False
) -> None:
    hosts = ", ".join(rank.label for rank in prepared.launch.ranks)
    base = shown(Path(job.profile.base_model))
    console.print(f"{job.name}: {job.profile.method} fine-tuning of {base} on {hosts}", soft_wrap=True)
    kept = prepared.launch.ranks[0].spec.known_profile
    if kept.rounds_frozen:
        why = "" if "frozen_precision" in job.origin else ", since memory is short"
        console.print(f"weights that are not trained are held in {kept.frozen_precision}{why}")
    clips = len(prepared.manifests["train"].samples)
    steps = f"{counted(prepared.steps_per_epoch, 'step')} an epoch, {prepared.total_steps} in all"
    console.print(f"{counted(clips, 'clip')}, {steps}")
    if told:
        console.print(told, soft_wrap=True)
    if not dry_run:
        console.print(f"run folder: {shown(run_dir)}", soft_wrap=True)
    for kind in ("validation", "test"):
        if job.origin.get(kind) == BESIDE:
            console.print(f"{kind}: {shown(getattr(job.profile, kind))}, found beside train", soft_wrap=True)
    for line in _not_used(job):
        console.print(line, style="yellow", soft_wrap=True)
    for manifest in (*prepared.manifests.values(), *prepared.kept):
        for note in (note for note in manifest.notes if dry_run or note not in prepared.launch.leaks):
            console.print(note, style="yellow", soft_wrap=True)
        if manifest.problems:
            name = shown(manifest.path) if manifest in prepared.kept else manifest.path.name
            console.print(f"{name}: {described(manifest.problems)}", soft_wrap=True)
    if not job.profile.test:
        added = tuple(f"{other.name}-" for other in job.added)
        own = [clip for clip in prepared.manifests["train"].samples if not clip.id.startswith(added)]
        one_of_each = {clip.audio.parent: clip.audio for clip in own}
        outside = outside_of(job.profile.train, one_of_each.values())
        source = f"{shlex.quote(str(shown(job.profile.train)))}{allowed(outside)}"
        can_be_split = len({clip.text for clip in own}) >= PARTS
        how = f"; to split one off: multimac data import {source} --out NAME --split" if can_be_split else ""
        console.print(f"{NO_TEST}{how}", soft_wrap=True)
    if any(manifest.problems for manifest in prepared.manifests.values()) and not dry_run:
        console.print(f"all of them: {run_dir / PROBLEMS_FILE}", soft_wrap=True)


def _not_used(job: Job) -> Iterator[str]:
    """Tell of parts beside train of which nobody says which one is meant."""
    for kind, paths in doubtful(job.profile.train, Reading.of(job.profile)).items():
        if kind not in job.origin:  # `test =` says that there is none
            names = " or ".join(path.name for path in paths)
            yield f"{kind}: {names} may be meant, so none is used: set {kind} = {shown(paths[0])}, or another of them"


def _show_plan(console: Console, prepared: Prepared, to_send: Mapping[str, tuple[int, int]]) -> None:
    """to_send: files and bytes, by host; empty with --no-sync, which looks at no files."""
    for rank, shard in zip(prepared.launch.ranks, prepared.shards, strict=True):
        seconds = sum(sample.duration_s for sample in shard)
        what = f"{rank.label}: {counted(len(shard), 'clip')}, {duration(seconds)} of speech"
        if rank.label in to_send:
            files, total = to_send[rank.label]
            what += f"; {counted(files, 'file')} to send, {size(total)}" if files else "; has everything"
        console.print(what, soft_wrap=True)
