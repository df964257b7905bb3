"""`hosts setup`: on each host a virtual environment with the versions that the master runs.

From the registry where the host reaches it; else from a wheelhouse that the master fills and pushes.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from distributed.ssh.connection import Remote
from distributed.ssh.machine import on_each
from whisper_tuner.errors import ConfigError, HostError
from whisper_tuner.files import write_atomically
from whisper_tuner.text import size

from . import wheelhouse
from .agent_call import INSTALL_PYTHON, agent_call
from .keep_awake import hosts_awake
from .paths import MADE_BY, PROJECT, REMOTE_LISTS, REMOTE_WHEELS, SyncItem, project_settings
from .sync import Progress, no_progress, sync
from .wheelhouse import QUIET, Target, target_of, unpacked

LISTS = PROJECT / ".cache" / "environment"
REQUIREMENTS = "requirements.txt"
FIRST_IMPORT = PROJECT / "distributed" / "hosts" / "first_import.py"
INSTALL_TIMEOUT_S = 3600  # torch and what it needs are gigabytes, and a wireless network may be slow
FIRST_IMPORT_S = 600
NEWEST_MINOR = 30
EVERY_S = 2.0
KIB = 1024
ANEW = 'Remove its environment ("python_env", or .venv in "project_path"), then run hosts setup again.'
# `pip download --python-version` reads the markers of requirements by the Python that runs it (pypa/pip 6117).
OTHER_MINOR = f"The wheels are those that the master's Python needs. {INSTALL_PYTHON} {ANEW}"
TAKE_LINK_AWAY = '[ ! -L "$0" ] || rm "$0"'  # --clear would empty what it leads to, which may be the user's own
SHOWN = 3
Say = Callable[[str, str], None]  # host, text


@dataclass(frozen=True, kw_only=True)
class Pins:
    """direct: what pyproject.toml names; all: name -> version, with all that these need here, whatever the Python.

    python: as pyproject.toml asks; python_of: name -> what the version that is installed here asks.
    """

    direct: tuple[str, ...]
    all: dict[str, str]
    python: SpecifierSet
    python_of: dict[str, SpecifierSet] = field(default_factory=dict)

    def unfit(self, version: Sequence[int]) -> str:
        """Say why these versions cannot be installed for such a Python; "" if they can."""
        number = ".".join(map(str, version))
        if not self.python.contains(number):
            return f"needs {self.python}"
        wrong = [name for name, python in sorted(self.python_of.items()) if not python.contains(number)]
        named = [f"{name} {self.all[name]} needs {self.python_of[name]}" for name in wrong[:SHOWN]]
        return f"of the packages as they are on the master, {', '.join(named)}" if named else ""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One host's outcome. source: 'unchanged', 'registry' or 'wheelhouse'."""

    host: str
    python: str
    source: str
    seconds: float


def setup(remotes: Sequence[Remote], say: Say, progress: Progress = no_progress) -> list[Environment]:
    """Make or repair each host's environment, all at once, unless it is right. Raises HostError, ConfigError."""
    pins = own_pins()
    with hosts_awake(remotes):
        return on_each(remotes, lambda remote: _HostSetup(remote, pins, say, progress).run())


def own_pins(project: Path = PROJECT) -> Pins:
    """Read the versions that this machine runs, without local tags (+cpu). Raises ConfigError if one is missing."""
    settings = project_settings(project)
    asked = map(Requirement, settings["dependencies"])
    direct = [requirement for requirement in asked if not requirement.marker or requirement.marker.evaluate()]
    python = SpecifierSet(settings["requires-python"])
    found: dict[str, str] = {}
    python_of: dict[str, SpecifierSet] = {}
    queue, seen = list(direct), set()
    while queue:
        requirement = queue.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        try:
            distribution = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError as error:
            raise ConfigError(f"{requirement.name} is not installed here", remedy="Run: make setup") from error
        name = canonicalize_name(requirement.name)
        found[name] = _public(distribution.version)
        with contextlib.suppress(InvalidSpecifier):  # which pip passes over as well
            python_of[name] = SpecifierSet((distribution.metadata.get_all("Requires-Python") or [""])[0])
        queue += needs(distribution, requirement.extras, python)
    names = tuple(canonicalize_name(requirement.name) for requirement in direct)
    return Pins(direct=names, all=found, python=python, python_of=python_of)


def needs(distribution: metadata.Distribution, extras: set[str], python: SpecifierSet) -> list[Requirement]:
    """List its requirements, but for what only some of these Pythons need: a host's may be another (standard-aifc)."""
    fitting = [f"3.{minor}" for minor in range(NEWEST_MINOR) if python.contains(f"3.{minor}.0")]
    pythons = [{}, *({"python_version": version, "python_full_version": f"{version}.0"} for version in fitting)]

    def applies(marker: Marker) -> bool:
        return all(any(marker.evaluate(of | {"extra": extra}) for extra in ("", *extras)) for of in pythons)

    requirements = map(Requirement, distribution.requires or [])
    return [requirement for requirement in requirements if not requirement.marker or applies(requirement.marker)]


def unlike(pins: Pins, found: dict[str, str]) -> list[str]:
    """Say in words what differs from the master's versions."""
    versions = {name: _public(version) for name, version in found.items()}
    wrong = differing(pins, found)
    return [f"{name} {versions.get(name, 'is missing')} (here {pins.all[name]})" for name in wrong]


def differing(pins: Pins, found: dict[str, str]) -> list[str]:
    """List the packages that are there in another version, or not at all."""
    return [name for name, version in sorted(pins.all.items()) if _public(found.get(name)) != version]


def _public(version: str | None) -> str:
    """Drop its local tag; what is no version, as of a package that was not installed whole, stays as it is."""
    try:
        return Version(version or "").public
    except (ValueError, TypeError):
        return str(version)


class _HostSetup:
    def __init__(self, remote: Remote, pins: Pins, say: Say, progress: Progress):
        self.remote, self.pins, self.progress = remote, pins, progress
        self.python, self.root = remote.python, remote.project
        self.folder = str(PurePosixPath(self.python).parent.parent)  # of the environment
        self.say = lambda text: say(remote.name, text)

    def run(self) -> Environment:
        begin = time.monotonic()
        facts = self.facts()
        source = "unchanged"
        if not facts["training"] or unlike(self.pins, facts["versions"]):
            source = self.install(facts)
            facts = self.facts()
            if wrong := unlike(self.pins, facts["versions"] if facts["training"] else {}):
                listed = "; ".join(wrong[:5])
                what = f"the environment is not right after installing: {listed}"
                raise HostError(self.remote.name, what, remedy=ANEW)
            self.import_once(facts["system"])
        seconds = time.monotonic() - begin
        self.say(f"ready ({source}, {self.python}, {seconds:.0f} s)")
        return Environment(host=self.remote.name, python=self.python, source=source, seconds=seconds)

    def facts(self, *, of_another: bool = False) -> dict[str, Any]:
        """Ask for the facts of the Python that trains, if `training`; else of the best other one there."""
        python = "" if of_another else self.python
        return agent_call(self.remote, "facts", python=python, names=list(self.pins.all), project=self.root)

    def install(self, facts: dict[str, Any]) -> str:
        """Bring the packages. As these are gigabytes, whether they can be used is looked at before."""
        if not facts["training"]:
            self.make_venv(facts)
        elif not facts["venv"]:  # nothing is installed into a python that belongs to the system
            raise HostError(
                self.remote.name,
                f"{self.python} is not in a virtual environment, and differs:"
                f" {', '.join(unlike(self.pins, facts['versions'])[:5])}",
                remedy='Leave "python_env" out of the hosts file: then an environment is made.',
            )
        elif why := self.pins.unfit(facts["python"]):
            self.make_venv(self.facts(of_another=True), why)
        if self.remote.run([self.python, "-m", "pip", "--version"], timeout=60).returncode:  # as uv makes environments
            self.remote.run([self.python, "-m", "ensurepip"], timeout=300, check=True)
        lists = write_lists(self.pins)
        items = [SyncItem(local=path, remote=f"{REMOTE_LISTS}/{path.name}") for path in lists]
        sync([self.remote], {self.remote.name: items})
        if self.reaches_registry():
            self.say("installing from the package registry")
            with shown(f"{self.remote.name}: installing", self.progress):
                self.pip("install")
            return "registry"
        facts = self.facts()
        target = target_of(facts)
        wheels = self.push_wheels(target, lists)
        self.say("installing from the wheelhouse")
        source = ["--no-index", "--find-links", str(PurePosixPath(self.root, REMOTE_WHEELS))]
        before, total = self.size(), unpacked(wheels, differing(self.pins, facts["versions"]))
        with shown(f"{self.remote.name}: installing", self.progress, lambda: self.size() - before, total):
            # A wheel that nobody here has sent, or that somebody there has changed, is refused.
            listed = wheelhouse.COMPLETE if wheels else REQUIREMENTS
            other = target.python != sys.version_info[:2]
            self.pip("install", *source, "--require-hashes", requirements=listed, other=other)
        return "wheelhouse"

    def size(self) -> int:
        """Ask how many bytes the environment takes there: pip says nothing before its end."""
        done = self.remote.run(["du", "-sk", self.folder], timeout=60)  # its status is 1 where a file vanishes
        words = done.stdout.split()
        return int(words[0]) * KIB if words and words[0].isdigit() else 0

    def make_venv(self, facts: dict[str, Any], why: str = "") -> None:
        """facts: of the Python to make it with; why: what is wrong with that of the environment, if it runs."""
        if self.remote.host.python_env:  # whatever is in there is the user's own; where there is nothing, one is made
            why = why or "".join(facts["passed"][:1]).removeprefix(f"{self.python}: ")
            what = f"{self.python} cannot be used: {why}"
            if self.python == self.remote.expand(self.remote.host.environment):
                remedy = 'Name a virtual environment with "python_env", or leave it out: then one is made.'
                raise HostError(self.remote.name, what, remedy=remedy)
            if self.remote.run(["test", "-e", self.folder], timeout=30).returncode == 0:
                remedy = f'Remove {self.folder}, or name a folder that does not exist yet, or leave "python_env" out.'
                raise HostError(self.remote.name, what, remedy=remedy)
        others = [line for line in facts["passed"] if not line.startswith(f"{self.python}: ")]
        best, version = facts["executable"], ".".join(map(str, facts["python"]))
        unfit = self.pins.unfit(facts["python"])
        if unfit or not facts["fitting"]:
            others = [f"{best}: {version}, {unfit}", *others] if facts["fitting"] else others
            raise HostError(
                self.remote.name, f"no Python that can train was found: {'; '.join(others)}", remedy=INSTALL_PYTHON
            )
        for line in others:
            self.say(f"skipped {line}")
        self.say(f"making {self.folder} with {best} ({version})")
        self.remote.run(["/bin/sh", "-c", TAKE_LINK_AWAY, self.folder], timeout=30, check=True)
        self.remote.run([best, "-m", "venv", "--clear", "--prompt", MADE_BY, self.folder], timeout=300, check=True)

    def reaches_registry(self) -> bool:
        """Try whether pip there can fetch one small package."""
        name = "idna" if "idna" in self.pins.all else min(self.pins.all)
        fetch = f"{name}=={self.pins.all[name]}"
        folder = str(PurePosixPath(self.root, REMOTE_LISTS, "reach"))
        options = ["--no-deps", "--no-cache-dir", "--retries", "0", "--timeout", "8", "--dest", folder]
        command = [self.python, "-m", "pip", "download", *QUIET, *options, fetch]
        return self.remote.run(command, timeout=120).returncode == 0

    def push_wheels(self, target: Target, lists: Sequence[Path]) -> list[Path]:
        """Fill a wheelhouse for this host here, and bring it over."""
        self.say(f"cannot reach the package registry: fetching wheels for {target.tag} here")
        with shown(f"{self.remote.name}: fetching wheels", self.progress):
            wheels = wheelhouse.fill(self.remote.name, target, *lists)
        total = sum(wheel.stat().st_size for wheel in wheels)
        self.say(f"sending {len(wheels)} wheels, {size(total)}")
        items = [SyncItem(local=wheel, remote=f"{REMOTE_WHEELS}/{wheel.name}") for wheel in wheels]
        complete = {wheel.parent / wheelhouse.COMPLETE for wheel in wheels}
        items += [SyncItem(local=path, remote=f"{REMOTE_LISTS}/{path.name}") for path in complete]
        report = sync([self.remote], {self.remote.name: items}, self.progress, prune=[REMOTE_WHEELS])[0]
        self.say(f"sent {size(report.bytes)} in {report.seconds:.0f} s")
        return wheels

    def pip(self, *command: str, requirements: str = REQUIREMENTS, other: bool = False) -> None:
        """other: the wheels were fetched by a Python of another minor version."""
        line = [self.python, "-m", "pip", *command, *QUIET, "--no-compile"]
        folder = PurePosixPath(self.root, REMOTE_LISTS)
        files = ["--requirement", str(folder / requirements), "--constraint", str(folder / "constraints.txt")]
        done = self.remote.run([*line, *files], timeout=INSTALL_TIMEOUT_S)
        if done.returncode:
            said = (done.stderr or done.stdout).strip()[-2000:]
            fix = "Fix what pip reports (disk, network, permissions), then run hosts setup again."
            raise HostError(self.remote.name, f"pip failed: {said}", remedy=OTHER_MINOR if other else fix)

    def import_once(self, system: str) -> None:
        scanned = "; the first time, a Mac scans them for a minute" if system == "Darwin" else ""
        self.say(f"loading the packages once{scanned}")
        program = FIRST_IMPORT.read_text(encoding="utf-8")  # -I: not what lies in the user's home
        command = [self.python, "-I", "-c", program]
        with shown(f"{self.remote.name}: loading the packages", self.progress):
            done = self.remote.run(command, timeout=FIRST_IMPORT_S, title="the first import")
        if done.returncode:
            said = (done.stderr or done.stdout).strip()[-2000:] or f"status {done.returncode}"
            raise HostError(self.remote.name, f"a package does not load: {said}", remedy=ANEW)


def write_lists(pins: Pins) -> tuple[Path, Path]:
    """Write requirements.txt and constraints.txt for pip. A host of another platform may need more than this one."""
    LISTS.mkdir(parents=True, exist_ok=True)
    requirements, constraints = LISTS / REQUIREMENTS, LISTS / "constraints.txt"
    for path, names in ((requirements, pins.direct), (constraints, sorted(pins.all))):
        write_atomically(path, "".join(f"{name}=={pins.all[name]}\n" for name in names), durable=False)
    return requirements, constraints


@contextlib.contextmanager
def shown(
    name: str, progress: Progress, taken: Callable[[], int] = lambda: 0, total: int | None = None
) -> Iterator[None]:
    """Tell how far something is, while it lasts; without `total` only that it goes on."""
    over = threading.Event()

    def tell() -> None:
        while not over.is_set():
            with contextlib.suppress(HostError):  # whoever waits for the end will meet it too
                done = max(0, taken())
                progress(name, min(done, total - 1) if total else 0, total, "")
            over.wait(EVERY_S)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        progress(name, total or 0, total or 0, "")
