"""`multimac hosts find | pair`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import questionary
from rich.console import Console as AnyConsole
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from distributed.hosts.discovery import IN_FILE, NAME, Seen, State, find, look, why_none
from distributed.hosts.interfaces import route_to
from distributed.plan.hosts_file import load_hosts
from distributed.ssh import pairing
from distributed.ssh.authentication import known_keys
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host, resolve
from multimac.view.progress import working
from multimac.view.terminal import Console
from whisper_tuner.errors import AccessError, ConfigError, ExitStatus
from whisper_tuner.files import write_atomically
from whisper_tuner.text import counted

from .hosts import hosts_setup
from .options import HOSTS, HostsFile, command

WITH_PAIR = (State.NEW, State.LOCKED, State.PAIRED)  # pairing passes over what is done, and prepares the machine


@command("hosts find")
def hosts_find(
    hosts: HostsFile = HOSTS,
    as_json: Annotated[bool, Option("--json", help="Print only what was found, as JSON.")] = False,
) -> ExitStatus:
    """Look for machines in this network that SSH may reach, and say what is missing before they can train."""
    console = Console(quiet=as_json)
    seen = found(console, hosts)
    if as_json:
        told = [asdict(one.candidate) | {"state": one.state.value, "about": one.about} for one in seen]
        print(json.dumps(told, indent=2))
    elif not seen:
        console.print(f"No other machine was found.\n{why_none()}", soft_wrap=True)
    else:
        show(console, seen)
    return ExitStatus.OK


@command("hosts pair")
def hosts_pair(
    name: Annotated[str, Argument(help="The machine's name or address. [default: asks which of those found]")] = "",
    user: Annotated[str, Option(help="Your name there. [default: as ssh decides]")] = "",
    port: Annotated[
        int | None, Option(min=1, max=65535, help="Port of its SSH server. [default: as ssh decides]")
    ] = None,
    set_up: Annotated[bool, Option("--setup/--no-setup", help="Install what it needs to train, too.")] = True,
    hosts: HostsFile = HOSTS,
) -> ExitStatus:
    """Let SSH into another machine: compare its key, put yours there, and write it into the hosts file.

    It asks for the password over there once, by ssh-copy-id. What is done already is passed over.
    """
    console = Console()
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("pairing asks questions, so it needs a terminal", remedy="Run it in one.")
    if not name:
        host = _chosen(console, hosts)
        if host is None:
            console.print("Nothing was changed.")
            return ExitStatus.OK
    else:
        if not NAME.fullmatch(name):
            raise ConfigError(f"{name} is no name or address", remedy="For example mac-mini.local. Your name: --user.")
        host = Host(address=name, port=port)
    host = replace(host, user=user or None)
    if not paired(console, host):
        console.print("Nothing was changed.")
        return ExitStatus.OK
    twin = _twin(hosts, host)
    message = f"{hosts} has {twin}, with the same key. Is that this machine, under another name or address?"
    if twin:
        is_the_same = questionary.confirm(message, default=True, auto_enter=False).ask()
        if is_the_same is None:
            console.print("Nothing was changed.")
            return ExitStatus.INTERRUPTED
        twin = twin if is_the_same else ""  # or a copy
    told = "written" if _write(hosts, host, instead_of=twin) else f"{host.address} stands there already"
    console.print(f"{told}: {hosts}", markup=False, soft_wrap=True)
    return hosts_setup(hosts) if set_up else ExitStatus.OK


def found(console: AnyConsole, hosts: Path) -> list[Seen]:
    """Find machines, and try what is known of them. A hosts file that cannot be read counts as none."""
    try:
        told = load_hosts(hosts).workers
    except ConfigError:
        told = ()
    with working(console, "looking for other machines (3 s)"):
        return look(find(told), told)


def show(console: AnyConsole, seen: list[Seen]) -> None:
    table = Table(header_style="bold")
    for column in ("name", "address", "known from", "", "what it is, or what to do"):
        table.add_column(column, overflow="fold")
    for one in seen:
        candidate, port = one.candidate, f" --port {one.candidate.port}" if one.candidate.port != 22 else ""
        advice = f"multimac hosts pair {candidate.name}{port}" if one.state in WITH_PAIR else ""
        if one.state is State.PAIRED and candidate.told_by == IN_FILE:
            advice = "multimac hosts setup"
        about = "; ".join(filter(None, (one.about, advice)))
        cells = (
            _named(one),
            " by ".join(filter(None, (candidate.addresses[0], candidate.link))),
            candidate.told_by,
            one.state.value,
            about,
        )
        table.add_row(*map(escape, cells))
    console.print(table)


def _named(one: Seen) -> str:
    name, label = one.candidate.name, one.candidate.label
    return f"{name} ({label})" if label not in ("", name) else name


def _chosen(console: AnyConsole, hosts: Path) -> Host | None:
    """Let the user choose one of the machines that were found. Raises ConfigError if there is none."""
    seen = [one for one in found(console, hosts) if one.state is not State.SILENT]
    if not seen:
        raise ConfigError("no other machine was found", remedy=why_none())
    show(console, seen)
    options = [questionary.Choice(f"{_named(one)}: {one.state.value}", one.candidate.host) for one in seen]
    message = f"Found {counted(len(seen), 'other machine')}. Which one is to train with this one?"
    return questionary.select(message, [*options, questionary.Choice("none of them", None)]).ask()


def paired(console: AnyConsole, host: Host) -> bool:
    """Do what is missing until a key of the user's opens the machine. False if the user does not trust its key."""
    settings = resolve(host)
    with working(console, f"asking {settings.host} for its key"):
        key = pairing.host_key(host, settings)
    if not pairing.is_known(host, settings, key):
        console.print(f"{settings.host} says that its key is\n  {key.fingerprint}", markup=False, soft_wrap=True)
        console.print(f"On that machine, this prints it: {key.shown_there}", markup=False, soft_wrap=True)
        if others := pairing.others_with(key, settings):
            what = f"{', '.join(others)} has the same key: this machine under another name, or a copy of it."
            console.print(what, style="yellow", markup=False, soft_wrap=True)
        if not questionary.confirm("Are the two alike?", default=False, auto_enter=False).ask():
            return False
        console.print(f"written: {pairing.accept(settings, key)}", markup=False, soft_wrap=True)
    try:
        _log_in(console, host)
    except AccessError:
        public = pairing.own_key(settings)
        if public is None:
            console.print("You have no key yet: ssh-keygen makes one. With a passphrase, ssh-agent must hold it.")
            public = pairing.make_key()
        console.print(f"ssh-copy-id puts {public.name} there. It asks for the password of {settings.user} on it, once.")
        pairing.copy_key(host, settings, public)
        _log_in(console, host)
    console.print(f"{host.address}: a key of yours opens it", markup=False)
    return True


def _log_in(console: AnyConsole, host: Host) -> None:
    with working(console, f"trying your keys on {host.address}"):
        Remote.connect(host).close()


def _twin(path: Path, host: Host) -> str:
    """Return the address of a worker in the hosts file that has the same host key; "" if none has."""

    def keys(of: Host) -> set[bytes]:
        settings = resolve(of)
        return {entry.blob for entry in known_keys(settings.known_as, settings.known_hosts)}

    workers = load_hosts(path).workers if path.exists() else ()
    if not workers or host.address in {one.address for one in workers}:
        return ""
    own = keys(host)
    return next((one.address for one in workers if own & keys(one)), "")


def _write(path: Path, host: Host, *, instead_of: str = "") -> bool:
    """Add a machine to the hosts file, which is made where there is none. False if it stands there already.

    instead_of: the address of a worker whose place it takes.
    """
    told = {"host": host.address, "ssh_user": host.user, "ssh_port": host.port}
    worker = {key: value for key, value in told.items() if value is not None}
    short = host.address if len(worker) == 1 else worker
    values: dict[str, Any]
    if not path.exists():
        values = {"master": route_to(host.address).address, "workers": []}
    elif host.address in {one.address for one in load_hosts(path).all}:  # what is wrong in it is told
        return False
    else:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    workers = values["workers"]
    named = [one["host"] if isinstance(one, dict) else one for one in workers]
    if instead_of in named:  # all else that is said of it stays
        place = named.index(instead_of)
        before = workers[place] if isinstance(workers[place], dict) else {}
        workers[place] = before | worker if before else short
    else:
        workers.append(short)
    write_atomically(path, json.dumps(values, indent=2) + "\n")
    return True
