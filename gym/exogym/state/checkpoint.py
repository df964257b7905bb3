"""A rank's state as JSON beside named tensors: its hash, and on disk, written whole and checked before it is used."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from exogym.errors import CheckpointError

if sys.platform == "darwin":
    import fcntl

FORMAT = 8


class Checkpoints:
    """The last `keep` checkpoints of rank `name`, in folder/<number>/; a higher number is a later state.

    A checkpoint is NAME.safetensors and then NAME.json, which holds everything that is not a tensor and the hash of
    the first: without it, or with another hash, the checkpoint does not count. Only the user may read them.
    """

    def __init__(self, folder: Path | str, name: str, *, keep: int = 2):
        self.folder, self.name, self.keep = Path(folder), quote(name, safe=""), keep
        self._writer = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="checkpoint", initializer=_yield_to_training
        )
        self._writing: Future[int] | None = None

    def save(self, number: int, state: dict[str, Any], *, unless: Callable[[], bool] = lambda: False) -> int:
        """Write and then drop the oldest; `state` may nest dicts, lists, tuples, tensors, numbers and text.

        unless: asked when its turn has come; then nothing is written.
        Later ones stay: this may be the agreement before a state inside a round. Returns the bytes written.
        Raises CheckpointError (disk full, no permission).
        """
        tensors: dict[str, torch.Tensor] = {}
        tree = to_tree(state, tensors)
        return self._writer.submit(lambda: 0 if unless() else self._write(number, tree, tensors)).result()

    def save_in_background(self, number: int, state: dict[str, Any], *, copy: bool = True) -> Future[int]:
        """Write a copy of the state in a thread, once an earlier one has been written; see save.

        copy: not needed by who waits before it changes the state.
        Later ones are void: they are of a course that was given up when this rank went on from an earlier state.
        """
        wait([self._writing] if self._writing else [])
        tensors: dict[str, torch.Tensor] = {}
        tree = to_tree(state, tensors, copy=copy)
        self._writing = self._writer.submit(self._write, number, tree, tensors, later_void=True)
        return self._writing

    def _write(self, number: int, tree: Any, tensors: dict[str, torch.Tensor], *, later_void: bool = False) -> int:
        weights, index = self._files(number)
        weights_part, index_part = _part(weights), _part(index)
        try:
            for unfinished in self._folders():  # what a killed process left half done may be what fills the disk
                files = self._files(unfinished)
                _unlink(*map(_part, files), *([] if files[1].is_file() else files[:1]))
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            weights.parent.mkdir(exist_ok=True)
            save_file(tensors, weights_part)
            weights_part.chmod(0o600)
            record = {"format": FORMAT, "number": number, "sha256": _sha256(weights_part), "state": tree}
            record["check"] = _check(record)
            index_part.touch(mode=0o600)
            index_part.write_text(json.dumps(record), encoding="utf-8")
            rename_durably((weights_part, weights), (index_part, index))  # one that was there before is gone then
            for folder in (self.folder, self.folder.parent):  # which may be new
                sync(folder)
            size = weights.stat().st_size + index.stat().st_size
        except (OSError, SafetensorError) as error:
            _unlink(weights_part, index_part)
            raise CheckpointError(f"{weights.parent}: cannot be written: {error}") from error
        self._prune(number, later_void)
        return size

    def _prune(self, number: int, later_void: bool) -> None:
        kept = [earlier for earlier in self.numbers() if earlier <= number][-self.keep :]
        for other in self._folders():
            if other in kept or (other > number and not later_void):
                continue
            weights, index = self._files(other)
            _unlink(index, weights)
            if other < number:  # into a later one another rank of this machine may just be writing
                with contextlib.suppress(OSError):
                    weights.parent.rmdir()

    def numbers(self) -> list[int]:
        """Return the numbers of all that are there, ascending; some of them may be damaged."""
        return [number for number in self._folders() if self._files(number)[1].is_file()]

    def good(self) -> list[int]:
        """Return the numbers of those that count."""
        return [number for number in self.numbers() if self._read(number) is not None]

    def other_formats(self) -> list[int]:
        """Return the formats of those that another version of this program has written."""
        found = []
        for number in self.numbers():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found.append(int(json.loads(self._files(number)[1].read_text(encoding="utf-8"))["format"]))
        return [number for number in found if number != FORMAT]

    def glance(self, number: int) -> dict[str, Any] | None:
        """Load all but tensors, which become None; returns None for one that is missing or damaged."""
        record = self._read(number)
        return None if record is None else from_tree(record["state"], None)

    def load(self, number: int) -> dict[str, Any]:
        """Load it, with tensors on the CPU. Raises CheckpointError for one that is missing or damaged."""
        record = self._read(number)
        if record is None:
            raise CheckpointError(f"{self._files(number)[0].parent}: {self.name}'s checkpoint is damaged")
        state: dict[str, Any] = from_tree(record["state"], load_file(self._files(number)[0]))
        return state

    def _folders(self) -> list[int]:
        return sorted(int(path.name) for path in self.folder.glob("*") if path.name.isdecimal())

    def _files(self, number: int) -> tuple[Path, Path]:
        folder = self.folder / f"{number:07d}"
        return folder / f"{self.name}.safetensors", folder / f"{self.name}.json"

    def _read(self, number: int) -> dict[str, Any] | None:
        weights, index = self._files(number)
        try:
            record = json.loads(index.read_text(encoding="utf-8"))
            whole = record.pop("check") == _check(record) and record["sha256"] == _sha256(weights)
            return record if whole and (record["format"], record["number"]) == (FORMAT, number) else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None


def to_tree(value: Any, tensors: dict[str, torch.Tensor], *, copy: bool = False) -> Any:
    """JSON that mirrors `value`, its tensors replaced by names and put into `tensors`: on the CPU, and copied if asked.

    From another device each is copied once, in either case. One that is `unshared` (flat.py) never is.
    """
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=copy and not hasattr(value, "is_unshared")).contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        pairs = value.items()
        return {"dict": [[to_tree(key, tensors, copy=copy), to_tree(item, tensors, copy=copy)] for key, item in pairs]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [to_tree(item, tensors, copy=copy) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(f"a {type(value).__name__} cannot be part of a checkpoint")


def from_tree(tree: Any, tensors: dict[str, torch.Tensor] | None) -> Any:
    """Return the value that `tree` mirrors, with these tensors; with None, if they are not given."""
    if not isinstance(tree, dict):
        return tree
    [(kind, content)] = tree.items()
    if kind == "tensor":
        return None if tensors is None else tensors[content]
    if kind == "dict":
        return {from_tree(key, tensors): from_tree(item, tensors) for key, item in content}
    items = [from_tree(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


def fingerprint(state: Any) -> int:
    """Return 64 bits of the hash of a state, as a signed number; the same for states that are equal to the bit."""
    tensors: dict[str, torch.Tensor] = {}
    hasher = hashlib.blake2b(json.dumps(_sorted(to_tree(state, tensors))).encode(), digest_size=8)
    for tensor in tensors.values():
        hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(hasher.digest(), "big", signed=True)


def _sorted(tree: Any) -> Any:
    """Dicts that are equal may have their keys in another order."""
    if not isinstance(tree, dict):
        return tree
    [(kind, content)] = tree.items()
    if kind == "tensor":
        return tree
    if kind == "dict":
        return {kind: sorted(([_sorted(key), _sorted(item)] for key, item in content), key=lambda pair: repr(pair[0]))}
    return {kind: [_sorted(item) for item in content]}


def _yield_to_training() -> None:
    """Give way, where threads have priorities: on few cores each of torch's threads waits for the slowest."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _part(file: Path) -> Path:
    return file.with_name(file.name + ".part")


def _unlink(*files: Path) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()


def _check(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rename_durably(*renames: tuple[Path, Path]) -> None:
    """Give each `part` of (part, path) its name once all parts are on the disk; then sync the names too."""
    for part, _ in renames:
        sync(part)
    for part, path in renames:
        part.replace(path)
    for folder in dict.fromkeys(path.parent for _, path in renames):
        sync(folder)


def sync(path: Path) -> None:
    """Write a file's content, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if sys.platform == "darwin":  # fsync leaves data in the drive's cache there
            with contextlib.suppress(OSError):  # not every file system has that
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
                return
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
