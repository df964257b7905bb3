"""From a job to a running launcher: what `finetune`, `demo` and `distributed-train` have in common."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from whisper_tuner.errors import ConfigError
from whisper_tuner.runs import new_run

from .config import Job
from .hosts import Hosts, check_is_this_machine
from .interfaces import route_to
from .post import PROJECT, environment
from .remote import Remote
from .shipment import Busy, Prepared, prepare_run
from .sync import Progress, SyncItem, SyncReport, code_folders, no_progress, on_each, sync


def start_launcher(run_dir: Path, *, resume: bool = False) -> subprocess.Popen:
    """In a session of its own, so that neither Ctrl-C nor a closed terminal reaches it directly."""
    with (run_dir / "launcher.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "distributed.launcher", str(run_dir), *(["--resume"] if resume else [])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=PROJECT,
            env={**os.environ, **environment(PROJECT)},
            start_new_session=True,
        )


def prepare_local(job: Job, ranks: int, busy: Busy = nullcontext) -> tuple[Path, Prepared]:
    _check_device(job.profile.device)
    with new_run(job.profile.runs_dir, job.name) as run_dir:
        prepared = prepare_run(job, run_dir, local_ranks=ranks, busy=busy)
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
    busy: Busy = nullcontext,
    *,
    machine_workers: Sequence[int] = (),
) -> Prepared:
    address = meeting_address(hosts, remotes)
    return prepare_run(job, run_dir, hosts=hosts, address=address, busy=busy, machine_workers=machine_workers)


def meeting_address(hosts: Hosts, remotes: Sequence[Remote]) -> str:
    """This machine's own IPv4 address towards the workers. Raises ConfigError if it is not the master."""
    check_is_this_machine(hosts.master)
    peer = hosts.workers[0].address if hosts.workers else "127.0.0.1"
    if hosts.master.interface or not remotes:
        return route_to(peer, interface=hosts.master.interface).address
    return remotes[0].local_address or route_to(peer).address


def sync_hosts(prepared: Prepared, remotes: Sequence[Remote], progress: Progress = no_progress) -> list[SyncReport]:
    """Bring code, base model, manifests and each host's shard up to date."""
    return sync_items(prepared.items, remotes, progress)


def sync_items(
    items: dict[str, list[SyncItem]], remotes: Sequence[Remote], progress: Progress = no_progress
) -> list[SyncReport]:
    return sync(remotes, items, progress, prune=code_folders())
