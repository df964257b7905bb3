"""Paths as users write them; files of which a reader never sees half, and which outlast a power cut."""

from __future__ import annotations

import contextlib
import csv
import errno
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from types import SimpleNamespace

from whisper_tuner.errors import ConfigError, RunError

DATALESS = 0x40000000  # SF_DATALESS (man chflags of macOS); in Python's stat from 3.13 on
FORMULA = r"'*[=+\-@\t\r\n]"  # how a cell begins that a spreadsheet computes
HASH_BYTES = 16
TESTED = ("test", "valid", "dev")  # in names of lists that are not trained on
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
# What a user can do about a file or folder that the system refuses.
REMEDIES = {
    errno.ENOSPC: "The disk is full: free some space, or choose a folder on another disk.",
    errno.EDQUOT: "The disk is full for this user: free some space, or choose a folder on another disk.",
    errno.EROFS: "The disk is read-only: choose a folder on another one.",
    errno.EIO: "The disk fails: choose a folder on another one, and look at this one's cable and health.",
    errno.EACCES: "Look at its permissions and its folder's; on a Mac also at Privacy, Files and Folders.",
    errno.EPERM: "Look at its permissions and its folder's; on a Mac also at Privacy, Files and Folders.",
    errno.EMFILE: "Too many files are open: run `ulimit -n 4096`, and start again in the same terminal.",
}
# Of files that libsndfile, ffmpeg or a Mac's afconvert may read: what a folder of audio is searched for.
AUDIO_SUFFIXES = (
    *(".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a", ".aac", ".aif", ".aiff", ".aifc", ".caf"),
    *(".wma", ".amr", ".au", ".sph", ".webm", ".mp4", ".m4v", ".mov", ".mkv", ".avi", ".3gp"),
)


def expanded(path: str | Path) -> Path:
    """Put the home folder for `~`; before a name that no user has, or can have, it is an ordinary character."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):
        return Path(path)


def is_audio(path: PurePath) -> bool:
    """Tell by the name."""
    return path.suffix.lower() in AUDIO_SUFFIXES


def is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no disk takes
        return False


def refusal(error: OSError) -> RunError | None:
    """Return in a user's words what the system refuses about a file; None where it is about something else."""
    if error.errno not in REMEDIES and error.filename is None:
        return None
    what = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error.strerror)
    return RunError(what, remedy=REMEDIES.get(error.errno or 0, "Choose another file or folder."))


def hash_of(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=HASH_BYTES).digest()


def content_hash(path: Path) -> bytes:
    """Return the `hash_of` of what a file holds. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=HASH_BYTES)).digest()


def check_writable(folder: Path, remedy: str = "Choose another folder with --out.") -> None:
    """Try to write where a folder is, or is to be made, before hours of work. Raises ConfigError; leaves nothing."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))  # noqa: PTH110
    try:
        with tempfile.TemporaryFile(dir=there) as file:  # a full disk lets it open one
            file.write(bytes(1 << 16))
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}", remedy=remedy) from None


def beside(path: Path) -> list[str]:
    """List the names in the folder where a path is, or was looked for."""
    try:
        return [found.name for found in path.parent.iterdir()]
    except OSError:
        return []


def like(path: Path) -> str:
    """Return ", did you mean 'x'?" where a name in the path's folder is like its own, else nothing.

    A list of training clips is never meant by the name of a test set.
    """
    from exogym.config import nearest  # not on a host that is only looked at: its Python may be too old

    tested = any(part in path.stem.lower() for part in TESTED)
    names = [name for name in beside(path) if not (tested and "train" in name.lower())]
    names = [name for name in names if nearest(path.stem, [Path(name).stem])]  # not by .json alone
    return nearest(path.name, names, before="" if path.parent == Path() else f"{path.parent}/")


def shown(path: Path) -> Path:
    """Relative to here where it lies below: it is what a user would type."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def is_below(name: str) -> bool:
    """Tell if a relative name stays below the folder that it is joined to."""
    return "\0" not in name and not {"", ".", ".."} & {*name.split("/")}


def below(folder: Path, name: str) -> Path:
    """The path `folder`/`name`, for a name that a host has said, or that stands in a file that somebody else wrote.

    Raises ValueError for a name that leads elsewhere, or that is none: with a control character, a backslash, or a `~`
    at its beginning.
    """
    if not is_below(name) or re.search(r"[\x00-\x1f\x7f-\x9f\\]|^~", name):
        raise ValueError(f"{name!r} is not a name below {folder}")
    return folder / name


def is_evicted(found: os.stat_result) -> bool:
    """Tell if a file's content is in iCloud only: to open it blocks until it is here, or fails without internet."""
    return bool(getattr(found, "st_flags", 0) & DATALESS)


def download_remedy(folder: Path) -> str:
    return f"In Finder: Keep Downloaded, or run: brctl download {shlex.quote(str(folder))}"


def write_atomically(path: Path, text: str, *, durable: bool = True, mode: int = 0o600) -> None:
    """Replace the text of a file. Readers see the old text or the new one."""
    with atomic_path(path, durable=durable, mode=mode) as part:
        part.write_text(text, encoding="utf-8")


def write_shared(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Replace the text of a user's own file: it keeps its mode, and of a link what it points to is replaced.

    mode: of a new one.
    """
    path = path.resolve()
    write_atomically(path, text, mode=path.stat().st_mode & 0o777 if path.exists() else mode)


def private(path: str, flags: int) -> int:
    """The opener of a file that, if it is new, only its owner may read."""
    return os.open(path, flags, 0o600)


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]], *, exact: bool = False) -> None:
    """Write a CSV; its folder is made. Nothing in it is a formula to a spreadsheet, unless it is to be `exact`."""
    lines: list[str] = []
    writer = csv.writer(SimpleNamespace(write=lines.append))  # ends lines with CR LF, and so quotes a CR in a cell
    writer.writerow(header)
    for row in rows:
        writer.writerow(row if exact else map(_shown, row))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(f"{line[:-2]}\n" for line in lines))


def _shown(cell: object) -> object:
    return f"'{cell}" if re.match(FORMULA, str(cell)) and not isinstance(cell, (int, float)) else cell


def read_table(text: Iterable[str]) -> Iterator[dict[str, str]]:
    """The rows of a CSV as they were before `write_table` wrote them, not `exact`. Raises csv.Error."""
    for row in csv.DictReader(text):
        yield {name: cell[1:] if re.match(f"'{FORMULA}", str(cell)) else cell for name, cell in row.items()}


@contextlib.contextmanager
def atomic_path(path: Path, *, durable: bool = True, mode: int = 0o600) -> Iterator[Path]:
    """A file beside `path` to write to. It is renamed to `path` at the end, or removed after an error.

    durable=False is for caches: then a power cut may leave an empty file.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(mode)
        if durable:
            sync(part)
        part.replace(path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        _name(error, path)
        raise
    if durable:
        sync_folder(path.parent)


def _name(error: BaseException, path: Path) -> None:
    """Say in an error of `write`, which knows no name, which file it is about."""
    if isinstance(error, OSError) and error.errno in DISK and error.filename is None:
        error.filename = str(path)


@contextlib.contextmanager
def atomic_folder(path: Path, *, mode: int = 0o700) -> Iterator[Path]:
    """Make a folder that appears whole or not at all. What was there stays as `path`.old until then."""
    part, old = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.old")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True, mode=mode)
    try:
        yield part
        for folder, _, files in os.walk(part, topdown=False):
            for file in files:
                sync(Path(folder, file), flush=False)
            sync_folder(Path(folder), flush=folder == str(part))
        if path.exists():  # a folder cannot be renamed over one that is not empty
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        part.rename(path)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        _name(error, path)
        raise
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path, *, flush: bool = True) -> None:
    """Wait until a file or folder is on the disk itself. On macOS, fsync leaves it in the memory of the drive.

    flush=False: it may stay there, for another sync empties that memory of all that it holds (man fsync). On a Mac this
    takes about 20 ms each time, whatever there is to write.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        if flush and sys.platform == "darwin":
            with contextlib.suppress(OSError):  # some file systems refuse it: network drives, FAT
                fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
                return
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(path: Path, *, flush: bool = True) -> None:
    """Make what was renamed in a folder outlast a power cut, where the file system can do that."""
    with contextlib.suppress(OSError):  # network drives sync no folders
        sync(path, flush=flush)
