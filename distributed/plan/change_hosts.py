"""A stopped run gets other hosts: its run.json, and the names of the checkpoints on this machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import quote

from whisper_tuner.files import atomic_path, sync_folder

from .launch import Launch
from .run_spec import CHECKPOINTS

PARTS = (".safetensors", ".json")  # of a checkpoint, in the order in which exogym writes them


def change_hosts(run_dir: Path, before: Launch, after: Launch) -> None:
    """Make `after` the run.json. Checkpoints of this machine are found under its address, which may be another now.

    They have both names while run.json is replaced. So the run can go on from them after a crash at any line, with
    the hosts that it had or with those that it was to have.
    """
    old, new = (quote(launch.ranks[0].label, safe="") for launch in (before, after))
    renamed = [] if old == new else _files(run_dir, old)
    for file in renamed:
        _link(file, file.with_name(new + file.suffix))
    for folder in {file.parent for file in renamed}:
        sync_folder(folder)
    after.save(run_dir)
    for file in renamed:
        file.unlink()


def _files(run_dir: Path, name: str) -> list[Path]:
    return [file for part in PARTS for file in sorted((run_dir / CHECKPOINTS).glob(f"*/{name}{part}"))]


def _link(file: Path, also: Path) -> None:
    also.unlink(missing_ok=True)  # of an earlier attempt
    try:
        also.hardlink_to(file)
    except OSError:  # exFAT and some network drives have no hard links
        with atomic_path(also) as part:
            shutil.copyfile(file, part)
