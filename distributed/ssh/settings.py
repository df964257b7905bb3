"""How to reach a host, as the user's own ssh would: `ssh -G` reads ~/.ssh/config, Include and Match included."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from whisper_tuner.errors import HostError, MissingProgram
from whisper_tuner.paths import expanded

from .host import Host


@dataclass(frozen=True, kw_only=True)
class SshSettings:
    """agent: the agent's socket, None for no agent. jumps: `[user@]host[:port]`, the first one first."""

    host: str
    hostname: str
    user: str
    port: int
    identities: tuple[Path, ...]
    identities_only: bool
    agent: Path | None
    key_alias: str | None
    known_hosts: tuple[Path, ...]
    jumps: tuple[str, ...]
    proxy_command: str | None

    @property
    def target(self) -> str:
        """What a person types after `ssh`."""
        port = f"-p {self.port} " if self.port != 22 else ""
        return f"{port}{self.user}@{self.host}"


def resolve(host: Host) -> SshSettings:
    """Settings for a host: what its hosts file says wins over ~/.ssh/config. Raises HostError, MissingProgram."""
    values = query(host)
    hostname, user, port = (needed(host, values, key) for key in ("hostname", "user", "port"))
    return SshSettings(
        host=host.address,
        hostname=hostname,
        user=user,
        port=port_number(host.address, port),
        identities=tuple(expand(path) for path in values.get("identityfile", [])),
        identities_only=values.get("identitiesonly", ["no"])[0] == "yes" or host.key_path is not None,
        agent=agent_socket(values),
        key_alias=first(values, "hostkeyalias"),
        known_hosts=tuple(expand(path) for path in known_hosts_files(values)),
        jumps=tuple(jump for jump in (first(values, "proxyjump") or "").split(",") if jump),
        proxy_command=first(values, "proxycommand"),
    )


def query(host: Host) -> dict[str, list[str]]:
    command = ["ssh", "-G"]
    command += ["-l", host.user] if host.user else []
    command += ["-p", str(host.port)] if host.port else []
    # -o wins over the configuration file, where -i only adds to its list.
    command += ["-i", str(host.key_path)] if host.key_path else []
    try:
        result = subprocess.run(
            [*command, "--", host.address], capture_output=True, encoding="utf-8", errors="surrogateescape", timeout=20
        )
    except FileNotFoundError as error:
        raise MissingProgram("ssh is not installed", remedy="apt-get install openssh-client") from error
    except subprocess.TimeoutExpired as error:
        raise HostError(host.address, "`ssh -G` does not answer", remedy="Look for a slow Match exec.") from error
    if result.returncode:
        raise HostError(
            host.address, f"ssh refuses its settings: {result.stderr.strip()}", remedy="Mend ~/.ssh/config."
        )
    values: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key, []).append(value)
    if host.key_path:
        values["identityfile"] = [str(host.key_path)]
    return values


def agent_socket(values: dict[str, list[str]]) -> Path | None:
    named = first(values, "identityagent") or "SSH_AUTH_SOCK"
    if named.startswith("$"):
        named = os.environ.get(named[1:], "")
    elif named == "SSH_AUTH_SOCK":
        named = os.environ.get("SSH_AUTH_SOCK", "")
    return expand(named.strip('"')) if named else None


def known_hosts_files(values: dict[str, list[str]]) -> list[str]:
    both = values.get("userknownhostsfile", []) + values.get("globalknownhostsfile", [])
    return [path for line in both for path in line.split()]


def needed(host: Host, values: dict[str, list[str]], key: str) -> str:
    value = values.get(key, [""])[0]
    if not value:
        remedy = f"Compare `ssh -G {host.address}`; it must be OpenSSH's ssh."
        raise HostError(host.address, f"`ssh -G` names no {key}", remedy=remedy)
    return value


def port_number(host: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 65536):
        raise HostError(host, f"{text!r} is no port", remedy="Mend ~/.ssh/config.")
    return int(text)


def first(values: dict[str, list[str]], key: str) -> str | None:
    """The first value of a key; None where ssh says `none`."""
    value = values.get(key, ["none"])[0]
    return None if value.lower() == "none" else value


def expand(path: str) -> Path:
    return expanded(path.replace("%d", str(Path.home())))


def parse_jump(jump: str) -> Host:
    """`[user@]host[:port]` of ProxyJump."""
    user, _, rest = jump.removeprefix("ssh://").rpartition("@")
    name, _, port = rest.rpartition(":") if rest.count(":") == 1 else (rest, "", "")
    return Host(address=name.strip("[]"), user=user or None, port=port_number(jump, port) if port else None)
