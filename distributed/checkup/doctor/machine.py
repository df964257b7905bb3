"""The quick checks of `multimac doctor`: this machine, its Python and packages; network, SSH, sleep, firewall.

What the preflight asks of every host, its own checks judge here too; the rest only a look at this machine can tell.
Packages that may be missing are imported inside the checks: then that is a row of the table, not a traceback. What
judges a program of macOS takes its output as text, so it is tested everywhere. None of these programs needs sudo.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from distributed.checkup.findings import Check, Finding, ok, problem, skipped, warning, worst
from distributed.checkup.programs import Hardware, hardware, is_macos, output_of, translated
from distributed.hosts.paths import PROJECT, project_settings
from distributed.ssh.local_network import FIREWALL, allow_lines, real_python
from whisper_tuner.model.memory import Way
from whisper_tuner.text import size

if TYPE_CHECKING:
    from distributed.checkup.look import HostFacts
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
SSH_PORT = 22
CAFFEINATE = Path("/usr/bin/caffeinate")
FOR_HOSTS = {"network", "ssh server", "ssh keys", "firewall"}  # checks that concern nobody with one machine
KEYS = "id_ed25519 id_ecdsa id_rsa id_ed25519_sk id_ecdsa_sk"


def machine_checks(job: Job | None, runs: Path) -> list[Check]:
    look = functools.cache(lambda: look_at_this_machine(job, runs))

    def row(name: str, check: str, found: Callable[[HostFacts], Finding]) -> Check:
        """Return a check of what is judged as `check` on every host; if that is nothing, or better, what `found` says.

        All that is found in one such check is one row.
        """

        def judged() -> Finding:
            facts, problems = look()
            those, own = [each for each in problems if each.check == check], found(facts)
            if not those or own.is_error:
                return own
            remedies = dict.fromkeys(each.remedy for each in those)
            what = shortened("; ".join(each.what for each in those))
            return Finding(what=what, remedy=shortened(" ".join(remedies)), severity=worst(those))

        return Check(name, judged)

    def memory(facts: HostFacts) -> Finding:
        total, available = (facts.facts["memory"][name] for name in ("total", "available"))
        return ok(f"{size(available or 0)} free of {size(total)}", total=total, available=available)

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
        row("memory", "memory", memory),  # of the device, if that has its own
    ]


def look_at_this_machine(job: Job | None, runs: Path) -> tuple[HostFacts, list[Finding]]:
    """Look at this machine as at any host, with the needs of `job` or those that any run has. Raises HostError."""
    from distributed.checkup.judge import Judge, Needs, needs_of
    from distributed.checkup.look import look_here
    from distributed.hosts.environment import Pins

    look = look_here([str(PROJECT), str(runs.absolute())], LOOK_S)
    any_run = [Way(frozen_precision="float32", again=False, whole=2 * GB, one=2 * GB)]
    needs = needs_of(job, 1) if job else Needs(memory=dict.fromkeys(("cpu", "mps", "cuda"), any_run), kept=GB)
    pins = Pins(direct=(), all={}, python=SpecifierSet(project_settings()["requires-python"]))
    return look.facts, [*look.problems, *Judge(look.facts, look.facts, pins, needs).all()]


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


# What lies around Python.


def service_checks() -> list[Check]:
    def on_a_mac(name: str, look: Callable[[], Finding]) -> Check:
        return Check(name, look if is_macos() else lambda: skipped("checked on a Mac only"))

    def pmset(*what: str) -> str:
        return output_of(["/usr/bin/pmset", "-g", *what])

    def firewall() -> Finding:
        state, block_all = (output_of([FIREWALL, question]) for question in ("--getglobalstate", "--getblockall"))
        return judge_firewall(state, block_all, real_python())

    return [
        Check("network", check_network),
        Check("ssh server", check_ssh_server),
        Check("ssh keys", lambda: check_ssh_keys(Path.home() / ".ssh", os.environ)),
        on_a_mac("sleep", lambda: judge_sleep(pmset(), pmset("batt"), CAFFEINATE.exists())),
        on_a_mac("display", lambda: judge_display(pmset())),
        on_a_mac("firewall", firewall),
    ]


def check_network() -> Finding:
    """Look for addresses that other hosts could reach."""
    import psutil

    from distributed.hosts.interfaces import UNFIT, own_interfaces

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = {name: of[0] for name, of in own_interfaces().items() if of and name in up and not of[0].startswith("127.")}
    fit = {name: address for name, address in found.items() if not UNFIT.fullmatch(name)}
    unfit = found.keys() - fit.keys()
    shown = ", ".join(f"{name} {address}" for name, address in fit.items())
    if not fit:
        aside = f" (not used: {', '.join(sorted(unfit))})" if unfit else ""
        return warning(f"no interface that another host could reach{aside}", "Join a network, or train alone.")
    if all(address.startswith("169.254.") for address in fit.values()):
        return warning(f"{shown}: self-assigned addresses only", "Without a router, give both Macs fixed addresses.")
    return ok(shown, **fit)


def check_ssh_server(port: int = SSH_PORT) -> Finding:
    """Look for an SSH server, which every host needs but the one where commands are typed."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=3) as connection:
            connection.settimeout(3)
            banner = connection.recv(64).decode("ascii", "replace").strip()
    except OSError as error:
        how = "`apt-get install openssh-server`, and start it"
        if is_macos():
            how = "System Settings > General > Sharing > Remote Login"
        return warning(f"nothing answers on port {port}: {error.strerror or error}", f"Only a worker needs it: {how}.")
    if not banner.startswith("SSH-"):
        return warning(f"what answers on port {port} is no SSH server: {banner!r}", "Free the port for sshd.")
    return ok(f"{banner} on port {port}")


def check_ssh_keys(folder: Path, variables: Mapping[str, str]) -> Finding:
    """Look for a key, in a file or held by an agent: the master needs one that the workers know."""
    keys = [folder / name for name in KEYS.split() if (folder / name).is_file()]
    held: int | None = None  # there is no agent
    if variables.get("SSH_AUTH_SOCK"):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            said = subprocess.run(
                ["ssh-add", "-l"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5
            )
            held = {0: len(said.stdout.splitlines()), 1: 0}.get(said.returncode)
    open_to_others = [key.name for key in keys if key.stat().st_mode & 0o077]
    if open_to_others:
        names = " ".join(f"~/.ssh/{name}" for name in open_to_others)
        return warning(f"{', '.join(open_to_others)} can be read by others: ssh refuses it", f"Run: chmod 600 {names}")
    shown = ", ".join(key.name for key in keys) or "no key file"
    detail = f"{shown}; agent: {'none' if held is None else f'{held} keys'}"
    if not keys and not held:
        return warning(detail, "On the Mac where you type: `ssh-keygen -t ed25519`, then `ssh-copy-id USER@HOST`.")
    return ok(detail)


def judge_sleep(settings: str, source: str, caffeinate: bool) -> Finding:
    """Judge by the settings of `pmset -g`, those in use for the present power source, and by `pmset -g batt`.

    A Mac that sleeps is lost for a run as long; while the master does, nobody trains.
    """
    sleep = re.search(r"^\s*sleep\s+(\d+)(?:\s+\(sleep prevented by ([^)]*)\))?", settings, re.MULTILINE)
    is_disabled = re.search(r"^\s*SleepDisabled\s+1\s*$", settings, re.MULTILINE)
    if not sleep and not is_disabled:
        return warning("the output of `pmset -g` is not understood", "Send us its output.")
    minutes = sleep[1] if sleep and not is_disabled else "0"
    never = minutes == "0"
    awake = "never sleeps by itself" if never else f"sleeps after {minutes} min"
    if sleep and sleep[2] and not is_disabled:
        awake += f" (kept awake right now by {', '.join(dict.fromkeys(sleep[2].split(', ')))})"
    if "Now drawing from 'Battery Power'" in source:
        charge = re.search(r"\d+%", source)  # a desktop has none
        detail = f"{awake}, on battery{f' at {charge[0]}' if charge else ''}"
        return warning(detail, "Connect the charger: on battery the GPU slows down and a closed lid sleeps.")
    detail = awake + (", on mains power" if "Now drawing from" in source else "")
    if never:
        return ok(detail)
    how = "A run keeps it awake by itself; until it starts" if caffeinate else "No caffeinate; `sudo pmset -c sleep 0`"
    return warning(detail, f"{how}: System Settings > Energy. And leave the lid open.")


def judge_display(settings: str) -> Finding:
    """Judge the display: where it is on, macOS may end a long load of the GPU by restarting the Mac (mlx 3267)."""
    found = re.search(r"^\s*displaysleep\s+(\d+)(?:\s+\(display sleep prevented by ([^)]*)\))?", settings, re.MULTILINE)
    if not found:
        return ok("`pmset -g` names no display")
    if found[1] == "0":
        remedy = "System Settings > Lock Screen: turn it off when inactive. Before a run: `pmset displaysleepnow`."
        return warning("the display never sleeps: with one that is on, some Macs restart in a long run", remedy)
    kept = f" (kept on right now by {found[2]})" if found[2] else ""
    return ok(f"sleeps after {found[1]} min{kept}: a run does not keep it on")


def judge_firewall(state: str, block_all: str, program: str) -> Finding:
    """Judge what the firewall says. program: the one that is to accept connections."""
    where = "System Settings > Network > Firewall"
    found = re.search(r"State = (\d)", state)
    if not found:
        return warning("the state of the application firewall is unknown", f"Look at {where}.")
    if found[1] == "2" or re.search(r"block all\b.*\benabled|(blocking|set to block) all", block_all, re.IGNORECASE):
        return problem("the application firewall blocks all incoming connections", f"{where} > Options.")
    if found[1] == "1":
        allow = shortened(allow_lines(program))
        remedy = f"On a headless Mac nobody can answer; with an administrator's password: {allow}."
        return warning("the application firewall is on and asks for each program that listens", remedy)
    return ok("the application firewall is off")
