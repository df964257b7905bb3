"""One machine of the hosts file, and all of them in rank order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

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
