"""One machine of the hosts file, and how the user's own ssh would reach it: `ssh -G` reads ~/.ssh/config."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from whisper_tuner.errors import HostError, MissingProgram
from whisper_tuner.files import expanded

PROJECT_PATH = "~/multimac-whisper"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine. None: as `~/.ssh/config` says (user, key_path, port), or chosen there (interface, device).

    project_path and python_env are paths on the host, `~` its own home; python_env is a venv, or a python.
    """

    address: str
    user: str | None = None
    key_path: Path | None = None
    port: int | None = None
    python_env: str | None = None
    project_path: str = PROJECT_PATH
    interface: str | None = None
    device: str | None = None

    @property
    def environment(self) -> str:
        """The virtual environment's folder, or the python named instead of one."""
        return self.python_env or f"{self.project_path}/.venv"

    @property
    def python(self) -> str:
        """The interpreter that trains, `~` not expanded."""
        path = PurePosixPath(self.environment)
        return str(path if re.fullmatch(r"python[\d.]*", path.name) else path / "bin" / "python")


@dataclass(frozen=True, kw_only=True)
class Hosts:
    master: Host
    workers: tuple[Host, ...]

    @property
    def all(self) -> tuple[Host, ...]:
        """All hosts in rank order: the master is rank 0."""
        return (self.master, *self.workers)


@dataclass(frozen=True, kw_only=True)
class SshSettings:
    """How to reach a host. agent: the agent's socket, None for no agent. jumps: the first one first."""

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
    def known_as(self) -> str:
        """The name that known_hosts has it under."""
        return self.key_alias or (self.hostname if self.port == 22 else f"[{self.hostname}]:{self.port}")

    @property
    def target(self) -> str:
        """The words that a person types after `ssh`."""
        port = f"-p {self.port} " if self.port != 22 else ""
        return f"{port}{self.user}@{self.host}"


def resolve(host: Host) -> SshSettings:
    """Read a host's settings: what its hosts file says wins over ~/.ssh/config. Raises HostError, MissingProgram."""
    said = _ask_ssh(host)

    def first(key: str) -> str | None:
        """Return the first value of a key; None where ssh says `none`."""
        value = said.get(key, ["none"])[0]
        return None if value.lower() == "none" else value

    agent = said.get("identityagent", ["SSH_AUTH_SOCK"])[0]  # a path, or the variable that holds one
    agent = "$SSH_AUTH_SOCK" if agent == "SSH_AUTH_SOCK" else agent
    socket = os.environ.get(agent[1:], "") if agent.startswith("$") else agent.strip('"')
    known = " ".join([*said.get("userknownhostsfile", []), *said.get("globalknownhostsfile", [])])
    try:
        return SshSettings(
            host=host.address,
            hostname=said["hostname"][0],
            user=said["user"][0],
            port=_port(said["port"][0]),
            # -i only adds to the list of the configuration file.
            identities=(host.key_path,) if host.key_path else tuple(map(_expand, said.get("identityfile", []))),
            identities_only=first("identitiesonly") == "yes" or host.key_path is not None,
            agent=_expand(socket) if socket and agent.lower() != "none" else None,
            key_alias=first("hostkeyalias"),
            known_hosts=tuple(_expand(path) for path in known.split() if path != "none"),
            jumps=tuple(_parse_jump(jump) for jump in (first("proxyjump") or "").split(",") if jump),
            proxy_command=first("proxycommand"),
        )
    except (KeyError, ValueError) as error:
        why = f"it names no {error.args[0]}" if isinstance(error, KeyError) else error
        remedy = f"Compare `ssh -G {host.address}`; it must be OpenSSH's ssh."
        raise HostError(host.address, f"what `ssh -G` says is not understood: {why}", remedy=remedy) from error


def _ask_ssh(host: Host) -> dict[str, list[str]]:
    """Ask `ssh -G`: some keys come more than once."""
    command = ["ssh", "-G"]
    command += ["-l", host.user] if host.user else []
    command += ["-p", str(host.port)] if host.port else []
    command += ["-i", str(host.key_path)] if host.key_path else []
    try:
        result = subprocess.run(
            [*command, "--", host.address],
            capture_output=True,
            timeout=20,
            encoding="utf-8",  # as text: ssh ends its lines with \r\n
            errors="surrogateescape",
        )
    except FileNotFoundError as error:
        raise MissingProgram("ssh is not installed", remedy="Run: apt-get install openssh-client") from error
    except subprocess.TimeoutExpired as error:
        raise HostError(host.address, "`ssh -G` does not answer", remedy="Look for a slow Match exec.") from error
    if result.returncode:
        raise HostError(
            host.address, f"ssh refuses its settings: {result.stderr.strip()}", remedy="Correct ~/.ssh/config."
        )
    values: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key, []).append(value)
    return values


def _expand(path: str) -> Path:
    return expanded(path.replace("%d", str(Path.home())))


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 65536):
        raise ValueError(f"{text!r} is no port")
    return int(text)


def _parse_jump(jump: str) -> Host:
    """Read `[user@]host[:port]` of ProxyJump."""
    user, _, rest = jump.removeprefix("ssh://").rpartition("@")
    name, _, port = rest.rpartition(":") if rest.count(":") == 1 else (rest, "", "")
    return Host(address=name.strip("[]"), user=user or None, port=_port(port) if port else None)
