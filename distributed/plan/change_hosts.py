"""A stopped run gets other hosts: its run.json, and the names of the checkpoints on this machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import quote

from whisper_tuner.files import atomic_path, sync_folder

from .launch import Launch
from .run_spec import CHECKPOINTS, SPEC

PARTS = (".safetensors", ".json")  # of a checkpoint, in the order in which exogym writes them


def change_hosts(run_dir: Path, before: Launch, after: Launch) -> None:
    """Make `after` the run.json. Checkpoints of this machine are found under its address, which may be another now.

    They have both names while run.json is replaced. So the run can go on from them after a crash at any line, with
    the hosts that it had or with those that it was to have.
    """
    old, new = (quote(launch.ranks[0].label, safe="") for launch in (before, after))
    renamed = [] if old == new else _files(run_dir, old)
    for file in renamed:
        _link(file, file.with_name(new + file.name.removeprefix(old)))
    for folder in {file.parent for file in renamed}:
        sync_folder(folder)
    after.save(run_dir)
    for file in renamed:
        file.unlink()


def _files(run_dir: Path, name: str) -> list[Path]:
    """With its spec, by which `runs recover` reads them."""
    names = [*(f"*/{name}{part}" for part in PARTS), f"{name}{SPEC}"]
    return [file for name in names for file in sorted((run_dir / CHECKPOINTS).glob(name))]


def _link(file: Path, also: Path) -> None:
    also.unlink(missing_ok=True)  # of an earlier attempt
    try:
        also.hardlink_to(file)
    except OSError:  # exFAT and some network drives have no hard links
        with atomic_path(also) as part:
            shutil.copyfile(file, part)
