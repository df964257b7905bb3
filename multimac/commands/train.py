"""`multimac finetune`, `distributed-train` and `demo`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from distributed.plan.hosts_file import load_hosts
from distributed.plan.job import Job, resolve
from distributed.preflight.report import Report
from distributed.run_dir.folder import new_run
from distributed.ssh.host import Hosts
from multimac.view.console import follow
from multimac.view.transfers import Transfers, show_sync
from whisper_tuner.config import ConfigFile
from whisper_tuner.data.check import PROBLEMS_FILE, described
from whisper_tuner.errors import ConfigError, ExitStatus
from whisper_tuner.text import duration, size

from .attach_stop import detached


def finetune(config: Path, name: str, *, ranks: int = 1, detach: bool = False) -> ExitStatus:
    from distributed.launcher.start import start_launcher

    from .start import prepare_local

    console = Console(highlight=False, markup=False)
    job = resolve(ConfigFile(config), name, strategy="allreduce")  # alone there is nobody to agree with
    run_dir, prepared = prepare_local(job, ranks, console.status)
    _announce(console, job, prepared, run_dir)
    launcher = start_launcher(run_dir)
    return detached(console, run_dir, launcher) if detach else follow(run_dir, launcher, console)


def distributed_train(
    config: Path,
    name: str,
    hosts_file: Path | None,
    *,
    dry_run: bool = False,
    no_sync: bool = False,
    detach: bool = False,
) -> ExitStatus:
    from distributed.launcher.start import start_launcher
    from distributed.preflight.run import preflight

    from .start import prepare_hosts, sync_hosts

    console = Console(highlight=False, markup=False)
    job = resolve(ConfigFile(config), name)
    hosts = hosts_of(job, hosts_file)
    console.print(f"looking at {', '.join(host.address for host in hosts.all)}")
    with preflight(job, hosts, sync=not no_sync, hosts_file=hosts_file) as report:
        show_preflight(console, report)
        with new_run(job.profile.runs_dir, job.name, keep=not dry_run) as run_dir:
            prepared = prepare_hosts(
                job, hosts, report.remotes, run_dir, console.status, machine_workers=report.machine_workers
            )
            _announce(console, job, prepared, run_dir, dry_run=dry_run)
            if dry_run:
                _show_plan(console, prepared)
                return ExitStatus.OK
            if not no_sync:
                with Transfers(console) as show:
                    reports = sync_hosts(prepared, report.remotes, show)
                show_sync(console, reports)
            prepared.launch.save(run_dir)
    launcher = start_launcher(run_dir)
    return detached(console, run_dir, launcher) if detach else follow(run_dir, launcher, console)


def show_preflight(console: Console, report: Report) -> None:
    """One line if all is well, else the tables. Raises HostError or ConfigError with all problems that there are."""
    from multimac.view.preflight_view import show

    if report.problems:
        show(console, report, errors=False)
        report.raise_if_errors()
    console.print(report.summary(), soft_wrap=True)


def hosts_of(job: Job, hosts_file: Path | None) -> Hosts:
    path = hosts_file or job.distribution.hosts_config
    if path is None:
        raise ConfigError(f"{job.name}: no hosts file", remedy="Name one with --hosts, or set hosts_config.")
    return load_hosts(path)


def _announce(console: Console, job: Job, prepared, run_dir: Path, *, dry_run: bool = False) -> None:
    hosts = ", ".join(rank.label for rank in prepared.launch.ranks)
    console.print(f"{job.name}: {job.profile.method} fine-tuning of {job.profile.base_model} on {hosts}")
    clips = sum(len(shard) for shard in prepared.shards)
    steps = f"{prepared.steps_per_epoch} steps an epoch, {prepared.total_steps} in all"
    console.print(f"{clips} clips, {steps}; run folder {run_dir}", soft_wrap=True)
    for manifest in prepared.manifests:
        if manifest.problems:
            console.print(f"{manifest.path.name}: {described(manifest.problems)}", soft_wrap=True)
    if any(manifest.problems for manifest in prepared.manifests) and not dry_run:
        console.print(f"all of them: {run_dir / PROBLEMS_FILE}", soft_wrap=True)


def _show_plan(console: Console, prepared) -> None:
    for rank, shard in zip(prepared.launch.ranks, prepared.shards, strict=True):
        seconds = sum(sample.duration_s for sample in shard)
        files = prepared.items.get(rank.label, [])
        total = size(sum(item.local.stat().st_size for item in files))
        needs = f"needs {len(files)} files, {total}" if files else "has everything"
        console.print(f"{rank.label}: {len(shard)} clips, {duration(seconds)} of speech; {needs}")
