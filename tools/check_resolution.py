"""Do all dependencies have wheels for a Mac? `make resolve` asks the package index, with uv, for each minor version.

Nothing is installed or built. Exit status: 0 if all resolve, 1 if one does not, 75 if the index cannot be reached.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet

PROJECT = Path(__file__).resolve().parent.parent
PLATFORM, MACOS = "aarch64-apple-darwin", "14.0"  # torch has no wheels for an earlier macOS
NEWEST_MINOR = 30
SHOWN = ("torch", "transformers", "numpy", "librosa")
NO_INDEX = re.compile(r"Failed to fetch|Could not connect|dns error|error sending request|offline", re.IGNORECASE)
NOT_REACHED = 75


def main() -> int:
    uv = find_uv()
    if uv is None:
        print("uv is not installed: pip install uv", file=sys.stderr)
        return NOT_REACHED
    failed = 0
    for minor in minors():
        done = resolve(uv, minor)
        if done.returncode and NO_INDEX.search(done.stderr):
            print(f"the package index cannot be reached: {done.stderr.strip()[-500:]}", file=sys.stderr)
            return NOT_REACHED
        failed += done.returncode != 0
        print(f"Python 3.{minor}, macOS {MACOS}, arm64: {described(done)}", flush=True)
    return 1 if failed else 0


def find_uv() -> str | None:
    return shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


def minors() -> list[int]:
    """Of Python 3, as pyproject.toml says."""
    asked = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    return [minor for minor in range(NEWEST_MINOR) if SpecifierSet(asked).contains(f"3.{minor}.0")]


def resolve(uv: str, minor: int, project: Path = PROJECT) -> subprocess.CompletedProcess[str]:
    """A Python of that version need not be here."""
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--only-binary", ":all:"]
    command += ["--python-platform", PLATFORM, "--python-version", f"3.{minor}", "pyproject.toml"]
    env = os.environ | {"MACOSX_DEPLOYMENT_TARGET": MACOS, "UV_PYTHON_DOWNLOADS": "never", "UV_SYSTEM_CERTS": "1"}
    return subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)


def described(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        return f"does not resolve\n{done.stderr.strip()}"
    pins = dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)
    return f"{len(pins)} packages, all as wheels; " + ", ".join(
        f"{name} {pins[name]}" for name in SHOWN if name in pins
    )


if __name__ == "__main__":
    sys.exit(main())
