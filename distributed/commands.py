"""What the commands do, each as one function that takes plain arguments and returns an exit status."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from whisper_tuner.config import ConfigFile
from whisper_tuner.errors import ConfigError, ExitStatus, TunerError
from whisper_tuner.runs import new_run

from .config import Job, resolve
from .console import duration, follow, size
from .hosts import Host, Hosts, load_hosts

SHOWN_PROBLEMS = 10


def finetune(config: Path, name: str, *, ranks: int = 1) -> ExitStatus:
    from .start import prepare_local, start_launcher

    console = Console(highlight=False)
    job = resolve(ConfigFile(config), name, strategy="allreduce")  # alone there is nobody to agree with
    run_dir, prepared = prepare_local(job, ranks)
    _announce(console, job, prepared, run_dir)
    return follow(run_dir, start_launcher(run_dir), console)


def distributed_train(
    config: Path, name: str, hosts_file: Path | None, *, dry_run: bool = False, no_sync: bool = False
) -> ExitStatus:
    from .start import connect_all, prepare_hosts, start_launcher, sync_hosts

    console = Console(highlight=False)
    job = resolve(ConfigFile(config), name)
    hosts = _hosts(job, hosts_file)
    console.print(f"connecting to {', '.join(host.address for host in hosts.workers) or 'no worker'}")
    remotes = connect_all(hosts.workers)
    try:
        with new_run(job.profile.runs_dir, job.name, keep=not dry_run) as run_dir:
            prepared = prepare_hosts(job, hosts, remotes, run_dir)
            _announce(console, job, prepared, run_dir)
            if dry_run:
                _show_plan(console, prepared)
                return ExitStatus.OK
            if not no_sync:
                with _transfers(console) as show:
                    reports = sync_hosts(prepared, remotes, show)
                _show_sync(console, reports)
            prepared.launch.save(run_dir)
    finally:
        for remote in remotes:
            remote.close()
    return follow(run_dir, start_launcher(run_dir), console)


def evaluate(
    config: Path, models: Sequence[str], *, data: Path | None, profile: str, language: str, batch_size: int
) -> ExitStatus:
    from exogym import device as devices
    from whisper_tuner.dataset import load_manifest
    from whisper_tuner.evaluation import evaluate
    from whisper_tuner.export import load_model

    from .evaluate_run import summary

    console = Console(highlight=False)
    if profile:
        chosen = ConfigFile(config).profile(profile)
        data, language = data or chosen.test, language or chosen.language
    if data is None:
        raise ConfigError(
            "nothing to evaluate on", remedy="Name a manifest with --data, or a profile that has a test set."
        )
    samples = load_manifest(data).samples
    table = Table(title=f"{data}: {len(samples)} clips; WER and CER in per cent", header_style="bold")
    for column in ("model", "WER", "CER", "WER as written", "CER as written"):
        table.add_column(column, justify="left" if column == "model" else "right", overflow="fold")
    for path in models:
        model, processor = load_model(path)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(str(path), total=len(samples))
            result = evaluate(
                model.to(devices.choose()),
                processor,
                samples,
                language=language or None,
                batch_size=batch_size,
                progress=lambda done, total, bar=bar, task=task: bar.update(task, completed=done),
            )
        for problem in result.problems:
            console.print(f"skipped: {problem}")
        figures = summary(result)
        table.add_row(str(path), *(f"{figures[key]:.1f}" for key in ("wer", "cer", "wer_raw", "cer_raw")))
    console.print(table)
    return ExitStatus.OK


def transcribe(audio: Sequence[Path], model_path: str, language: str) -> ExitStatus:
    from exogym import device as devices
    from whisper_tuner.evaluation import transcribe
    from whisper_tuner.export import load_model

    model, processor = load_model(model_path)
    failed = False
    for path in audio:
        [heard] = transcribe(model.to(devices.choose()), processor, [path], language=language or None)
        name = f"{path}: " if len(audio) > 1 else ""
        print(f"{name}{heard.problem or heard.text}")
        failed |= bool(heard.problem)
    return ExitStatus.DATA if failed else ExitStatus.OK


def hosts_setup(hosts_file: Path) -> ExitStatus:
    from .environment import setup
    from .start import connect_all

    console = Console(highlight=False)
    remotes = connect_all(load_hosts(hosts_file).workers)
    try:
        with _transfers(console) as show:
            results = setup(remotes, lambda host, text: console.print(f"{host}: {text}"), show)
        for result in results:
            console.print(f"{result.host}: ready ({result.source}, {result.python}, {result.seconds:.0f} s)")
    finally:
        for remote in remotes:
            remote.close()
    return ExitStatus.OK


def hosts_sync(config: Path, name: str, hosts_file: Path) -> ExitStatus:
    import tempfile

    from .start import connect_all, prepare_hosts, sync_hosts

    console = Console(highlight=False)
    job = resolve(ConfigFile(config), name)
    hosts = _hosts(job, hosts_file)
    remotes = connect_all(hosts.workers)
    try:
        with tempfile.TemporaryDirectory() as folder, _transfers(console) as show:
            reports = sync_hosts(prepare_hosts(job, hosts, remotes, Path(folder)), remotes, show)
        _show_sync(console, reports)
    finally:
        for remote in remotes:
            remote.close()
    return ExitStatus.OK


def hosts_check(hosts_file: Path) -> ExitStatus:
    from .ask import ask
    from .environment import own_pins, probe, unlike
    from .hosts import check_is_this_machine
    from .remote import Remote

    console = Console(highlight=False)
    hosts = load_hosts(hosts_file)
    pins = own_pins()
    table = Table(header_style="bold")
    for column in ("host", "system", "cores", "memory", "clock", "environment"):
        table.add_column(column, overflow="fold")
    problems = []

    def look(host: Host) -> None:
        with Remote.connect(host) as remote:
            facts = ask(remote, "facts", timeout=30)
            found = probe(remote, remote.expand(host.python), list(pins.all))
            differs = unlike(pins, found[1]) if found else []
            state = "run `hosts setup`" if not found else f"differs: {', '.join(differs[:3])}" if differs else "ready"
            ahead = facts["clock"] - time.time()
            system = f"{facts['system']} {facts['release']} {facts['machine']}"
            cells = (str(facts["cpus"]), size(facts["memory"]), f"{ahead:+.1f} s", state)
            table.add_row(host.address, system, *cells)

    for attempt, host in ((check_is_this_machine, hosts.master), *((look, worker) for worker in hosts.workers)):
        try:
            attempt(host)
        except TunerError as error:
            problems.append(error)
    console.print(table)
    for error in problems:
        console.print(str(error), style="red")
    return problems[0].exit_status if problems else ExitStatus.OK


def _hosts(job: Job, hosts_file: Path | None) -> Hosts:
    path = hosts_file or job.distribution.hosts_config
    if path is None:
        raise ConfigError(f"{job.name}: no hosts file", remedy="Name one with --hosts, or set hosts_config.")
    return load_hosts(path)


def _announce(console: Console, job: Job, prepared, run_dir: Path) -> None:
    hosts = ", ".join(rank.label for rank in prepared.launch.ranks)
    console.print(f"{job.name}: {job.profile.method} fine-tuning of {job.profile.base_model} on {hosts}")
    clips = sum(len(shard) for shard in prepared.shards)
    steps = f"{prepared.steps_per_epoch} steps an epoch, {prepared.total_steps} in all"
    console.print(f"{clips} clips, {steps}; run folder {run_dir}", soft_wrap=True)
    for manifest in prepared.manifests:
        for problem in manifest.problems[:SHOWN_PROBLEMS]:
            console.print(f"{manifest.path.name}: skipped: {problem}")
        if len(manifest.problems) > SHOWN_PROBLEMS:
            console.print(f"{manifest.path.name}: and {len(manifest.problems) - SHOWN_PROBLEMS} more rows")


def _show_plan(console: Console, prepared) -> None:
    for rank, shard in zip(prepared.launch.ranks, prepared.shards, strict=True):
        seconds = sum(sample.duration_s for sample in shard)
        files = prepared.items.get(rank.label, [])
        total = size(sum(item.local.stat().st_size for item in files))
        needs = f"needs {len(files)} files, {total}" if files else "has everything"
        console.print(f"{rank.label}: {len(shard)} clips, {duration(seconds)} of speech; {needs}")


def _show_sync(console: Console, reports) -> None:
    for report in reports:
        said = f"{report.files} files, {size(report.bytes)} sent" if report.files else "up to date"
        console.print(f"{report.host}: {said} in {report.seconds:.1f} s")


class _transfers:
    """A bar for each host; used as the progress callback of sync and setup."""

    def __init__(self, console: Console):
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bars = Progress(*columns, console=console, transient=True)
        self._tasks: dict[str, int] = {}

    def __enter__(self) -> _transfers:
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    def __call__(self, host: str, done: int, total: int, file: str) -> None:
        if host not in self._tasks:
            self._tasks[host] = self._bars.add_task(host, total=total)
        self._bars.update(self._tasks[host], completed=done, total=total)
