"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path

DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, also after a power cut."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            sync_to_disk(file.fileno())
        Path(temporary).replace(path)
        sync_folder(path.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sync_to_disk(file: int) -> None:
    """Until it survives a power cut: on macOS, fsync leaves it in the drive's own cache."""
    try:
        fcntl.fcntl(file, fcntl.F_FULLFSYNC)
    except (AttributeError, OSError):  # another system, or a disk in the network
        os.fsync(file)


def sync_folder(folder: Path) -> None:
    """Until the names in it survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # a disk in the network may not know it
        pass
    finally:
        os.close(handle)


def write_shared(path: Path, text: str) -> None:
    """The same for a file that others may read: with the mode that it has; what a link points to, not the link."""
    path = path.resolve()
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    write_atomically(path, text)
    path.chmod(mode)
