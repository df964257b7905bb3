"""`multimac runs recover`: the model of a run whose master is gone, from what the other hosts have kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from rich.console import Console

from distributed.hosts.paths import PROJECT
from distributed.launcher.host_spawner import fetch_folder
from distributed.plan.hosts_file import load_hosts
from distributed.plan.run_spec import CHECKPOINTS, SPEC, RunSpec, profile_from_json
from distributed.run_dir.folder import is_running
from distributed.ssh.connection import Remote
from distributed.ssh.host import Host
from distributed.ssh.machine import LocalMachine, Machine
from whisper_tuner.errors import ExitStatus, HostError, RunError, TunerError


@dataclass(frozen=True)
class Kept:
    """A checkpoint on some host. `agreements` counts rounds, or steps of a strategy without rounds."""

    machine: Machine
    project: str
    run: str
    number: int
    name: str

    @property
    def agreements(self) -> int:
        return self.number // 2

    @property
    def folder(self) -> str:
        return f"{self.project}/runs/{self.run}/{CHECKPOINTS}"


def runs_recover(run: str, hosts_file: Path) -> ExitStatus:
    """Raises TunerError."""
    console = Console(highlight=False, markup=False)
    machines = _machines(console, hosts_file)
    try:
        kept = [one for machine, project in machines for one in _kept(machine, project)]
        chosen = _of_one_run(kept, run)
        for one in sorted(chosen, key=lambda kept: kept.number, reverse=True):
            console.print(f"{one.machine.name}: {one.run}, agreed {one.agreements} times", soft_wrap=True)
            try:
                final = _recover(one)
            except (TunerError, OSError) as error:
                console.print(f"  {error}", soft_wrap=True)
                continue
            console.print(f"model: {final}", soft_wrap=True)
            return ExitStatus.OK
    finally:
        for machine, _ in machines:
            machine.close()
    raise RunError(f"no host has a checkpoint of {run} that is whole")


def _machines(console: Console, hosts_file: Path) -> list[tuple[Machine, str]]:
    """All that can be reached, this one first, with their project folders."""
    found: list[tuple[Machine, str]] = [(LocalMachine(), str(PROJECT))]
    for host in load_hosts(hosts_file).workers:
        try:
            found.append(_reached(host))
        except HostError as error:
            console.print(str(error), soft_wrap=True)
    return found


def _reached(host: Host) -> tuple[Machine, str]:
    remote = Remote.connect(host)
    return remote, remote.expand(host.project_path)


def _kept(machine: Machine, project: str) -> list[Kept]:
    """From names alone; whether a checkpoint is whole is seen once it is here."""
    listing = machine.run(["find", f"{project}/runs", "-path", f"*/{CHECKPOINTS}/*/*.json"], timeout=30).stdout
    found = []
    for line in listing.splitlines():
        run, folder, number, file = line.removeprefix(f"{project}/runs/").split("/")[-4:]
        if folder == CHECKPOINTS and number.isdecimal():
            found.append(Kept(machine, project, run, int(number), file.removesuffix(".json")))
    return found


def _of_one_run(kept: list[Kept], run: str) -> list[Kept]:
    names = sorted({one.run for one in kept})
    wanted = [name for name in names if name == run] or [name for name in names if name.startswith(run)]
    if run == "last":
        wanted = names[-1:]
    if len(wanted) != 1:
        known = ", ".join(names) or "none"
        what = f"{len(wanted)} runs begin with {run}" if wanted else f"no host has checkpoints of a run {run}"
        raise RunError(what, remedy=f"Runs with checkpoints on these hosts: {known}.")
    return [one for one in kept if one.run == wanted[0]]


def _recover(one: Kept) -> Path:
    """Fetch what is needed, and export. Raises RunError, HostError, ModelError."""
    from distributed.worker.train import prepared
    from distributed.worker.whisper_wrapper import WhisperModelWrapper
    from exogym.errors import CheckpointError
    from exogym.flat import FlatParameters
    from exogym.state.checkpoint import Checkpoints
    from whisper_tuner.export.final import save_final
    from whisper_tuner.model.base_model import load_base, set_language

    run_dir = PROJECT / "runs" / one.run
    if is_running(run_dir):
        raise RunError(f"run {one.run} is going on here", remedy=f"See it with: multimac runs attach {one.run}")
    here = run_dir / CHECKPOINTS
    if one.folder != str(here):
        here = run_dir / "recovered" / quote(one.machine.name, safe="")
        fetch_folder(one.machine, f"{one.folder}/{one.number:07d}", here / f"{one.number:07d}")
        one.machine.get(f"{one.folder}/{one.name}{SPEC}", here / f"{one.name}{SPEC}")
    spec = RunSpec.from_json((here / f"{one.name}{SPEC}").read_text(encoding="utf-8"))
    profile = profile_from_json(spec.profile or {})
    is_sent = not Path(profile.base_model).is_absolute() and not isinstance(one.machine, LocalMachine)
    if is_sent and not (PROJECT / profile.base_model).exists():
        fetch_folder(one.machine, f"{one.project}/{profile.base_model}", PROJECT / profile.base_model)
    try:
        state = Checkpoints(here, unquote(one.name)).load(one.number)["agreed"]["strategy"]
    except CheckpointError as error:
        raise RunError(str(error)) from None
    model, processor = load_base(profile.base_model)
    set_language(model, profile.language or None, profile.task)
    model = prepared(model, profile)
    FlatParameters(WhisperModelWrapper(model, processor, "cpu")).write(state.get("master", state.get("weights")))
    return save_final(model, processor, run_dir / "final", profile.base_model)
