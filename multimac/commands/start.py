"""From a job to a running launcher: what `finetune`, `demo` and `distributed-train` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from distributed.hosts.code import PRUNED, SyncItem
from distributed.hosts.each import on_each
from distributed.hosts.sync import Progress, SyncReport, no_progress, sync
from distributed.plan.job import Job
from distributed.plan.prepare import Prepared, ShowStatus, prepare_run
from distributed.plan.rendezvous import meeting_address
from distributed.run_dir.folder import new_run
from distributed.ssh.connection import Remote
from distributed.ssh.host import Hosts
from whisper_tuner.errors import ConfigError


def prepare_local(job: Job, ranks: int, show_status: ShowStatus = nullcontext) -> tuple[Path, Prepared]:
    _check_device(job.profile.device)
    with new_run(job.profile.runs_dir, job.name) as run_dir:
        prepared = prepare_run(job, run_dir, local_ranks=ranks, show_status=show_status)
        prepared.launch.save(run_dir)
    return run_dir, prepared


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


def connect_all(hosts: Sequence) -> list[Remote]:
    """All hosts at once. Raises one HostError that names each host that failed."""
    return on_each(hosts, Remote.connect)


def prepare_hosts(
    job: Job,
    hosts: Hosts,
    remotes: Sequence[Remote],
    run_dir: Path,
    show_status: ShowStatus = nullcontext,
    *,
    machine_workers: Sequence[int] = (),
) -> Prepared:
    address = meeting_address(hosts, remotes)
    return prepare_run(
        job, run_dir, hosts=hosts, address=address, show_status=show_status, machine_workers=machine_workers
    )


def sync_hosts(prepared: Prepared, remotes: Sequence[Remote], progress: Progress = no_progress) -> list[SyncReport]:
    """Bring code, base model, manifests and each host's shard up to date."""
    return sync_items(prepared.items, remotes, progress)


def sync_items(
    items: dict[str, list[SyncItem]], remotes: Sequence[Remote], progress: Progress = no_progress
) -> list[SyncReport]:
    return sync(remotes, items, progress, prune=PRUNED)
