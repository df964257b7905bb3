"""`multimac hosts setup | sync | check | remove`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from distributed.checkup.preflight import Report, preflight, shared_folders
from distributed.hosts.environment import setup
from distributed.hosts.keep_awake import awake
from distributed.hosts.sync import AUDIO, KINDS, holdings
from distributed.plan.hosts_file import check_is_this_machine, load_hosts
from distributed.plan.job import resolve
from distributed.plan.prepare import prepare_run
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host, Hosts
from distributed.ssh.machine import on_each
from exogym.config import nearest
from multimac.view.preflight_view import show
from multimac.view.progress import working
from multimac.view.terminal import Console
from multimac.view.transfers import send, transfers
from whisper_tuner.config import ConfigFile
from whisper_tuner.errors import ConfigError, ExitStatus
from whisper_tuner.text import counted, size

from .options import CONFIG, HOSTS, Config, HostsFile, command


@command("hosts setup")
@awake()
def hosts_setup(hosts: HostsFile = HOSTS) -> ExitStatus:
    """Create the Python environment on each host: project folder, venv, dependencies."""
    console = Console()
    with _connected(load_hosts(hosts)) as remotes, transfers(console) as bars:
        setup(remotes, lambda host, text: console.print(f"{host}: {text}"), bars)
    return ExitStatus.OK


@command("hosts sync")
@awake()
def hosts_sync(
    profile: Annotated[str, Argument(help="A [distributed:NAME] or [profile:NAME].")],
    hosts: HostsFile = HOSTS,
    config: Config = CONFIG,
) -> ExitStatus:
    """Update the code, the base model and each host's share of the audio."""
    console = Console()
    job = resolve(ConfigFile(config), profile)
    machines = load_hosts(hosts)
    check_is_this_machine(machines.master)
    with _connected(machines) as remotes, tempfile.TemporaryDirectory() as folder:
        prepared = prepare_run(job, Path(folder), hosts=machines, show_status=partial(working, console))
        send(console, prepared.items, remotes)
    return ExitStatus.OK


@command("hosts check")
def hosts_check(
    hosts: HostsFile = HOSTS,
    profile: Annotated[str, Option(help="Also check what this [distributed:NAME] or [profile:NAME] needs.")] = "",
    as_json: Annotated[bool, Option("--json", help="Print only what was found, as JSON.")] = False,
    config: Config = CONFIG,
) -> ExitStatus:
    """Check all hosts and the links between them, and report everything that would stop a run."""
    console = Console(quiet=as_json)
    machines = load_hosts(hosts)
    job = resolve(ConfigFile(config), profile) if profile else None
    console.print(f"looking at {', '.join(host.address for host in machines.all)}")
    with preflight(job, machines, hosts_file=hosts) as report:
        if as_json:
            print(json.dumps(_as_json(report), indent=2, default=str))
        else:
            show(console, report, errors=False)
        report.raise_if_errors()
    return ExitStatus.OK


@command("hosts remove")
def hosts_remove(
    host: Annotated[str, Argument(help="One worker's address. [default: all workers]")] = "",
    only_audio: Annotated[
        bool, Option("--only-audio", help="Only recordings, their texts, and what was computed from them.")
    ] = False,
    really: Annotated[bool, Option("--yes", help="Remove it; without this it is only shown.")] = False,
    hosts: HostsFile = HOSTS,
    as_json: Annotated[bool, Option("--json", help="Print only what was found, as JSON.")] = False,
) -> ExitStatus:
    """Show which files of this program the hosts hold, and with --yes remove them."""
    console = Console(stderr=as_json)
    workers = {worker.address: worker for worker in load_hosts(hosts).workers}
    if host and host not in workers:
        raise ConfigError(f"{host} is no worker of {hosts}{nearest(host, workers)}")
    kinds, found = [AUDIO] if only_audio else [*KINDS], {}

    def clear(worker: Host) -> None:
        with Remote.connect(worker) as remote:
            found[worker.address] = holdings(remote, kinds, remove=really) | {"removed": really}

    try:  # one that fails does not keep the others
        on_each([workers[host]] if host else [*workers.values()], clear)
    finally:
        told = [found[address] for address in workers if address in found]
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
    """Connect to all workers' hosts at once, to change their folders. Raises one HostError for all that failed."""
    with contextlib.ExitStack() as stack:
        remotes: list[Remote] = [stack.enter_context(remote) for remote in on_each(hosts.workers, Remote.connect)]
        Report(hosts=[], problems=shared_folders(hosts.master, remotes)).raise_if_errors()
        yield remotes
