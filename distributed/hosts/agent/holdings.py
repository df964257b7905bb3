"""What this program has put on this host, and its removal. What else lies in the project folder stays."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from .files import CHECKOUT, PRIVATE, in_use, load_index, open_index

SHOWN = 5


def holdings(root: str, kinds: list, environments: list, made_by: str, unwanted: list) -> dict:
    """Tell what is ours, and remove what is of the kinds `unwanted`, unless it is a checkout or at work.

    kinds: [name, patterns of names below `root`]; an environment is known by its prompt `made_by`, and code by the
    record of what was sent.
    """
    folder, base = Path(root), Path(root).resolve()
    is_checkout, work = (base / CHECKOUT).exists(), work_in(base)
    ours = find(base, kinds, environments, made_by)
    held = [{"kind": kind, "path": os.path.commonpath(of), **measured(of)} for kind, of in ours.items() if of]
    others = sorted(str(path.relative_to(base)) for path in files_below(base, set().union(*ours.values())))
    if unwanted and not is_checkout and not work:
        for path in [path for kind in unwanted for path in ours[kind]]:
            remove(path, base)
        if (folder / PRIVATE).exists():
            with open_index(folder / PRIVATE) as index:  # names of what is gone: those of recordings may say much
                for known in index.values():
                    for name in [name for name in known if not (folder / name).exists()]:
                        del known[name]
        for empty in (folder / "runs", folder):  # the end of a run leaves `runs` empty
            with contextlib.suppress(OSError):  # it is not empty, or a link
                empty.rmdir()
    return {"checkout": is_checkout, "in_use": work, "held": held, "others": len(others), "named": others[:SHOWN]}


def find(base: Path, kinds: list, environments: list, made_by: str) -> dict:
    """Find our files and folders by kind. A folder with a run.json is that of a master's run, and not ours."""
    managed = load_index(base / PRIVATE)["managed"]
    sent = [base / name for name in managed if managed[name] and lies_in(base, base / name)]
    folders = [Path(name).parent.resolve() / Path(name).name for name in environments]
    compiled = sorted({path.with_name("__pycache__") for path in sent})
    marked = {
        "environment": [folder for folder in folders if has_prompt(folder, made_by)],
        "code": [*filter(Path.is_file, sent), *(path for path in compiled if path.is_dir() and not path.is_symlink())],
    }
    ours: dict = {}
    taken: set = set()
    for kind, patterns in kinds:
        found = [path for pattern in patterns for path in sorted(base.glob(pattern)) if lies_in(base, path)]
        found = [path for path in found if not path.with_name("run.json").exists()] + marked.get(kind, [])
        found = [path for path in found if not any(os.path.ismount(place) for place, _, _ in os.walk(str(path)))]
        ours[kind] = [path for path in found if not taken.intersection((path, *path.parents))]
        taken.update(found)
    return ours


def lies_in(base: Path, path: Path) -> bool:
    """Tell whether a path really lies below `base`: no part of its name there is a link, or leads up."""
    return base in path.parents and path.resolve() == path


def has_prompt(folder: Path, prompt: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return not folder.is_symlink() and f"prompt = {prompt!r}\n" in (folder / "pyvenv.cfg").read_text()
    return False


def work_in(base: Path) -> str:
    """Name what works in the project folder now; "" for nothing."""
    runs = {path.parent.parent.name for path in base.glob("runs/*/checkpoints/*.sock")}
    return "" if not in_use(base / PRIVATE) else f"run {', '.join(sorted(runs))}" if runs else "work for a run"


def files_below(path: Path, without: Collection = ()) -> Iterator:
    """List the files and links below a path, which are not followed; the path itself if it is one."""
    if not path.is_dir() and path.exists():
        yield path
    for place, folders, files in os.walk(str(path)):
        links = [name for name in folders if Path(place, name).is_symlink()]
        folders[:] = [name for name in folders if Path(place, name) not in without]
        yield from (entry for name in (*links, *files) if (entry := Path(place, name)) not in without)


def measured(paths: list) -> dict:
    sizes = []
    for file in [file for path in paths for file in files_below(path)]:
        with contextlib.suppress(OSError):  # somebody removes it just now
            sizes.append(file.lstat().st_size)
    return {"files": len(sizes), "bytes": sum(sizes)}


def remove(path: Path, base: Path) -> None:
    """Remove it, and the folders between it and `base` that are empty then."""
    while path.is_dir():
        with contextlib.suppress(FileNotFoundError):  # another host has this folder too, and removes it as well
            shutil.rmtree(str(path))
    path.unlink(missing_ok=True)
    for folder in [folder for folder in path.parents if base in folder.parents]:
        with contextlib.suppress(OSError):
            folder.rmdir()
