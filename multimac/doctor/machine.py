"""The quick checks of `multimac doctor`: this machine, its Python and its packages.

Packages that may be missing are imported inside the checks: then that is a row of the table, not a traceback.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from urllib.parse import unquote

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from distributed.hosts.paths import PROJECT
from whisper_tuner.text import size

from . import macos as mac
from .checks import Check, Finding, ok, problem, warning

GB = 1_000_000_000
OURS = ("distributed", "exogym", "whisper_tuner", "cli_typer", "wizard")
ENVIRONMENT = re.compile(
    r"PYTHONPATH|PYTHONHOME|GLOO_\w+|MASTER_(ADDR|PORT)|RANK|WORLD_SIZE|LOCAL_RANK|PYTORCH_\w+|CUDA_VISIBLE_DEVICES|"
    r"OMP_NUM_THREADS|MKL_NUM_THREADS|VECLIB_MAXIMUM_THREADS|TORCH_\w+|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE"
)
BITES = {
    "PYTHONPATH": "other copies of packages may be loaded",
    "PYTHONHOME": "python takes its library from elsewhere",
    "GLOO_SOCKET_IFNAME": "it is overridden: name an interface in the hosts file",
    "PYTORCH_ENABLE_MPS_FALLBACK": "what the GPU cannot do runs on the CPU, slowly and without a word",
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0 lifts the limit on GPU memory, and macOS may freeze",
    "MASTER_ADDR": "left over from another launcher",
    "WORLD_SIZE": "left over from another launcher",
    "RANK": "left over from another launcher",
}


def machine_checks(runs: Path) -> list[Check]:
    return [
        Check("system", check_system),
        Check("python", check_python),
        Check("packages", check_packages),
        Check("rival packages", check_rivals),
        Check("memory", check_memory),
        Check("disk", lambda: check_disk(PROJECT, runs)),
        Check("project folder", lambda: check_folders(PROJECT, runs)),
        Check("audio programs", check_audio_programs),
        Check("environment", lambda: check_environment(os.environ)),
    ]


def check_system() -> Finding:
    cores = f"{os.cpu_count()} cores"
    if not mac.is_mac():
        return ok(f"{platform.system()} {platform.release()}, {platform.machine()}, {cores}")
    return judge_mac(platform.mac_ver()[0], platform.machine(), mac.translated(), mac.hardware(), cores)


def judge_mac(release: str, machine: str, translated: bool | None, hardware: mac.Hardware, cores: str) -> Finding:
    parts = (hardware.chip, hardware.model, hardware.memory and f"{hardware.memory} memory")
    named = ", ".join(part for part in parts if part) or "hardware unknown (system_profiler was silent)"
    detail = f"macOS {release}, {named}, {cores}"
    if machine == "x86_64" and not translated:
        return problem(f"{detail}: an Intel Mac", "There is no current torch for Intel Macs: use one with an M chip.")
    if release and int(release.split(".")[0]) < 14:
        return warning(detail, "torch's GPU support is tested on macOS 14 and later: update macOS.")
    return ok(detail)


def check_python() -> Finding:
    wanted = SpecifierSet(_project(PROJECT)["requires-python"])
    version = platform.python_version()
    detail = f"{version} ({platform.machine()}), {_short(Path(sys.executable))}"
    if mac.is_mac() and platform.machine() == "x86_64" and mac.translated():
        remedy = "Remove .venv, `brew install python@3.12` in a Terminal without Rosetta, then `make setup`."
        return problem(f"{detail}: an Intel Python under Rosetta, for which there is no current torch", remedy)
    if not wanted.contains(version):
        return problem(f"{detail}: needs {wanted}", "`brew install python@3.12` (Mac), then `make setup`.")
    if sys.prefix == sys.base_prefix:
        return warning(f"{detail}: no virtual environment", "Run `make setup`, then use .venv/bin/python.")
    return ok(detail)


def check_packages(project: Path = PROJECT) -> Finding:
    wanted = [Requirement(text) for text in _project(project)["dependencies"]]
    wrong, found = [], {}
    for requirement in wanted:
        try:
            found[requirement.name] = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(found[requirement.name], prereleases=True):
            wrong.append(f"{requirement.name} {found[requirement.name]} (needs {requirement.specifier})")
    if wrong:
        return problem(", ".join(wrong), "Run `make setup`.", **found)
    shown = ", ".join(f"{name} {found[name]}" for name in ("torch", "transformers", "peft") if name in found)
    return ok(f"{shown}; all {len(wanted)} as pyproject.toml asks", **found)


def check_rivals(project: Path = PROJECT, path: list[str] | None = None) -> Finding:
    """Packages of our names elsewhere, which another start of Python might load instead of ours."""
    path = sys.path if path is None else path
    if (project / "gym" / "__init__.py").exists():
        return problem("gym/__init__.py makes gym/ a package that hides the well-known one", "Remove that file.")
    if foreign := [name for name in OURS if (file := _loaded_from(name)) and not file.is_relative_to(project)]:
        return problem(
            f"{foreign[0]} is loaded from {_short(_loaded_from(foreign[0]))}", f"Start it in {_short(project)}."
        )
    elsewhere = [entry for entry in path if entry and not _ours(Path(entry), project)]
    rivals = []
    for name in (*OURS[:3], "gym"):
        spec = PathFinder.find_spec(name, elsewhere)
        if spec and spec.origin:  # a folder without __init__.py is no rival
            rivals.append(f"{name} in {_short(Path(spec.origin).parent.parent)}")
    if clone := _installed_clone(project):
        rivals.append(f"this project, installed from {_short(clone)}")
    if rivals:
        remedy = "Start commands in the project folder only; better, `pip uninstall` them or make a new .venv."
        return warning(f"also importable: {'; '.join(rivals)}", remedy)
    return ok("none: distributed, exogym, whisper_tuner are this folder's")


def check_memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    detail = f"{size(memory.available)} free of {size(memory.total)}"
    if memory.available < 2 * GB:
        return warning(detail, "Quit other programs before training: even whisper-tiny wants 2 GB.")
    return ok(detail, total=memory.total, available=memory.available)


def check_disk(*folders: Path) -> Finding:
    return judge_disk({folder: shutil.disk_usage(_existing(folder)).free for folder in folders})


def judge_disk(free: Mapping[Path, int]) -> Finding:
    detail = "; ".join(f"{size(number)} free for {_short(folder)}" for folder, number in free.items())
    if min(free.values()) < GB:
        return problem(detail, "Make room: a run's model and checkpoints need some GB.")
    if min(free.values()) < 10 * GB:
        return warning(detail, "Full fine-tuning of large models, with checkpoints, needs more.")
    return ok(detail)


def check_folders(project: Path, runs: Path) -> Finding:
    for folder in (project, _existing(runs)):
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            remedy = (
                f"`ls -lde {_short(folder)}` shows whose it is; `sudo chown -R $USER {_short(folder)}` makes it yours."
            )
            return problem(f"{_short(folder)} cannot be written: {error.strerror}", remedy)
    if mac.is_mac() and (private := guarded(project, Path.home())):
        remedy = "Move the clone to ~/multimac-whisper: over SSH macOS refuses such folders, and iCloud empties files."
        return warning(f"{_short(project)} is in {private}", remedy)
    return ok(f"{_short(project)} and {_short(runs)} can be written")


def guarded(folder: Path, home: Path) -> str:
    """The folder above this one that macOS guards against sshd without Full Disk Access; empty if there is none."""
    places = [home / name for name in ("Documents", "Desktop", "Downloads", "Library/Mobile Documents")]
    found = [place for place in [*places, Path("/Volumes")] if folder.is_relative_to(place)]
    return _short(found[0]) if found else ""


def check_audio_programs() -> Finding:
    from whisper_tuner.data.audio import find_program

    ffmpeg, afconvert = find_program("ffmpeg"), find_program("afconvert")
    if not ffmpeg and not afconvert:
        remedy = "`brew install ffmpeg` (Mac), `apt-get install ffmpeg` (Debian, Ubuntu)."
        return warning("neither ffmpeg nor afconvert: M4A and video files cannot be read", remedy)
    return ok(ffmpeg or f"{afconvert} (no ffmpeg: M4A is read, some video formats are not)")


def check_environment(variables: Mapping[str, str]) -> Finding:
    found = {name: variables[name] for name in sorted(variables) if ENVIRONMENT.fullmatch(name)}
    biting = [f"{name}={found[name]}: {BITES[name]}" for name in found if name in BITES]
    if biting:
        return warning("; ".join(biting), f"unset {' '.join(name for name in found if name in BITES)}", **found)
    return ok(", ".join(f"{name}={value}" for name, value in found.items()) or "nothing that interferes", **found)


def _project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _loaded_from(name: str) -> Path | None:
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file).resolve() if file else None


def _ours(entry: Path, project: Path) -> bool:
    return entry.resolve() in (project, project / "gym")


def _installed_clone(project: Path) -> Path | None:
    """Where an editable installation of this project points to, if not here."""
    try:
        text = metadata.distribution("multimac-whisper").read_text("direct_url.json") or ""
    except metadata.PackageNotFoundError:
        return None
    found = re.search(r'"url":\s*"file://([^"]+)"', text)
    there = Path(unquote(found[1])) if found else None
    return there if there and there.resolve() != project else None


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


def _short(path: Path) -> str:
    """With `~` for the home folder: shorter, and no name of a user in what is sent to us."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)
