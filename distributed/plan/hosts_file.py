"""`distributed_hosts.json`: which machines train, and how SSH reaches them; and the address where their ranks meet."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from posixpath import normpath
from typing import TYPE_CHECKING, Any, NamedTuple

from distributed.hosts.interfaces import addresses_of, own_interfaces, route_to
from distributed.hosts.paths import PROJECT
from distributed.ssh.host import PROJECT_PATH, Host, Hosts
from exogym.config import nearest
from whisper_tuner.errors import ConfigError
from whisper_tuner.files import expanded, like
from whisper_tuner.text import parse_json

if TYPE_CHECKING:  # `data check` reads a hosts file without paramiko
    from distributed.ssh.connection import Remote

HOSTS_FILE, EXAMPLE_FILE = "distributed_hosts.json", PROJECT / "distributed_hosts.example.json"
TEXT = (r".*\S.*", "text", "Put it between quotes, or leave it out.")
A_PATH = (r"(?!.*/\.\.(/|$))~?/.*[^/.].*", "a path from / or ~/")
AT_HOME = "~ is the home folder on that machine."
AN_ENVIRONMENT = f"For example {PROJECT_PATH}/.venv; {AT_HOME}"


class Key(NamedTuple):
    """A key of a host: the field of Host, what makes its value; what fits, in words, and what to do if it does not.

    A pattern is of texts; a range of whole numbers, and null is as good as nothing there.
    """

    field: str
    made_by: Callable[[Any], Any]
    fitting: str | range
    words: str
    what_helps: str


KEYS = {
    "host": Key(
        "address",
        str,
        r"[^\s@/-][^\s@/]*",
        "an address",
        "For example 192.168.1.30. A user goes into 'ssh_user'.",
    ),
    "ssh_user": Key("user", str, *TEXT),
    "ssh_key_path": Key("key_path", expanded, *TEXT),
    "python_env": Key("python_env", normpath, *A_PATH, AN_ENVIRONMENT),
    "project_path": Key("project_path", normpath, *A_PATH, f"For example {PROJECT_PATH}; {AT_HOME}"),
    "ssh_port": Key("port", int, range(1, 65536), "a number from 1 to 65535", "Leave it out for SSH's own, 22."),
    "interface": Key("interface", str, *TEXT),
    "device": Key(
        "device", str, r"auto|mps|cpu|cuda(:[0-9]+)?", "auto, mps, cuda or cpu", "Leave it out, or set auto."
    ),
}
HOST_KEYS = tuple(KEYS)
DEFAULTS = ("ssh_user", "ssh_key_path", "python_env", "project_path")  # for all hosts that do not say otherwise
TOP_KEYS = ("master", "workers", *DEFAULTS)
PATHS = ("project_path", "python_env")  # in which {host} stands for the host's address


def load_hosts(path: Path | str) -> Hosts:
    """Read and check a hosts file. Raises ConfigError with the file, the line and the key."""
    return _Reader(Path(path)).read()


class _Reader:
    def __init__(self, path: Path):
        self.path = path
        try:
            self.text = path.read_text(encoding="utf-8-sig")
        except FileNotFoundError as error:
            what = f"{path}: there is no such hosts file{like(path)}"
            remedy = f"`multimac hosts pair` writes one. Or copy {EXAMPLE_FILE}, and put your own machines in it."
            raise ConfigError(what, remedy=remedy) from error
        except (OSError, ValueError) as error:  # ValueError: a name with a NUL, text that is not UTF-8
            remedy = "It must be UTF-8 text that you may read."
            raise ConfigError(f"{path}: cannot be read: {error}", remedy=remedy) from error

    def read(self) -> Hosts:
        values = self._parsed()
        self.check_keys(values, TOP_KEYS, "")
        for key in ("master", "workers"):
            if key not in values:
                raise self.wrong(f"{key!r} is missing", remedy=f'Add "{key}": see {EXAMPLE_FILE}.')
        if not isinstance(values["workers"], list):
            remedy = 'Put brackets around them: "workers": ["192.168.1.30"].'
            raise self.wrong("'workers' must be a list of addresses", "workers", remedy=remedy)
        defaults = {key: values[key] for key in DEFAULTS if key in values}
        master = self.host(values["master"], "master", defaults)
        workers = [self.host(value, f"workers[{i}]", defaults) for i, value in enumerate(values["workers"])]
        self.check_distinct([master, *workers])
        return Hosts(master=master, workers=tuple(workers))

    def _parsed(self) -> dict[str, Any]:
        remedy = f"Look for a comma, quote or bracket there; {EXAMPLE_FILE} shows how it should look."
        try:
            values = parse_json(self.text, object_pairs_hook=self._object)
        except json.JSONDecodeError as error:
            place = f"{self.path}:{error.lineno}"
            raise ConfigError(f"{place}: not JSON: {error.msg} (column {error.colno})", remedy=remedy) from error
        except ValueError as error:
            raise self.wrong(f"not JSON: {error}", remedy=f"See {EXAMPLE_FILE}.") from error
        if not isinstance(values, dict):
            raise self.wrong("the file must hold one object: {...}", remedy=f"See {EXAMPLE_FILE}.")
        return values

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, count in Counter(key for key, _ in pairs).items():
            if count > 1:
                raise self.wrong(f"key {key!r} appears twice", key, remedy="Remove one of them.")
        return dict(pairs)

    def host(self, told: Any, where: str, defaults: Mapping[str, Any]) -> Host:
        told = {"host": told} if isinstance(told, str) else told
        if not isinstance(told, dict) or "host" not in told:
            remedy = 'For example "192.168.1.30", or {"host": "192.168.1.30", "ssh_user": "anna"}.'
            place = next(iter(told), "workers") if isinstance(told, dict) else where.partition("[")[0]
            raise self.wrong(f"{where} must be an address, or an object with a 'host'", place, remedy=remedy)
        self.check_keys(told, HOST_KEYS, f"{where}: ")
        values = {KEYS[key].field: self.value(key, value, where) for key, value in {**defaults, **told}.items()}
        own = re.sub(r"[^\w.-]", "-", values["address"])
        host = Host(**values | {key: values[key].replace("{host}", own) for key in PATHS if key in values})
        if host.python_env == host.project_path:
            raise self.wrong(f"{where}: 'python_env' is the project folder itself", "python_env", remedy=AN_ENVIRONMENT)
        return host

    def value(self, key: str, told: Any, where: str) -> Any:
        known = KEYS[key]
        place = told if key == "host" and isinstance(told, str) and told else key
        if isinstance(told, str) and not told.isprintable():
            what = f"{where}: {key!r} holds a character that cannot be seen: {told!a}"
            raise self.wrong(what, place, remedy="Type it again.")
        if isinstance(known.fitting, range):
            fits = told is None or (type(told) is int and told in known.fitting)
        else:
            fits = isinstance(told, str) and re.fullmatch(known.fitting, told) is not None
        if not fits:
            what = f"{where}: {key!r} must be {known.words}, not {json.dumps(told)}"
            raise self.wrong(what, place, remedy=known.what_helps)
        return told if told is None else known.made_by(told)

    def check_keys(self, values: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
        for key in values:
            if key not in known:
                what = f"{where}unknown key {key!r}{nearest(key, known)}"
                raise self.wrong(what, key, remedy=f"Known keys: {', '.join(known)}.")

    def check_distinct(self, hosts: list[Host]) -> None:
        seen: dict[str, Host] = {}
        for host in hosts:
            other = seen.setdefault(host.address.lower(), host)
            if other is not host:
                remedy = "Remove one of them."
                if other.port != host.port:
                    remedy = "Give each a name of its own: Host, HostName and Port in ~/.ssh/config."
                elif other is hosts[0]:
                    remedy = "It is this machine, the master, which trains as well: name it only under 'master'."
                raise self.wrong(f"{host.address} is listed twice", host.address, remedy=remedy)

    def wrong(self, message: str, key: str = "", *, remedy: str = "") -> ConfigError:
        """An error at the last line that holds `key` in quotes."""
        lines = [number for number, line in enumerate(self.text.split("\n"), 1) if key and f'"{key}"' in line]
        line = f":{lines[-1]}" if lines else ""
        return ConfigError(f"{self.path}{line}: {message}", remedy=remedy)


def meeting_address(hosts: Hosts, remotes: Sequence[Remote]) -> str:
    """Return the address where the ranks meet: this machine's own IPv4 address towards the workers.

    Raises ConfigError if this machine is not the master.
    """
    check_is_this_machine(hosts.master)
    peer = hosts.workers[0].address if hosts.workers else "127.0.0.1"
    if hosts.master.interface or not remotes:
        return route_to(peer, interface=hosts.master.interface).address
    return remotes[0].local_address or route_to(peer).address


def address_towards(hosts: Hosts, remotes: Sequence[Remote]) -> str:
    """Do the same, even if this is not the master, whose interface is then none of this machine's."""
    try:
        return meeting_address(hosts, remotes)
    except ConfigError:
        return meeting_address(dataclasses.replace(hosts, master=Host(address="localhost")), remotes)


def check_is_this_machine(master: Host) -> None:
    """Raise ConfigError unless `master` is the machine that this runs on: the launcher must run there."""
    names = {socket.gethostname().lower(), socket.gethostname().split(".")[0].lower()}
    names |= {name + ".local" for name in names} | {"localhost"}
    if master.address.lower() in names:
        return
    own = {address for addresses in own_interfaces().values() for address in addresses}
    found = addresses_of(master.address)
    if not found & own:
        where = f" ({', '.join(sorted(found))})" if found - {master.address} else ""
        here = ", ".join(sorted(address for address in own if not address.startswith("127."))) or "127.0.0.1"
        raise ConfigError(
            f"master {master.address}{where} is not this machine",
            remedy=f'Run this on {master.address}, or set "master" to this machine: {socket.gethostname()} or {here}.',
        )
