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
    """agent: the agent's socket, None for no agent. jumps: the first one first."""

    host: str
    hostname: str
    user: str
    port: int
    identities: tuple[Path, ...]
    identities_only: bool
    agent: Path | None
    key_alias: str | None
    known_hosts: tuple[Path, ...]
    jumps: tuple[Host, ...]
    proxy_command: str | None

    @property
    def target(self) -> str:
        """The words that a person types after `ssh`."""
        port = f"-p {self.port} " if self.port != 22 else ""
        return f"{port}{self.user}@{self.host}"


def resolve(host: Host) -> SshSettings:
    """Read a host's settings: what its hosts file says wins over ~/.ssh/config. Raises HostError, MissingProgram."""
    said = query(host)
    known = " ".join([*said.get("userknownhostsfile", []), *said.get("globalknownhostsfile", [])])
    try:
        return SshSettings(
            host=host.address,
            hostname=said["hostname"][0],
            user=said["user"][0],
            port=port_number(said["port"][0]),
            # -i only adds to the list of the configuration file.
            identities=(host.key_path,) if host.key_path else tuple(map(expand, said.get("identityfile", []))),
            identities_only=first(said, "identitiesonly") == "yes" or host.key_path is not None,
            agent=agent_socket(said.get("identityagent", ["SSH_AUTH_SOCK"])[0]),
            key_alias=first(said, "hostkeyalias"),
            known_hosts=tuple(expand(path) for path in known.split() if path != "none"),
            jumps=tuple(parse_jump(jump) for jump in (first(said, "proxyjump") or "").split(",") if jump),
            proxy_command=first(said, "proxycommand"),
        )
    except (KeyError, ValueError) as error:
        why = f"it names no {error.args[0]}" if isinstance(error, KeyError) else error
        remedy = f"Compare `ssh -G {host.address}`; it must be OpenSSH's ssh."
        raise HostError(host.address, f"what `ssh -G` says is not understood: {why}", remedy=remedy) from error


def query(host: Host) -> dict[str, list[str]]:
    """Ask `ssh -G`: some keys come more than once."""
    command = ["ssh", "-G"]
    command += ["-l", host.user] if host.user else []
    command += ["-p", str(host.port)] if host.port else []
    command += ["-i", str(host.key_path)] if host.key_path else []
    encoding = {"encoding": "utf-8", "errors": "surrogateescape"}
    try:
        result = subprocess.run([*command, "--", host.address], capture_output=True, timeout=20, **encoding)
    except FileNotFoundError as error:
        raise MissingProgram("ssh is not installed", remedy="apt-get install openssh-client") from error
    except subprocess.TimeoutExpired as error:
        raise HostError(host.address, "`ssh -G` does not answer", remedy="Look for a slow Match exec.") from error
    if result.returncode:
        said = result.stderr.strip()
        raise HostError(host.address, f"ssh refuses its settings: {said}", remedy="Correct ~/.ssh/config.")
    values: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key, []).append(value)
    return values


def first(said: dict[str, list[str]], key: str) -> str | None:
    """Return the first value of a key; None where ssh says `none`."""
    value = said.get(key, ["none"])[0]
    return None if value.lower() == "none" else value


def agent_socket(named: str) -> Path | None:
    """Find the socket. named: IdentityAgent, a path or the variable that holds one."""
    if named.lower() == "none":
        return None
    named = "$SSH_AUTH_SOCK" if named == "SSH_AUTH_SOCK" else named
    path = os.environ.get(named[1:], "") if named.startswith("$") else named.strip('"')
    return expand(path) if path else None


def port_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 65536):
        raise ValueError(f"{text!r} is no port")
    return int(text)


def expand(path: str) -> Path:
    return expanded(path.replace("%d", str(Path.home())))


def parse_jump(jump: str) -> Host:
    """Read `[user@]host[:port]` of ProxyJump."""
    user, _, rest = jump.removeprefix("ssh://").rpartition("@")
    name, _, port = rest.rpartition(":") if rest.count(":") == 1 else (rest, "", "")
    return Host(address=name.strip("[]"), user=user or None, port=port_number(port) if port else None)
