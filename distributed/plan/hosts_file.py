"""`distributed_hosts.json`: which machines train, and how SSH reaches them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from posixpath import normpath
from typing import Any

from distributed.ssh.host import PROJECT_PATH, Host, Hosts
from exogym.config import nearest
from whisper_tuner.errors import ConfigError
from whisper_tuner.json_text import parse_json
from whisper_tuner.paths import expanded

HOSTS_FILE, EXAMPLE = "distributed_hosts.json", "distributed_hosts.example.json"
TEXT = (r".*\S.*", "text", "Put it between quotes, or leave it out.")
A_PATH = (r"(?!.*/\.\.(/|$))~?/.*[^/.].*", "a path from / or ~/")
AT_HOME = "~ is the home folder on that machine."
AN_ENVIRONMENT = f"For example {PROJECT_PATH}/.venv; {AT_HOME}"
# Of a host, by key: the field of Host, what makes its value; what fits, in words, and what to do if it does not.
KEYS = {
    "host": (
        "address",
        str,
        r"[^\s@/-][^\s@/]*",
        "an address",
        "For example 192.168.1.30. A user goes into 'ssh_user'.",
    ),
    "ssh_user": ("user", str, *TEXT),
    "ssh_key_path": ("key_path", expanded, *TEXT),
    "python_env": ("python_env", normpath, *A_PATH, AN_ENVIRONMENT),
    "project_path": ("project_path", normpath, *A_PATH, f"For example {PROJECT_PATH}; {AT_HOME}"),
    "ssh_port": ("port", int, range(1, 65536), "a number from 1 to 65535", "Leave it out for SSH's own, 22."),
    "interface": ("interface", str, *TEXT),
    "device": ("device", str, r"auto|mps|cpu|cuda(:[0-9]+)?", "auto, mps, cuda or cpu", "Leave it out, or set auto."),
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
            remedy = f"Copy {EXAMPLE}, and put your own machines in it."
            raise ConfigError(f"{path}: there is no such hosts file", remedy=remedy) from error
        except (OSError, ValueError) as error:  # ValueError: a name with a NUL, text that is not UTF-8
            remedy = "It must be UTF-8 text that you may read."
            raise ConfigError(f"{path}: cannot be read: {error}", remedy=remedy) from error

    def read(self) -> Hosts:
        values = self._parsed()
        self.check_keys(values, TOP_KEYS, "")
        for key in ("master", "workers"):
            if key not in values:
                raise self.wrong(f"{key!r} is missing", remedy=f'Add "{key}": see {EXAMPLE}.')
        if not isinstance(values["workers"], list):
            remedy = 'Put brackets around them: "workers": ["192.168.1.30"].'
            raise self.wrong("'workers' must be a list of addresses", "workers", remedy=remedy)
        defaults = {key: values[key] for key in DEFAULTS if key in values}
        master = self.host(values["master"], "master", defaults)
        workers = [self.host(value, f"workers[{i}]", defaults) for i, value in enumerate(values["workers"])]
        self.check_distinct([master, *workers])
        return Hosts(master=master, workers=tuple(workers))

    def _parsed(self) -> dict[str, Any]:
        remedy = f"Look for a comma, quote or bracket there; {EXAMPLE} shows how it should look."
        try:
            values = parse_json(self.text, object_pairs_hook=self._object)
        except json.JSONDecodeError as error:
            place = f"{self.path}:{error.lineno}"
            raise ConfigError(f"{place}: not JSON: {error.msg} (column {error.colno})", remedy=remedy) from error
        except ValueError as error:
            raise self.wrong(f"not JSON: {error}", remedy=f"See {EXAMPLE}.") from error
        if not isinstance(values, dict):
            raise self.wrong("the file must hold one object: {...}", remedy=f"See {EXAMPLE}.")
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
        values = {KEYS[key][0]: self.value(key, value, where) for key, value in {**defaults, **told}.items()}
        own = re.sub(r"[^\w.-]", "-", values["address"])
        host = Host(**values | {key: values[key].replace("{host}", own) for key in PATHS if key in values})
        if host.python_env == host.project_path:
            raise self.wrong(f"{where}: 'python_env' is the project folder itself", "python_env", remedy=AN_ENVIRONMENT)
        return host

    def value(self, key: str, told: Any, where: str) -> Any:
        _, made_by, fitting, words, what_helps = KEYS[key]
        place = told if key == "host" and isinstance(told, str) and told else key
        if isinstance(told, str) and not told.isprintable():
            what = f"{where}: {key!r} holds a character that cannot be seen: {told!a}"
            raise self.wrong(what, place, remedy="Type it again.")
        if not _fits(told, fitting):
            what = f"{where}: {key!r} must be {words}, not {json.dumps(told)}"
            raise self.wrong(what, place, remedy=what_helps)
        return told if told is None else made_by(told)

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
                    remedy = "The master trains as well: name it only under 'master'."
                raise self.wrong(f"{host.address} is listed twice", host.address, remedy=remedy)

    def wrong(self, message: str, key: str = "", *, remedy: str = "") -> ConfigError:
        """An error at the last line that holds `key` in quotes."""
        lines = [number for number, line in enumerate(self.text.split("\n"), 1) if key and f'"{key}"' in line]
        line = f":{lines[-1]}" if lines else ""
        return ConfigError(f"{self.path}{line}: {message}", remedy=remedy)


def _fits(value: Any, fitting: str | range) -> bool:
    """A range is of whole numbers, and null is as good as nothing; a pattern is of texts."""
    if isinstance(fitting, range):
        return value is None or (type(value) is int and value in fitting)
    return isinstance(value, str) and re.fullmatch(fitting, value) is not None
