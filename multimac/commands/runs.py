"""`multimac runs list | show | compare | clean`. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from distributed.hosts.paths import PROJECT, STORE
from distributed.run_dir.clean import Removal, age, named_removals, removals, remove
from distributed.run_dir.find import find_run, run_dirs, speed_ups
from distributed.run_dir.folder import disk_use
from distributed.run_dir.summary import BROKEN, FAILED, INTERRUPTED, RECOVERED, RUNNING, RunSummary, read_run
from multimac.view import run_tables
from multimac.view.narrow import USUAL_WIDTH, fitting
from multimac.view.terminal import Console
from whisper_tuner.config import ConfigFile
from whisper_tuner.errors import ConfigError, ExitStatus, RunError, TunerError
from whisper_tuner.fact_store import CACHE
from whisper_tuner.paths import shown
from whisper_tuner.text import size

NEWEST = 20
SHOWN_PROBLEMS = 10


def folders_of(config: Path, runs_dir: Path | None) -> list[Path]:
    """The folders of runs: `runs_dir` if given, else `runs` beside config.ini and each runs_dir that it sets.

    Raises ConfigError.
    """
    if runs_dir is not None:
        if not runs_dir.is_dir():
            raise ConfigError(f"{runs_dir}: there is no such folder", remedy="--runs-dir names the folder of all runs.")
        return [runs_dir]
    if not config.exists():
        return [Path("runs")]
    file = ConfigFile(config)
    return [shown(folder) for folder in dict.fromkeys([file.path.parent / "runs", *file.paths("runs_dir")])]


def runs_list(folders: Sequence[Path], *, everything: bool, as_json: bool) -> ExitStatus:
    console = Console(highlight=False, markup=False)
    found = run_dirs(folders)
    runs = [read_run(path) for path in (found if everything else found[:NEWEST])]
    rows = list(zip(runs, speed_ups(runs), strict=True))
    if as_json:
        print(json.dumps([to_json(*row) for row in rows], indent=2))
        return ExitStatus.OK
    if not rows:
        console.print(f"no run in {', '.join(map(str, folders))}")
        return ExitStatus.OK
    console.print(fitting(console, run_tables.list_table(rows, console.width), below=USUAL_WIDTH))
    for run in runs:
        if run.state == BROKEN:
            console.print(f"{run.id}: {run.message}", style="red", soft_wrap=True)
        elif run.left_out:
            console.print(f"{run.id}: {run.left_out}", style="yellow", soft_wrap=True)
    if len(found) > len(runs):
        console.print(f"{len(found) - len(runs)} older ones: --all")
    return ExitStatus.OK


def runs_show(folders: Sequence[Path], name: str, *, as_json: bool) -> ExitStatus:
    console = Console(highlight=False, markup=False)
    run = read_run(find_run(name, folders))
    [speed_up] = speed_ups([run])
    if as_json:
        print(json.dumps(to_json(run, speed_up, whole=True), indent=2))
        return ExitStatus.OK
    console.print(run.id, style="bold", soft_wrap=True)
    console.print(run_tables.facts_table(run, speed_up))
    if any(host.steps for host in run.per_host):
        console.print()
        console.print(fitting(console, run_tables.host_table(run)))
    problems = [*([run.left_out] if run.left_out else []), *run.problems]
    if len(problems) > SHOWN_PROBLEMS:
        problems[SHOWN_PROBLEMS:] = [f"and {len(problems) - SHOWN_PROBLEMS} more, in {run.path / 'events.jsonl'}"]
    _print_block(console, problems)
    if run.state in (FAILED, BROKEN, INTERRUPTED, RECOVERED):
        _print_block(console, run.message.splitlines(), style="red" if run.state in (FAILED, BROKEN) else "")
    _print_block(console, run_tables.curve_lines(run, console.width - 1))
    commands = [f"  {command}" for command in run_tables.next_commands(run)]
    _print_block(console, ["next:", *commands] if commands else [])
    return ExitStatus.OK


def _print_block(console: Console, lines: Sequence[str], *, style: str = "") -> None:
    if lines:
        console.print()
    for line in lines:
        console.print(line, style=style, soft_wrap=True)


def runs_compare(folders: Sequence[Path], names: Sequence[str], *, as_json: bool) -> ExitStatus:
    console = Console(highlight=False, markup=False)
    runs = [read_run(path) for path in dict.fromkeys(find_run(name, folders) for name in names)]
    if len(runs) < 2:
        raise ConfigError("a comparison needs two runs", remedy="Name two or more: multimac runs compare RUN RUN")
    found = speed_ups(runs)
    if as_json:
        whole = [to_json(*pair, whole=True) for pair in zip(runs, found, strict=True)]
        print(json.dumps({"runs": whole, "settings that differ": run_tables.differing(runs)}, indent=2, default=str))
        return ExitStatus.OK
    console.print(run_tables.comparison(runs, found))
    _print_block(console, run_tables.compared_losses(runs, console.width - 1))
    return ExitStatus.OK


def runs_clean(
    folders: Sequence[Path], names: Sequence[str], *, really: bool, keep: int, older_than: str, as_json: bool
) -> ExitStatus:
    console, kept = Console(highlight=False, markup=False, stderr=as_json), []
    seconds = age(older_than) if older_than else None
    if names:
        if keep or older_than:
            raise ConfigError("--keep and --older-than choose among all runs", remedy="Leave the run names out.")
        unique = dict.fromkeys(find_run(name, folders) for name in names)
        found = named_removals([read_run(path) for path in unique], folders)
    else:
        runs = [read_run(path) for path in run_dirs(folders)]
        found = removals(runs, keep=keep, older_than=seconds)
        going = {removal.run.id for removal in found}
        if kept := [run.id for run in runs if run.resumable and run.id not in going]:
            console.print("kept because they can be resumed; to remove them, name them or use --older-than:")
            console.print(f"  {', '.join(kept)}", soft_wrap=True)
    for removal in found:
        console.print(f"{size(removal.size):>8}  {removal.path}  ({removal.reason})", soft_wrap=True)
    failed = _remove_all(found) if really else []
    if as_json:
        print(json.dumps(_listed(found, kept), indent=2))
    total = size(sum(removal.size for removal in found))
    if not found:
        console.print("nothing to remove")
    elif not really:
        console.print(f"{total} in all; nothing has been removed yet: repeat the command with --yes")
    elif not failed:
        console.print(f"removed, {total} freed")
    for error in failed[1:]:
        console.print(str(error), style="red")
    if failed:
        raise failed[0]
    return ExitStatus.OK


def cache_clean(folders: Sequence[Path], *, really: bool, as_json: bool) -> ExitStatus:
    """List what can be computed anew, and remove it: log-mels, outputs of encoders, what is known of files.

    Raises ConfigError while a run is going, RunError where it cannot be removed.
    """
    console, cache = Console(highlight=False, markup=False, stderr=as_json), PROJECT / STORE / CACHE
    for run in map(read_run, run_dirs(folders) if really else ()):
        if run.state == RUNNING:
            raise ConfigError(f"{run.id} is running", remedy=f"Stop it first: multimac runs stop {run.id}")
    held, reason = disk_use(cache)[0] if cache.is_dir() else 0, "it is computed anew when it is needed"
    if really and held:
        try:
            shutil.rmtree(cache)
        except OSError as error:
            raise RunError(f"{error.filename}: {error.strerror}", remedy="Look at its permissions.") from None
    if as_json:
        one = {"run": "", "path": str(cache), "bytes": held, "reason": reason, "removed": not cache.exists()}
        print(json.dumps({"removals": [one] if held else [], "kept": []}, indent=2))
    if not held:
        console.print("nothing to remove")
        return ExitStatus.OK
    console.print(f"{size(held):>8}  {cache}  ({reason})", soft_wrap=True)
    told = f"removed, {size(held)} freed" if really else "nothing has been removed yet: repeat the command with --yes"
    console.print(told)
    return ExitStatus.OK


def _listed(found: Sequence[Removal], kept: Sequence[str]) -> dict:
    """kept: ids of runs that can be resumed."""
    listed = [
        {
            "run": one.run.id,
            "path": str(one.path),
            "bytes": one.size,
            "reason": one.reason,
            "removed": not one.path.exists(),
        }
        for one in found
    ]
    return {"removals": listed, "kept": [*kept]}


def _remove_all(found: Sequence[Removal]) -> list[TunerError]:
    """Remove all that can be removed; what went wrong with the others."""
    failed: list[TunerError] = []
    for removal in found:
        try:
            remove(removal)
        except TunerError as error:
            failed.append(error)
    return failed


def to_json(run: RunSummary, speed_up: float | None, *, whole: bool = False) -> dict:
    """Unless `whole`: without curves and settings."""
    values = dataclasses.asdict(run) | {"speed_up": speed_up}
    if not whole:
        del values["curves"], values["settings"]
    return json.loads(json.dumps(values, default=str))
