"""`multimac hosts setup | sync | check | remove`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from distributed.checkup.facts import Report
from distributed.checkup.folders import shared_folders
from distributed.checkup.preflight import preflight
from distributed.hosts.each import on_each
from distributed.hosts.environment import setup
from distributed.hosts.holdings import AUDIO, KINDS, holdings
from distributed.hosts.keep_awake import awake
from distributed.plan.hosts_file import load_hosts
from distributed.plan.job import resolve
from distributed.plan.prepare import prepare_run
from distributed.plan.rendezvous import check_is_this_machine
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host, Hosts
from multimac.view.preflight_view import show
from multimac.view.progress import working
from multimac.view.terminal import Console
from multimac.view.transfers import send, transfers
from whisper_tuner.config import ConfigFile
from whisper_tuner.errors import ConfigError, ExitStatus
from whisper_tuner.settings import nearest
from whisper_tuner.text import counted, size


@awake()
def hosts_setup(hosts_file: Path) -> ExitStatus:
    console = Console(highlight=False, markup=False)
    with _connected(load_hosts(hosts_file)) as remotes:
        with transfers(console) as bars:
            results = setup(remotes, lambda host, text: console.print(f"{host}: {text}"), bars)
        for result in results:
            console.print(f"{result.host}: ready ({result.source}, {result.python}, {result.seconds:.0f} s)")
    return ExitStatus.OK


@awake()
def hosts_sync(config: Path, name: str, hosts_file: Path) -> ExitStatus:
    console = Console(highlight=False, markup=False)
    job = resolve(ConfigFile(config), name)
    hosts = load_hosts(hosts_file)
    check_is_this_machine(hosts.master)
    with _connected(hosts) as remotes, tempfile.TemporaryDirectory() as folder:
        prepared = prepare_run(job, Path(folder), hosts=hosts, show_status=partial(working, console))
        send(console, prepared.items, remotes)
    return ExitStatus.OK


def hosts_check(hosts_file: Path, config: Path, name: str = "", *, as_json: bool = False) -> ExitStatus:
    """Look at all hosts as before a run; with a profile, also at what its run would need."""
    console = Console(highlight=False, markup=False, quiet=as_json)
    hosts = load_hosts(hosts_file)
    job = resolve(ConfigFile(config), name) if name else None
    console.print(f"looking at {', '.join(host.address for host in hosts.all)}")
    with preflight(job, hosts, hosts_file=hosts_file) as report:
        if as_json:
            print(json.dumps(_as_json(report), indent=2, default=str))
        else:
            show(console, report, errors=False)
        report.raise_if_errors()
    return ExitStatus.OK


def hosts_remove(hosts_file: Path, name: str, *, only_audio: bool, really: bool, as_json: bool) -> ExitStatus:
    """Show what hosts hold of ours, and remove it if `really`. A host that fails does not keep the others."""
    console = Console(highlight=False, markup=False, stderr=as_json)
    workers = {host.address: host for host in load_hosts(hosts_file).workers}
    if name and name not in workers:
        raise ConfigError(f"{name} is no worker of {hosts_file}{nearest(name, workers)}")
    kinds, found = [AUDIO] if only_audio else [*KINDS], {}

    def clear(host: Host) -> None:
        with Remote.connect(host) as remote:
            found[host.address] = holdings(remote, kinds, remove=really) | {"removed": really}

    try:
        on_each([workers[name]] if name else [*workers.values()], clear)
    finally:
        told = [found[host] for host in workers if host in found]
        _show_held(console, told, really=really)
        if as_json:
            print(json.dumps(told, indent=2))
    return ExitStatus.OK


def _show_held(console: Console, told: list[dict[str, Any]], *, really: bool) -> None:
    for one in told:
        for row in one["held"]:
            found = f"{row['kind']:<11} {size(row['bytes']):>8} {counted(row['files'], 'file'):>14}  {row['path']}"
            console.print(f"{one['host']}: {found}", soft_wrap=True)
        if not one["held"]:
            console.print(f"{one['host']}: nothing is left")
        if one["others"]:
            what = f"what others put into {one['root']} stays, {counted(one['others'], 'file')}"
            console.print(f"{one['host']}: {what}: {', '.join(map(repr, one['named']))}", soft_wrap=True)
    if sizes := [row["bytes"] for one in told for row in one["held"]]:
        said = "removed" if really else "nothing has been removed yet: repeat the command with --yes"
        console.print(f"{size(sum(sizes))} in all; {said}")


def _as_json(report: Report) -> dict[str, Any]:
    """Write a report without its connections."""
    keys = ("hosts", "what", "remedy", "severity", "check", "status")
    return {
        "hosts": [dataclasses.asdict(facts) for facts in report.hosts],
        "pairs": [dataclasses.asdict(pair) for pair in report.pairs],
        "problems": [{key: getattr(problem, key) for key in keys} for problem in report.problems],
        "network": report.network,
        "seconds": round(report.seconds, 1),
    }


@contextlib.contextmanager
def _connected(hosts: Hosts) -> Iterator[list[Remote]]:
    """Connect to all workers' hosts, to change their folders. Raises one HostError that names each that failed."""
    with contextlib.ExitStack() as stack:
        remotes = [stack.enter_context(remote) for remote in on_each(hosts.workers, Remote.connect)]
        Report(hosts=[], problems=shared_folders(hosts.master, remotes)).raise_if_errors()
        yield remotes
