"""`multimac runs recover`: the model of a run whose master is gone, from checkpoints on the other hosts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from distributed.hosts.keep_awake import awake, hosts_awake
from distributed.hosts.paths import PROJECT, STORE
from distributed.launcher.spawner import fetch_folder
from distributed.plan.hosts_file import load_hosts
from distributed.plan.run_spec import CHECKPOINTS, SPEC, RunSpec
from distributed.run_dir.find import meant
from distributed.run_dir.folder import is_running
from distributed.run_dir.summary import read_run
from distributed.ssh.connection import Remote
from distributed.ssh.machine import LocalMachine, Machine
from exogym.errors import CheckpointError
from multimac.view.run_tables import print_next
from multimac.view.terminal import Console
from whisper_tuner.errors import ConfigError, ExitStatus, HostError, RunError, TunerError
from whisper_tuner.files import below

from .options import HOSTS, HostsFile, Run, command

PLACE = rf"(?P<run>[^/]+)/{CHECKPOINTS}/(?P<number>[0-9]{{7,12}})/(?P<rank>[^/]+)\.json"
MOST_OF_SPEC = 1 << 20  # bytes
MODELS = f"{STORE}/models/"  # of the project folder on a host


@dataclass(frozen=True)
class Kept:
    """A checkpoint in the project folder of some host. `rank` is the rank's name, as it stands in file names."""

    machine: Machine
    project: str
    run: str
    number: int
    rank: str

    @property
    def folder(self) -> str:
        return f"{self.project}/runs/{self.run}/{CHECKPOINTS}"


@command("runs recover")
@awake()
def runs_recover(run: Run = "last", hosts: HostsFile = HOSTS) -> ExitStatus:
    """Build a model from what the hosts of a run have kept, if the master or its disk is gone."""
    console = Console(soft_wrap=True)
    with contextlib.ExitStack() as stack:  # of all hosts that can be reached, this one first
        machines: list[tuple[Machine, str]] = [(LocalMachine(), str(PROJECT))]
        for host in load_hosts(hosts).workers:
            try:
                remote = stack.enter_context(Remote.connect(host))
                stack.enter_context(hosts_awake([remote]))
                machines.append((remote, remote.project))
            except HostError as error:
                console.print(error.told)
        final = recover(run, machines, PROJECT, console.print)
    console.print(f"model: {final}")
    print_next(console, read_run(final.parent))
    return ExitStatus.OK


def recover(run: str, machines: Sequence[tuple[Machine, str]], here: Path, tell: Callable[[str], None]) -> Path:
    """Save the model of the newest whole checkpoint below the project folder `here`. Raises RunError.

    machines: each with its project folder.
    """
    kept = [one for machine, project in machines for one in _kept(machine, project)]
    runs = sorted({one.run for one in kept}, reverse=True)
    try:
        name = meant(run, runs, "the checkpoints of these hosts", shown=len(runs))  # no other command lists them
    except ConfigError as error:
        raise RunError(error.args[0], remedy=error.remedy) from None
    run_dir = here / "runs" / name
    if is_running(run_dir):
        raise RunError(f"run {name} is running here", remedy=f"Follow it with: multimac runs attach {name}")
    final = run_dir / "final"  # of a later step, perhaps: hosts that slept at the end keep checkpoints
    if (run_dir / "run.json").exists() and any(final.glob("*")):
        raise RunError(f"run {name} has a model: {final}", remedy="Move it away to have another one made.")
    of_run = [one for one in kept if one.run == name]
    for one in sorted(of_run, key=lambda kept: kept.number, reverse=True):
        agreements = one.number // 2  # odd numbers are states inside a round
        tell(f"{one.machine.name}: {one.run}, agreed {agreements} times")
        try:
            return _recover(one, final, here, tell)
        except (TunerError, OSError) as error:
            tell(f"  {error}")
    raise RunError(f"no host has a checkpoint of {name} that is complete")


def _kept(machine: Machine, project: str) -> list[Kept]:
    """List what a host has, by file names alone; whether a checkpoint is whole is seen once it is here."""
    listing = machine.run(["find", f"{project}/runs", "-path", f"*/{CHECKPOINTS}/*/*.json"], timeout=30).stdout
    found = []
    for line in listing.splitlines():
        match = re.fullmatch(PLACE, line.removeprefix(f"{project}/runs/"))
        with contextlib.suppress(ValueError):  # no name that a rank gives
            if match and below(Path(), match["run"]) and below(Path(), match["rank"]):
                found.append(Kept(machine, project, match["run"], int(match["number"]), match["rank"]))
    return found


def _recover(one: Kept, final: Path, here: Path, tell: Callable[[str], None]) -> Path:
    """Fetch what is needed, and export. Raises RunError, HostError, ModelError."""
    from distributed.worker.whisper_wrapper import WhisperModelWrapper
    from exogym.flat import FlatParameters
    from exogym.state.checkpoint import Checkpoints
    from whisper_tuner.export.final import save_final
    from whisper_tuner.model.base_model import load_base, prepare, set_language

    folder = _fetched(one, final.parent)
    spec = RunSpec.from_json((folder / f"{one.rank}{SPEC}").read_text("utf-8"))
    if spec.is_pipeline:
        raise RunError("it is one half of a model (strategy = pipeline)", remedy="Go on with --resume on both hosts.")
    profile = spec.known_profile
    base = _fetched_base(one, profile.base_model, here)
    try:
        state = Checkpoints(folder, unquote(one.rank)).load(one.number)["agreed"]
    except CheckpointError as error:
        raise RunError(str(error)) from None
    model, processor = load_base(base)
    set_language(model, profile.language or None, profile.task)
    trained = prepare(model, profile)
    weights = state["strategy"]["weights"]
    if profile.keep_best and state["best_weights"] is not None:
        weights = state["best_weights"]
        tell(f"  of step {state['now']['best_at']}, the best so far (keep_best = {profile.keep_best})")
    FlatParameters(WhisperModelWrapper(trained, processor, "cpu")).write(weights)
    return save_final(trained, processor, final, base, blend=profile.blend)


def _fetched(one: Kept, run_dir: Path) -> Path:
    """Return the folder here that holds the checkpoint and its spec. Raises HostError."""
    if one.folder == str(run_dir / CHECKPOINTS):
        return run_dir / CHECKPOINTS
    folder = run_dir / "recovered" / quote(one.machine.name, safe="")
    fetch_folder(one.machine, f"{one.folder}/{one.number:07d}", folder / f"{one.number:07d}")
    one.machine.get(f"{one.folder}/{one.rank}{SPEC}", folder / f"{one.rank}{SPEC}", most=MOST_OF_SPEC)
    return folder


def _fetched_base(one: Kept, base_model: str, here: Path) -> str:
    """Return the base model. The master's spec names it as the user did, a host's by its place in the project there."""
    if one.project == str(here):
        return base_model
    try:
        base = below(here / MODELS, base_model.removeprefix(MODELS))
    except ValueError as error:
        remedy = f"Only a model in {MODELS} there is fetched: recover on the machine that has the base model."
        raise HostError(one.machine.name, f"the base model of its checkpoint: {error}", remedy=remedy) from None
    if not base.exists():
        fetch_folder(one.machine, f"{one.project}/{base_model}", base)
    return str(base)
