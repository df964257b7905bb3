"""`--resume RUN`: go on with a run that was stopped or broke off, on the same hosts or on others."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from distributed.checkup.preflight import preflight
from distributed.hosts.paths import PROJECT
from distributed.plan.hosts_file import load_hosts, meeting_address
from distributed.plan.launch import Launch, change_hosts
from distributed.plan.prepare import rehost
from distributed.run_dir.find import find_run
from distributed.run_dir.folder import as_typed, is_running
from distributed.run_dir.summary import FINISHED, NOT_EVALUATED, read_run
from distributed.ssh.host import Hosts
from multimac.view.models import folders_of
from multimac.view.preflight_view import show_preflight
from multimac.view.terminal import Console
from multimac.view.transfers import send
from whisper_tuner.errors import ConfigError, ExitStatus, RunError
from whisper_tuner.hub import check_model

from .attach_stop import start


def resume_run(
    config: Path,
    run: str,
    *,
    name: str = "",
    hosts_file: Path | None = None,
    no_sync: bool = False,
    watch: bool = False,
    detach: bool = False,
) -> ExitStatus:
    """Go on with a run, also on the hosts of another hosts file. Raises TunerError, also if its name is not `name`."""
    console = Console()
    run_dir = find_run(run, folders_of(config)).absolute()
    launch = Launch.load(run_dir)
    _check(run_dir, launch, name)
    if any(rank.host for rank in launch.ranks):
        launch = _bring_up_to_date(console, run_dir, launch, hosts_file, no_sync)
    elif hosts_file or no_sync:
        what = f"run {launch.run_id} trains on this machine alone"
        raise ConfigError(what, remedy="Leave --hosts and --no-sync out.")
    hosts = ", ".join(rank.label for rank in launch.ranks)
    console.print(f"{launch.name}: resuming {launch.run_id} on {hosts}", soft_wrap=True)
    return start(console, run_dir, resume=True, watch=watch, detach=detach)


def _check(run_dir: Path, launch: Launch, name: str) -> None:
    run = launch.run_id
    if name and name != launch.name:
        raise ConfigError(f"run {run} trains {launch.name}, not {name}", remedy="Leave the name out.")
    _check_specs(run_dir, launch)
    profile = launch.ranks[0].spec.known_profile
    if is_running(run_dir):
        raise RunError(f"run {run} is running", remedy=f"Follow it with: multimac runs attach {run}")
    known = read_run(run_dir)
    if known.state == FINISHED:
        raise RunError(f"run {run} is finished", remedy="To train more, start a new run with more epochs.")
    if known.message.startswith(NOT_EVALUATED):  # its checkpoints are gone: it would begin anew
        measure = f"Measure it with: multimac evaluate {as_typed(run_dir)}"
        raise RunError(f"run {run} is trained to its end; only its WER was not measured", remedy=measure)
    read_here: list[str | Path | None] = [profile.train, profile.validation, launch.test]  # by rank 0
    read_here += [kept.clips for kept in launch.keeps]
    read_here += [profile.base_model] if Path(profile.base_model).is_absolute() else []
    for path in [path for path in read_here if path]:
        if not os.path.exists(path):  # noqa: PTH110 - Path.exists raises for a name longer than names can be
            raise RunError(f"run {run} needs {path}, which is gone", remedy="Put it back, or start a new run.")
    check_model(profile)


def _check_specs(run_dir: Path, launch: Launch) -> None:
    """Somebody else may have written run.json: no rank may unpickle anything, or write and remove in another folder."""
    specs = [rank.spec for rank in launch.ranks]
    if any(spec.bundle for spec in specs):
        again = "Call fit again with save_dir and resume=True."
        raise RunError(f"run {launch.run_id} trains a model of your own", remedy=again)
    here = [rank.spec for rank in launch.ranks[1:] if not rank.host] + specs[:1]  # others are told anew
    wrong = [spec.run_dir for spec in here if (PROJECT / spec.run_dir).resolve() != run_dir.resolve()]
    wrong += [name for name in (launch.run_id, *(spec.run_id for spec in specs)) if name != run_dir.name]
    if wrong:
        remedy = "Put the run's folder back where it was, with the name that it had, or start a new run."
        raise RunError(f"{run_dir / 'run.json'} is of another folder: {wrong[0]}", remedy=remedy)


def _bring_up_to_date(
    console: Console, run_dir: Path, launch: Launch, hosts_file: Path | None, no_sync: bool
) -> Launch:
    """Send the run's files, and write what the hosts file says now and where the ranks meet today into run.json.

    Nothing in the run's folder that it needs is changed before all hosts have their files. Returns the new run.json.
    """
    if launch.master is None:
        raise RunError(f"{run_dir / 'run.json'} names hosts, but no master", remedy="Start a new run.")
    before = Hosts(master=launch.master, workers=tuple(rank.host for rank in launch.ranks if rank.host))
    hosts = load_hosts(hosts_file) if hosts_file else before
    others = _addresses(hosts) != _addresses(before)
    if others and no_sync:
        remedy = "Leave --no-sync out: the new hosts need the run's files."
        raise ConfigError(f"the run was on {', '.join(_addresses(before))}", remedy=remedy)
    console.print(f"looking at {', '.join(_addresses(hosts))}")
    with preflight(None, hosts, sync=not no_sync, hosts_file=hosts_file) as report:
        show_preflight(console, report)
        if others:
            console.print("the hosts are not the same as before: they share the work that is left")
        changed, items = rehost(launch, hosts, run_dir, report.machine_workers)
        if not no_sync:
            send(console, items, report.remotes)
        changed = dataclasses.replace(changed, address=report.meeting or meeting_address(hosts, report.remotes))
    change_hosts(run_dir, launch, changed)
    return changed


def _addresses(hosts: Hosts) -> list[str]:
    return [host.address for host in hosts.all]
