"""The quick checks of `multimac doctor`: this machine, its Python and its packages.

What the preflight asks of every host, its own checks judge here too; the rest only a look at this machine can tell.
Packages that may be missing are imported inside the checks: then that is a row of the table, not a traceback.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from distributed.hosts.paths import PROJECT
from whisper_tuner.text import size

from . import macos
from .checks import Check, Finding, ok, problem, warning

if TYPE_CHECKING:
    from distributed.plan.job import Job
    from distributed.preflight.checks import Checks
    from distributed.preflight.look import Look
    from distributed.preflight.report import Problem

GB = 1_000_000_000
LOOK_S = 60  # torch's first import after an installation may take half of it
OURS = ("distributed", "exogym", "whisper_tuner", "cli_typer", "wizard")
MATMUL_FAULT = "torch before 2.14 on M1 and M2: wrong gradients past 32,766 positions in a batch (pytorch 177116)"
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


def machine_checks(job: Job | None, runs: Path) -> list[Check]:
    here = ThisMachine(job, runs)
    return [
        Check("system", check_system),
        Check("python", here.python),
        Check("packages", check_packages),
        Check("rival packages", here.rivals),
        Check("disk", here.disk),
        Check("project folder", here.folders),
        Check("audio programs", check_audio_programs),
        Check("environment", lambda: check_environment(os.environ)),
        Check("device", here.device),
        Check("memory", here.memory),  # of the device, if that has its own
    ]


class ThisMachine:
    """This machine as a host of the preflight, for the needs of `job`, or for those that any run has."""

    def __init__(self, job: Job | None, runs: Path):
        self.job, self.runs = job, runs
        self.deadline = time.monotonic() + LOOK_S

    @functools.cached_property
    def look(self) -> Look:
        from distributed.preflight.look import look_here

        names = [requirement.name for requirement in requirements(PROJECT)]
        return look_here(names, [str(PROJECT), str(self.runs.absolute())], LOOK_S)

    @functools.cached_property
    def checks(self) -> Checks:
        from distributed.hosts.environment import Pins
        from distributed.preflight.checks import Checks
        from distributed.preflight.needs import Needs, needs_of

        needs = needs_of(self.job, 1) if self.job else Needs(memory=2 * GB, least=2 * GB, kept=GB)
        pins = Pins(direct=(), all={}, python=SpecifierSet(settings(PROJECT)["requires-python"]))
        return Checks(self.look.facts, self.look.facts, pins, needs, "make setup")

    def python(self) -> Finding:
        found = f"{platform.python_version()} ({platform.machine()}), {short(Path(sys.executable))}"
        if macos.is_macos() and platform.machine() == "x86_64" and macos.translated():
            remedy = "Remove .venv, `brew install python@3.12` in a Terminal without Rosetta, then `make setup`."
            return problem(f"{found}: an Intel Python under Rosetta, for which there is no current torch", remedy)
        if sys.prefix == sys.base_prefix:
            row = warning(f"{found}: no virtual environment", "Run `make setup`, then use .venv/bin/python.")
        else:
            row = ok(found)
        return judged(self.checks.python(), row, "`brew install python@3.12` (Mac), then `make setup`.")

    def rivals(self) -> Finding:
        return rival_files(PROJECT) or judged(self.checks.rivals(), rival_clone(PROJECT))

    def memory(self) -> Finding:
        total, available = (self.look.facts.facts["memory"][name] for name in ("total", "available"))
        row = ok(f"{size(available or 0)} free of {size(total)}", total=total, available=available)
        remedy = "" if self.job else "Quit other programs before training: even whisper-tiny wants 2 GB."
        return judged(self.checks.memory(), row, remedy)

    def disk(self) -> Finding:
        spaces = self.look.spaces
        found = "; ".join(f"{size(space['free'])} free for {short(Path(space['root']))}" for space in spaces)
        row = ok(found)
        if any(space["free"] < 10 * GB for space in spaces):
            row = warning(found, "Full fine-tuning of large models, with checkpoints, needs more.")
        return judged(self.checks.disk(), row, "Make room: a run's model and checkpoints need some GB.")

    def folders(self) -> Finding:
        row = ok(f"{short(PROJECT)} and {short(self.runs)} can be written")
        if macos.is_macos() and (private := guarded(PROJECT, Path.home())):
            why = "over SSH macOS refuses such folders, and iCloud empties files."
            row = warning(f"{short(PROJECT)} is in {private}", f"Move the clone to ~/multimac-whisper: {why}")
        found = [problem for problem in self.look.problems if problem.check == "folder"]
        return judged(found, row, "`ls -lde FOLDER` shows whose it is; `sudo chown -R $USER FOLDER` makes it yours.")

    def device(self) -> Finding:
        self.look.await_torch(self.deadline, last=True)
        self.look.session.close()
        self.look.facts.device, problems = self.checks.device()
        name, torch = self.look.facts.device, self.look.facts.torch
        if not torch:
            return problem("torch is not installed", "Run: make setup")
        if problems:
            return judged(problems, ok(""))
        return judge_device(name, torch, macos.hardware().chip if macos.is_macos() else None)


def judged(problems: Iterable[Problem], row: Finding, remedy: str = "") -> Finding:
    """What the preflight finds wrong as one row, `remedy` in place of its own; `row` if it finds nothing."""
    problems = list(problems)
    if not problems:
        return row
    what = shortened("; ".join(problem.what for problem in problems))
    remedies = dict.fromkeys(problem.remedy for problem in problems)
    kind = problem if any(problem.severity == "error" for problem in problems) else warning
    return kind(what, remedy or shortened(" ".join(remedies)))


def rival_files(project: Path) -> Finding | None:
    """What is wrong already, in this process."""
    if (project / "gym" / "__init__.py").exists():
        return problem("gym/__init__.py makes gym/ a package that hides the well-known one", "Remove that file.")
    for name in OURS:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and not Path(file).resolve().is_relative_to(project):
            return problem(f"{name} is loaded from {short(Path(file))}", f"Start it in {short(project)}.")
    return None


def rival_clone(project: Path) -> Finding:
    """An editable installation of another clone: `multimac` would run that one."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        text = metadata.distribution("multimac-whisper").read_text("direct_url.json") or ""
        found = re.search(r'"url":\s*"file://([^"]+)"', text)
        if found and (there := Path(unquote(found[1]))).resolve() != project:
            remedy = "Start commands in the project folder only; better, `pip uninstall` it or make a new .venv."
            return warning(f"also importable: this project, installed from {short(there)}", remedy)
    return ok("none: distributed, exogym, whisper_tuner are this folder's")


def judge_device(name: str, torch: Mapping, chip: str | None) -> Finding:
    """torch: what it says of itself; chip: of a Mac, None elsewhere."""
    build = f"torch {torch['version']}"
    if name == "mps":
        limit = torch["mps_memory"]
        detail = f"mps: {size(limit)} recommended for the GPU; {build}"
        old = tuple(int(part) for part in torch["version"].split(".")[:2]) < (2, 14)
        faulty = old and (chip or "").startswith(("Apple M1", "Apple M2"))
        return ok(f"{detail}. {MATMUL_FAULT}: see --deep" if faulty else detail, memory=limit)
    if name.startswith("cuda"):
        return ok(f"{name}: {torch['cuda_name']}, {size(torch['cuda_memory'])}; {build}", memory=torch["cuda_memory"])
    if chip is not None and not torch["mps"]:
        remedy = "Use an arm64 Python and the torch of `make setup`; in a virtual machine there is no GPU."
        return problem(f"cpu: {build} finds no Metal GPU", remedy)
    return ok(f"cpu, threads: {torch['threads']}; {build}")


def check_system() -> Finding:
    cores = f"{os.cpu_count()} cores"
    if not macos.is_macos():
        return ok(f"{platform.system()} {platform.release()}, {platform.machine()}, {cores}")
    return judge_macos(platform.mac_ver()[0], platform.machine(), macos.translated(), macos.hardware(), cores)


def judge_macos(release: str, machine: str, translated: bool | None, hardware: macos.Hardware, cores: str) -> Finding:
    parts = (hardware.chip, hardware.model, hardware.memory and f"{hardware.memory} memory")
    named = ", ".join(part for part in parts if part) or "hardware unknown (system_profiler was silent)"
    detail = f"macOS {release}, {named}, {cores}"
    if machine == "x86_64" and not translated:
        return problem(f"{detail}: an Intel Mac", "There is no current torch for Intel Macs: use one with an M chip.")
    if release and int(release.split(".")[0]) < 14:
        return warning(detail, "torch's GPU support is tested on macOS 14 and later: update macOS.")
    return ok(detail)


def check_packages(project: Path = PROJECT) -> Finding:
    wanted = requirements(project)
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


def guarded(folder: Path, home: Path) -> str:
    """The folder above this one that macOS guards against sshd without Full Disk Access; empty if there is none."""
    places = [home / name for name in ("Documents", "Desktop", "Downloads", "Library/Mobile Documents")]
    found = [place for place in [*places, Path("/Volumes")] if folder.is_relative_to(place)]
    return short(found[0]) if found else ""


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


def settings(project: Path) -> dict:
    return tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(project: Path) -> list[Requirement]:
    return [Requirement(text) for text in settings(project)["dependencies"]]


def short(path: Path) -> str:
    """With `~` for the home folder: shorter, and no name of a user in what is sent to us."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


def shortened(text: str) -> str:
    """The same for paths in a text."""
    return re.sub(rf"(?<![\w/]){re.escape(str(Path.home()))}(?=/)", "~", text)
