"""`multimac hosts setup | sync | check`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from whisper_tuner.config import ConfigFile
from whisper_tuner.errors import ExitStatus, TunerError

from ..config import resolve
from ..console import size
from ..hosts import Host, load_hosts
from .transfers import Transfers, show_sync


def hosts_setup(hosts_file: Path) -> ExitStatus:
    from ..environment import setup
    from ..start import connect_all

    console = Console(highlight=False)
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
    from ..start import connect_all, prepare_hosts, sync_hosts
    from .train import hosts_of

    console = Console(highlight=False)
    job = resolve(ConfigFile(config), name)
    hosts = hosts_of(job, hosts_file)
    remotes = connect_all(hosts.workers)
    try:
        with tempfile.TemporaryDirectory() as folder, Transfers(console) as show:
            reports = sync_hosts(prepare_hosts(job, hosts, remotes, Path(folder)), remotes, show)
        show_sync(console, reports)
    finally:
        for remote in remotes:
            remote.close()
    return ExitStatus.OK


def hosts_check(hosts_file: Path) -> ExitStatus:
    from ..ask import ask
    from ..environment import own_pins, probe, unlike
    from ..hosts import check_is_this_machine
    from ..remote import Remote

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
