"""Wheels for a host that cannot reach the package registry, fetched here with this machine's pip settings."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from packaging.tags import mac_platforms
from packaging.utils import parse_wheel_filename

from whisper_tuner.errors import HostError
from whisper_tuner.files import below, write_atomically

from .paths import PROJECT

CACHE = PROJECT / ".cache" / "wheelhouse"
COMPLETE = "wheels.txt"  # is there once all wheels are: requirements for pip, with the hash of each
BLOCK = 4096  # bytes: a file takes whole ones
UNRESOLVED = ("Temporary failure in name resolution", "nodename nor servname provided")  # on Linux, on a Mac
QUIET = ("--quiet", "--disable-pip-version-check", "--no-input")
_filling = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Target:
    """The machine that wheels must fit: Python (3, 11), system, machine, and the version of macOS or glibc."""

    python: tuple[int, int]
    system: str
    machine: str
    release: tuple[int, int]

    @property
    def tag(self) -> str:
        version = "".join(map(str, self.python))
        return f"cp{version}-{self.system.lower()}_{self.release[0]}_{self.release[1]}_{self.machine}"

    def platforms(self) -> list[str]:
        """pip's --platform names, newest first."""
        if self.system == "Darwin":
            return list(mac_platforms(self.release, self.machine))
        newest = self.release[1] if self.release[0] == 2 else 17
        names = [f"manylinux_2_{minor}_{self.machine}" for minor in range(newest, 4, -1)]
        return [*names, f"manylinux2014_{self.machine}", f"linux_{self.machine}"]


def target_of(facts: dict[str, Any]) -> Target:
    """Read the target of a host and the Python of its agent from the agent's facts."""
    system, machine = facts["system"], facts["machine"]
    release = facts["release"] if system == "Darwin" else facts["libc"]
    numbers = [int(part) for part in release.split(".")[:2] if part.isdigit()]
    major, minor = (*numbers, 0, 0)[:2]
    return Target(python=tuple(facts["python"][:2]), system=system, machine=machine, release=(major, minor))


def fill(host: str, target: Target, requirements: Path, constraints: Path) -> list[Path]:
    """Get the wheels of the requirements and all that they need, from the cache or the registry. Raises HostError."""
    wanted = hashlib.sha256(requirements.read_bytes() + constraints.read_bytes()).hexdigest()
    try:
        folder = below(CACHE, target.tag) / wanted[:16]
    except ValueError as error:
        raise HostError(host, f"what it says of itself cannot be: {error}") from None
    with _filling:
        if not (folder / COMPLETE).exists():
            download(host, target, folder, requirements, constraints)
            lines = []
            for wheel in sorted(folder.glob("*.whl")):
                name, version, *_ = parse_wheel_filename(wheel.name)
                digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
                lines.append(f"{name}==={version} --hash=sha256:{digest}\n")
            write_atomically(folder / COMPLETE, "".join(lines), durable=False)
            for other in folder.parent.iterdir():
                if other != folder:
                    shutil.rmtree(other)
    return sorted(folder.glob("*.whl"))


def download(host: str, target: Target, folder: Path, requirements: Path, constraints: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    version = ".".join(map(str, target.python))
    command = ["download", "--dest", str(folder), "--only-binary=:all:", "--implementation", "cp", *QUIET]
    command += ["--python-version", version, "--requirement", str(requirements), "--constraint", str(constraints)]
    command += [word for name in target.platforms() for word in ("--platform", name)]
    command += [word for earlier in folder.parent.iterdir() for word in ("--find-links", str(earlier))]
    done = subprocess.run([sys.executable, "-m", "pip", *command], capture_output=True, text=True)
    if done.returncode:
        raise HostError(
            host,
            f"this machine cannot fetch the wheels for {target.tag}: {reason(done.stderr)}",
            remedy="The host cannot reach the registry of packages, so this machine must: connect it, or check pip.",
        )


def reason(said: str) -> str:
    """Return what pip said, without its tries; where it could not resolve a name, its own conclusion is wrong."""
    lines = said.strip().splitlines()
    told = "\n".join(line for line in lines if not line.startswith("WARNING: Retrying"))[-1500:]
    unresolved = any(words in said for words in UNRESOLVED)
    return "a server's name was not resolved: is there internet here?" if unresolved else told


def unpacked(wheels: Iterable[Path], names: Collection[str]) -> int:
    """Count the bytes that those of these packages take on a disk."""
    total = 0
    for wheel in wheels:
        if parse_wheel_filename(wheel.name)[0] in names:
            with ZipFile(wheel) as file:
                total += sum(-(-part.file_size // BLOCK) * BLOCK for part in file.infolist())
    return total
