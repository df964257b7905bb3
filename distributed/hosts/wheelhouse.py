"""Wheels for a host that cannot reach the package registry, fetched here with this machine's pip settings."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.tags import mac_platforms

from whisper_tuner.errors import HostError

from .paths import PROJECT

CACHE = PROJECT / ".cache" / "wheelhouse"
COMPLETE = ".complete"
FILL_TIMEOUT_S = 3600  # torch and what it needs are gigabytes
QUIET = ("--quiet", "--disable-pip-version-check", "--no-input")
_filling = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Target:
    """What wheels must fit: Python (3, 11), system, machine, and the version of macOS or glibc."""

    python: tuple[int, int]
    system: str
    machine: str
    release: tuple[int, int]

    @property
    def tag(self) -> str:
        version = "".join(map(str, self.python))
        return f"cp{version}-{self.system.lower()}_{self.release[0]}_{self.release[1]}_{self.machine}"

    def takes_wheels_of(self, other: Target) -> bool:
        """Whether what pip chooses on `other` runs here as well."""
        same = (self.python, self.system, self.machine) == (other.python, other.system, other.machine)
        return same and other.release <= self.release

    def platforms(self) -> list[str]:
        """pip's --platform names, newest first."""
        if self.system == "Darwin":
            return list(mac_platforms(self.release, self.machine))
        newest = self.release[1] if self.release[0] == 2 else 17
        names = [f"manylinux_2_{minor}_{self.machine}" for minor in range(newest, 4, -1)]
        return [*names, f"manylinux2014_{self.machine}", f"linux_{self.machine}"]


def target_of(version: Sequence[int], system: str, machine: str, release: str) -> Target:
    """release: macOS's version, or glibc's."""
    numbers = [int(part) for part in release.split(".")[:2] if part.isdigit()]
    major, minor = (*numbers, 0, 0)[:2]
    return Target(python=(version[0], version[1]), system=system, machine=machine, release=(major, minor))


def own_target() -> Target:
    release = platform.mac_ver()[0] or platform.libc_ver()[1]
    machine = sysconfig.get_platform().rpartition("-")[2] if platform.system() == "Linux" else platform.machine()
    return target_of(sys.version_info[:2], platform.system(), machine, release)


def fill(host: str, target: Target, requirements: Path, constraints: Path) -> list[Path]:
    """The wheels of the requirements and all that they need, from the cache or the registry. Raises HostError."""
    wanted = hashlib.sha256(requirements.read_bytes() + constraints.read_bytes()).hexdigest()
    folder = CACHE / target.tag / wanted[:16]
    with _filling:
        if not (folder / COMPLETE).exists():
            download(host, target, folder, requirements, constraints)
            (folder / COMPLETE).touch()
            for other in folder.parent.iterdir():
                if other != folder:
                    shutil.rmtree(other)
    return sorted(folder.glob("*.whl"))


def download(host: str, target: Target, folder: Path, requirements: Path, constraints: Path) -> None:
    """`pip wheel` where this machine's wheels fit the host, for it builds what has none; else `pip download`."""
    folder.mkdir(parents=True, exist_ok=True)
    earlier = [word for other in folder.parent.iterdir() for word in ("--find-links", str(other))]
    files = ["--requirement", str(requirements), "--constraint", str(constraints)]
    if target.takes_wheels_of(own_target()):
        command = ["wheel", "--wheel-dir", str(folder)]
    else:
        version = ".".join(map(str, target.python))
        command = ["download", "--dest", str(folder), "--only-binary=:all:", "--python-version", version]
        command += ["--implementation", "cp", *(word for name in target.platforms() for word in ("--platform", name))]
    line = [sys.executable, "-m", "pip", *command, *QUIET, *earlier, *files]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=FILL_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise HostError(host, f"its wheels did not arrive within {FILL_TIMEOUT_S} s") from error
    if done.returncode:
        raise HostError(
            host,
            f"this machine cannot fetch the wheels for {target.tag}: {done.stderr.strip()[-1500:]}",
            remedy="The host has no way to the package registry, so this machine needs one: check pip's settings here.",
        )
