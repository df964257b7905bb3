"""`multimac hosts setup | sync | check`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from distributed.plan.hosts_file import load_hosts
from distributed.plan.job import resolve
from multimac.view.transfers import Transfers, show_sync
from whisper_tuner.config import ConfigFile
from whisper_tuner.errors import ExitStatus


def hosts_setup(hosts_file: Path) -> ExitStatus:
    from distributed.hosts.environment import setup

    from .start import connect_all

    console = Console(highlight=False, markup=False)
    remotes = connect_all(load_hosts(hosts_file).workers)
    try:
        with Transfers(console) as show:
            results = setup(remotes, lambda host, text: console.print(f"{host}: {text}"), show)
        for result in results:
            console.print(f"{result.host}: ready ({result.source}, {result.python}, {result.seconds:.0f} s)")
    finally:
        for remote in remotes:
            remote.close()
    return ExitStatus.OK


def hosts_sync(config: Path, name: str, hosts_file: Path) -> ExitStatus:
    from .start import connect_all, prepare_hosts, sync_hosts
    from .train import hosts_of

    console = Console(highlight=False, markup=False)
    job = resolve(ConfigFile(config), name)
    hosts = hosts_of(job, hosts_file)
    remotes = connect_all(hosts.workers)
    try:
        with tempfile.TemporaryDirectory() as folder:
            prepared = prepare_hosts(job, hosts, remotes, Path(folder), console.status)
            with Transfers(console) as show:
                reports = sync_hosts(prepared, remotes, show)
        show_sync(console, reports)
    finally:
        for remote in remotes:
            remote.close()
    return ExitStatus.OK


def hosts_check(hosts_file: Path, config: Path | None = None, name: str = "") -> ExitStatus:
    """The preflight; with a profile, also of what its run would need."""
    from distributed.preflight.run import preflight
    from multimac.view.preflight_view import show

    console = Console(highlight=False, markup=False)
    hosts = load_hosts(hosts_file)
    job = resolve(ConfigFile(config), name) if config and name else None
    console.print(f"looking at {', '.join(host.address for host in hosts.all)}")
    with preflight(job, hosts, hosts_file=hosts_file) as report:
        show(console, report, errors=False)
        report.raise_if_errors()
    return ExitStatus.OK
