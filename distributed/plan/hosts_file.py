"""`distributed_hosts.json`: which machines train, and how SSH reaches them."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from distributed.ssh.host import PROJECT_PATH, Host, Hosts
from whisper_tuner.errors import ConfigError
from whisper_tuner.json_text import parse_json
from whisper_tuner.paths import expanded

DEVICES = re.compile(r"auto|mps|cpu|cuda(:[0-9]+)?")
EXAMPLE = "distributed_hosts.example.json"
TOP_KEYS = ("master", "workers", "ssh_user", "ssh_key_path", "python_env", "project_path")
HOST_KEYS = ("host", "ssh_user", "ssh_key_path", "python_env", "project_path", "ssh_port", "interface", "device")


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
            raise ConfigError(
                f"{path}: cannot be read: {error}", remedy="It must be UTF-8 text that you may read."
            ) from error

    def read(self) -> Hosts:
        try:
            values = parse_json(self.text, object_pairs_hook=self._object)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{self.path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})",
                remedy=f"Look for a comma, quote or bracket there; {EXAMPLE} shows how it should look.",
            ) from error
        except ValueError as error:
            raise self.wrong(f"not JSON: {error}", remedy=f"See {EXAMPLE}.") from error
        if not isinstance(values, dict):
            raise self.wrong("the file must hold one object: {...}", remedy=f"See {EXAMPLE}.")
        self.check_keys(values, TOP_KEYS, "")
        for key in ("master", "workers"):
            if key not in values:
                raise self.wrong(f"{key!r} is missing", remedy=f'Add "{key}": see {EXAMPLE}.')
        if not isinstance(values["workers"], list):
            remedy = 'Put brackets around them: "workers": ["192.168.1.30"].'
            raise self.wrong("'workers' must be a list of addresses", "workers", remedy=remedy)
        defaults = {key: values[key] for key in TOP_KEYS[2:] if key in values}
        master = self.host(values["master"], "master", defaults)
        workers = [self.host(value, f"workers[{i}]", defaults) for i, value in enumerate(values["workers"])]
        self.check_distinct([master, *workers])
        return Hosts(master=master, workers=tuple(workers))

    def host(self, value: object, where: str, defaults: Mapping[str, Any]) -> Host:
        if isinstance(value, str):
            value = {"host": value}
        if not isinstance(value, dict):
            raise self.wrong(
                f"{where} must be an address or an object",
                where.partition("[")[0],
                remedy='For example "192.168.1.30", or {"host": "192.168.1.30", "ssh_user": "anna"}.',
            )
        self.check_keys(value, HOST_KEYS, where)
        if "host" not in value:
            raise self.wrong(
                f"{where}: 'host' is missing",
                next(iter(value), "workers"),
                remedy='Add "host": the address of that machine.',
            )
        merged = {**defaults, **value}
        address = self.string(merged, "host", where)
        if re.search(r"[\s@/]|^-", address):
            raise self.wrong(
                f"{where}: {address!r} is not an address", address, remedy="The user goes into 'ssh_user'."
            )
        key = self.string(merged, "ssh_key_path", where)
        return Host(
            address=address,
            user=self.string(merged, "ssh_user", where),
            key_path=expanded(key) if key else None,
            port=self.port(merged, where),
            python_env=self.path_on_host(merged, "python_env", where),
            project_path=self.path_on_host(merged, "project_path", where) or PROJECT_PATH,
            interface=self.string(merged, "interface", where),
            device=self.device(merged, where),
        )

    def string(self, values: Mapping[str, Any], key: str, where: str) -> str | None:
        value = values.get(key)
        if key in values and (not isinstance(value, str) or not value.strip()):
            remedy = "Put it between quotes, or leave it out."
            raise self.wrong(f"{where}: {key!r} must be a text, not {json.dumps(value)}", key, remedy=remedy)
        if value and not value.isprintable():
            raise self.wrong(f"{where}: {key!r} holds what cannot be seen: {value!a}", key, remedy="Type it anew.")
        return value

    def path_on_host(self, values: Mapping[str, Any], key: str, where: str) -> str | None:
        path = self.string(values, key, where)
        if path is None:
            return None
        if not path.startswith(("/", "~/")) or ".." in PurePosixPath(path).parts or len(PurePosixPath(path).parts) < 2:
            name = PurePosixPath(path).name
            remedy = f"For example ~/{name if name.strip('.~') else 'tuner'}; ~ is the home folder on that machine."
            raise self.wrong(f"{where}: {key!r} must be a path from / or ~/, not {path!r}", key, remedy=remedy)
        return str(PurePosixPath(path))

    def port(self, values: Mapping[str, Any], where: str) -> int | None:
        port = values.get("ssh_port")
        if port is not None and (type(port) is not int or not 0 < port < 65536):
            raise self.wrong(
                f"{where}: 'ssh_port' must be a number from 1 to 65535, not {json.dumps(port)}",
                "ssh_port",
                remedy="Leave it out for SSH's own, 22.",
            )
        return port

    def device(self, values: Mapping[str, Any], where: str) -> str | None:
        device = self.string(values, "device", where)
        if device is not None and not DEVICES.fullmatch(device):
            remedy = "Leave it out, or set auto: the machine's GPU if it has one."
            raise self.wrong(
                f"{where}: 'device' must be auto, mps, cuda or cpu, not {device!r}", "device", remedy=remedy
            )
        return device

    def check_keys(self, values: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
        for key in values:
            if key not in known:
                nearest = difflib.get_close_matches(key, known, n=1)
                hint = f"Did you mean {nearest[0]!r}?" if nearest else f"Known keys: {', '.join(known)}."
                raise self.wrong(f"{where + ': ' if where else ''}unknown key {key!r}", key, remedy=hint)

    def check_distinct(self, hosts: list[Host]) -> None:
        seen: dict[str, Host] = {}
        for host in hosts:
            other = seen.setdefault(host.address.lower(), host)
            if other is not host:
                if other.port != host.port:
                    remedy = "Give each a name of its own: Host, HostName and Port in ~/.ssh/config."
                elif other is hosts[0]:
                    remedy = "The master trains as well: name it only under 'master'."
                else:
                    remedy = "Remove one of them."
                raise self.wrong(f"{host.address} is listed twice", host.address, remedy=remedy)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, count in Counter(key for key, _ in pairs).items():
            if count > 1:
                raise self.wrong(f"key {key!r} stands twice", key, remedy="Remove one of them.")
        return dict(pairs)

    def wrong(self, message: str, key: str = "", *, remedy: str = "") -> ConfigError:
        """An error at the last line that holds `key` in quotes."""
        lines = [number for number, line in enumerate(self.text.split("\n"), 1) if key and f'"{key}"' in line]
        line = f":{lines[-1]}" if lines else ""
        return ConfigError(f"{self.path}{line}: {message}", remedy=remedy)
