"""`multimac runs clean`: disk space that runs do not need any more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from distributed.hosts.paths import PROJECT, STORE
from distributed.run_dir.find import Removal, age, find_run, named_removals, removals, remove, remove_folder, run_dirs
from distributed.run_dir.folder import as_typed, disk_use
from distributed.run_dir.summary import RUNNING, read_run
from multimac.view.models import folders_of
from multimac.view.terminal import Console
from whisper_tuner.errors import ConfigError, ExitStatus, TunerError
from whisper_tuner.fact_store import CACHE
from whisper_tuner.text import size

from .options import CONFIG, Config, RunsDir, command


@command("runs clean")
def runs_clean(
    runs: Annotated[list[str] | None, Argument(help="Remove these runs, their models included.")] = None,
    yes: Annotated[bool, Option("--yes", help="Remove what is listed.")] = False,
    keep: Annotated[int, Option(min=0, help="Keep this many of the newest runs.")] = 0,
    older_than: Annotated[str, Option(help="Only runs that ended longer ago than this: 12h, 7d, 2w.")] = "",
    cache: Annotated[bool, Option("--cache", help="Only .multimac/cache, which can be computed anew.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print only the list, as JSON.")] = False,
    runs_dir: RunsDir = None,
    config: Config = CONFIG,
) -> ExitStatus:
    """List what can be removed and how much disk it takes: runs without a model, checkpoints of finished runs.

    Runs that can be resumed are kept, unless they are named or --older-than is given.
    """
    console, kept = Console(stderr=as_json), []
    folders = folders_of(config, runs_dir)
    if cache:
        if runs or keep or older_than:
            raise ConfigError("--cache removes no runs", remedy="Leave their names, --keep and --older-than out.")
        return _clean_cache(console, folders, really=yes, as_json=as_json)
    seconds = age(older_than) if older_than else None
    if runs:
        if keep or older_than:
            raise ConfigError("--keep and --older-than choose among all runs", remedy="Leave the run names out.")
        unique = dict.fromkeys(find_run(name, folders) for name in runs)
        found = named_removals([read_run(path) for path in unique], folders)
    else:
        every = [read_run(path) for path in run_dirs(folders)]
        found = removals(every, keep=keep, older_than=seconds)
        going = {removal.run.id for removal in found}
        if kept := [run.id for run in every if run.resumable and run.id not in going]:
            console.print("kept because they can be resumed; to remove them, name them or use --older-than:")
            console.print(f"  {', '.join(kept)}", soft_wrap=True)
    for removal in found:
        console.print(f"{size(removal.size):>8}  {removal.path}  ({removal.reason})", soft_wrap=True)
    failed = _remove_all(found) if yes else []
    if as_json:
        print(json.dumps(_listed(found, kept), indent=2))
    total = size(sum(removal.size for removal in found))
    if not found:
        console.print("nothing to remove")
    elif not yes:
        console.print(f"{total} in all; nothing has been removed yet: repeat the command with --yes")
    elif not failed:
        console.print(f"removed, {total} freed")
    for error in failed[1:]:
        console.print(error.told, style="red")
    if failed:
        raise failed[0]
    return ExitStatus.OK


def _clean_cache(console: Console, folders: Sequence[Path], *, really: bool, as_json: bool) -> ExitStatus:
    """List what can be computed anew, and remove it: log-mels, outputs of encoders, what is known of files.

    Raises ConfigError while a run is going.
    """
    path = PROJECT / STORE / CACHE
    for run in map(read_run, run_dirs(folders) if really else ()):
        if run.state == RUNNING:
            raise ConfigError(f"{run.id} is running", remedy=f"Stop it first: multimac runs stop {as_typed(run.path)}")
    held, reason = disk_use(path)[0] if path.is_dir() else 0, "it is computed anew when it is needed"
    if really and held:
        remove_folder(path.resolve())  # it may be a link to a larger disk
    if as_json:
        one = {"run": "", "path": str(path), "bytes": held, "reason": reason, "removed": not path.exists()}
        print(json.dumps({"removals": [one] if held else [], "kept": []}, indent=2))
    if not held:
        console.print("nothing to remove")
        return ExitStatus.OK
    console.print(f"{size(held):>8}  {path}  ({reason})", soft_wrap=True)
    told = f"removed, {size(held)} freed" if really else "nothing has been removed yet: repeat the command with --yes"
    console.print(told)
    return ExitStatus.OK


def _listed(found: Sequence[Removal], kept: Sequence[str]) -> dict:
    """Return what --json prints. kept: ids of runs that can be resumed."""
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
    """Remove all that can be removed; return what went wrong with the others."""
    failed: list[TunerError] = []
    for removal in found:
        try:
            remove(removal)
        except TunerError as error:
            failed.append(error)
    return failed
