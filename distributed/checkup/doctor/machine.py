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
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from distributed.checkup.findings import Check, Finding, ok, problem, skipped, warning, worst
from distributed.checkup.programs import Hardware, hardware, is_macos, translated
from distributed.hosts.paths import PROJECT, project_settings
from whisper_tuner.text import size

if TYPE_CHECKING:
    from distributed.checkup.facts import HostFacts
    from distributed.plan.job import Job

GB = 1_000_000_000
LOOK_S = 120  # torch's first import after an installation may take half of it
ENVIRONMENT = re.compile(
    r"PYTHONPATH|PYTHONHOME|EXOGYM_\w+|GLOO_\w+|PYTORCH_\w+|CUDA_VISIBLE_DEVICES|"
    r"OMP_NUM_THREADS|MKL_NUM_THREADS|VECLIB_MAXIMUM_THREADS|TORCH_\w+|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE"
)
BITES = {
    "PYTHONPATH": "other copies of packages may be loaded",
    "PYTHONHOME": "python takes its library from elsewhere",
    "GLOO_SOCKET_IFNAME": "it is overridden: name an interface in the hosts file",
    "PYTORCH_ENABLE_MPS_FALLBACK": "what the GPU cannot do runs on the CPU, slowly and silently",
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0 lifts the limit on GPU memory, and macOS may freeze; runs set their own",
}


def machine_checks(job: Job | None, runs: Path) -> list[Check]:
    look = functools.cache(lambda: look_at_this_machine(job, runs))

    def row(name: str, check: str, found: Callable[[HostFacts], Finding]) -> Check:
        """Return a check of what is judged as `check` on every host; if that is nothing, what `found` says."""

        def judged() -> Finding:
            facts, problems = look()
            return joined([each for each in problems if each.check == check], found(facts))

        return Check(name, judged)

    return [
        Check("system", check_system),
        row("python", "python", lambda facts: found_python()),
        Check("packages", check_packages),
        row("rival packages", "rivals", lambda facts: found_rivals(PROJECT)),
        row("disk", "disk", found_disk),
        row("project folder", "folder", lambda facts: found_folders(runs)),
        Check("audio programs", check_audio_programs),
        Check("environment", lambda: check_environment(os.environ)),
        row("device", "device", found_device),
        row("memory", "memory", found_memory),  # of the device, if that has its own
    ]


def look_at_this_machine(job: Job | None, runs: Path) -> tuple[HostFacts, list[Finding]]:
    """Look at this machine as at any host, with the needs of `job` or those that any run has. Raises HostError."""
    from distributed.checkup.judge import Judge
    from distributed.checkup.look import look_here
    from distributed.checkup.needs import Needs, needs_of
    from distributed.hosts.environment import Pins

    look = look_here([str(PROJECT), str(runs.absolute())], LOOK_S)
    any_run = (2 * GB, 2 * GB)
    needs = needs_of(job, 1) if job else Needs(memory=2 * GB, least=2 * GB, on_mps=any_run, on_cuda=any_run, kept=GB)
    pins = Pins(direct=(), all={}, python=SpecifierSet(project_settings()["requires-python"]))
    return look.facts, [*look.problems, *Judge(look.facts, look.facts, pins, needs).all()]


def joined(problems: Sequence[Finding], found: Finding) -> Finding:
    """Join problems that are judged alike on every host to one row; `found` if there are none, or if it is worse."""
    if not problems or found.is_error:
        return found
    remedies = dict.fromkeys(each.remedy for each in problems)
    what = shortened("; ".join(each.what for each in problems))
    return Finding(what=what, remedy=shortened(" ".join(remedies)), severity=worst(problems))


def found_python() -> Finding:
    found = f"{platform.python_version()} ({platform.machine()}), {short(Path(sys.executable))}"
    if is_macos() and platform.machine() == "x86_64" and translated():
        remedy = "Remove .venv, `brew install python@3.13` in a Terminal without Rosetta, then `make setup`."
        return problem(f"{found}: an Intel Python under Rosetta, for which there is no current torch", remedy)
    if sys.prefix == sys.base_prefix:
        return warning(f"{found}: no virtual environment", "Run `make setup`, then use .venv/bin/python.")
    return ok(found)


def found_rivals(project: Path) -> Finding:
    """Look for other copies of the project: an editable installation of another clone would run as `multimac`."""
    if (project / "gym" / "__init__.py").exists():
        return problem("gym/__init__.py makes gym/ a package that hides the well-known one", "Remove that file.")
    with contextlib.suppress(metadata.PackageNotFoundError):
        text = metadata.distribution("multimac-whisper").read_text("direct_url.json") or ""
        found = re.search(r'"url":\s*"file://([^"]+)"', text)
        if found and (there := Path(unquote(found[1]))).resolve() != project:
            remedy = "Start commands in the project folder only; better, `pip uninstall` it or make a new .venv."
            return warning(f"also importable: this project, installed from {short(there)}", remedy)
    return ok("none: distributed, exogym, whisper_tuner are this folder's")


def found_disk(facts: HostFacts) -> Finding:
    if not facts.spaces:
        return skipped("once the project folder can be used")
    found = "; ".join(f"{size(space['free'])} free for {short(Path(space['root']))}" for space in facts.spaces)
    if any(space["free"] < 10 * GB for space in facts.spaces):
        return warning(found, "Full fine-tuning of large models needs more for its checkpoints.")
    return ok(found)


def found_folders(runs: Path) -> Finding:
    if is_macos() and (private := guarded(PROJECT, Path.home())):
        remedy = "Move the clone to ~/multimac-whisper: over SSH macOS refuses such folders, and iCloud empties files."
        return warning(f"{short(PROJECT)} is in {private}", remedy)
    return ok(f"{short(PROJECT)} and {short(runs)} can be written")


def found_memory(facts: HostFacts) -> Finding:
    total, available = (facts.facts["memory"][name] for name in ("total", "available"))
    return ok(f"{size(available or 0)} free of {size(total)}", total=total, available=available)


def found_device(facts: HostFacts) -> Finding:
    if not facts.torch:
        return problem("torch is not installed", "Run: make setup")
    if not facts.device:  # the preflight says why
        return ok("")
    return judge_device(facts.device, facts.torch, hardware().chip if is_macos() else None)


def judge_device(name: str, torch: Mapping, chip: str | None) -> Finding:
    """Describe a device that was chosen. torch: what it says of itself; chip: that of a Mac, None elsewhere."""
    build = f"torch {torch['version']}"
    if name == "mps":
        limit = torch["mps_memory"]
        return ok(f"mps: {size(limit)} recommended for the GPU; {build}", memory=limit)
    if name.startswith("cuda"):
        return ok(f"{name}: {torch['cuda_name']}, {size(torch['cuda_memory'])}; {build}", memory=torch["cuda_memory"])
    if chip is not None and not torch["mps"]:
        remedy = "Use an arm64 Python and the torch of `make setup`; in a virtual machine there is no GPU."
        return problem(f"cpu: {build} finds no Metal GPU", remedy)
    return ok(f"cpu, threads: {torch['threads']}; {build}")


def check_system() -> Finding:
    cores = f"{os.cpu_count()} cores"
    if not is_macos():
        return ok(f"{platform.system()} {platform.release()}, {platform.machine()}, {cores}")
    return judge_macos(platform.mac_ver()[0], platform.machine(), translated(), hardware(), cores)


def judge_macos(release: str, machine: str, translated: bool | None, hardware: Hardware, cores: str) -> Finding:
    parts = (hardware.chip, hardware.model, hardware.memory and f"{hardware.memory} memory")
    named = ", ".join(part for part in parts if part) or "hardware unknown (system_profiler said nothing)"
    detail = f"macOS {release}, {named}, {cores}"
    if machine == "x86_64" and not translated:
        return problem(f"{detail}: an Intel Mac", "There is no current torch for Intel Macs: use one with an M chip.")
    if release and int(release.split(".")[0]) < 14:
        return warning(detail, "torch's GPU support is tested on macOS 14 and later: update macOS.")
    return ok(detail)


def check_packages(project: Path = PROJECT) -> Finding:
    asked = map(Requirement, project_settings(project)["dependencies"])
    wanted = [requirement for requirement in asked if not requirement.marker or requirement.marker.evaluate()]
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
    """Return the folder above this one that macOS guards against sshd; empty if there is none."""
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


def short(path: Path) -> str:
    """Write a path with `~` for the home folder: shorter, and no name of a user in what is sent to us."""
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


def shortened(text: str) -> str:
    """Write `~` for the home folder in all paths of a text."""
    return re.sub(rf"(?<![\w/]){re.escape(str(Path.home()))}(?=/)", "~", text)
