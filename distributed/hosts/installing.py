"""How far the installation on a host is. pip says nothing before its end, so the disk there is looked at."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from zipfile import ZipFile

from packaging.utils import parse_wheel_filename

from distributed.ssh.connection import Remote
from whisper_tuner.errors import HostError

from .sync import Progress

EVERY_S = 2.0
BLOCK = 4096  # bytes: a file takes whole ones
KIB = 1024


def unpacked(wheels: Iterable[Path], names: Collection[str]) -> int:
    """Bytes that those of these packages take on a disk."""
    wanted = [wheel for wheel in wheels if parse_wheel_filename(wheel.name)[0] in names]
    return sum(-(-part.file_size // BLOCK) * BLOCK for wheel in wanted for part in _parts(wheel))


def _parts(wheel: Path) -> list:
    with ZipFile(wheel) as file:
        return file.infolist()


class Taken:
    """How much a folder on a host has grown since."""

    def __init__(self, remote: Remote, folder: str):
        self._remote, self._folder = remote, folder
        self._before = self._size()

    def __call__(self) -> int:
        return max(0, self._size() - self._before)

    def _size(self) -> int:
        done = self._remote.run(["du", "-sk", self._folder], timeout=60)  # its status is 1 where a file vanishes
        words = done.stdout.split()
        return int(words[0]) * KIB if words and words[0].isdigit() else 0


@contextlib.contextmanager
def shown(name: str, progress: Progress, taken: Callable[[], int] = lambda: 0, total: int | None = None) -> Iterator:
    """Tell how far something is, while it lasts; without `total` only that it goes on."""
    over = threading.Event()

    def tell() -> None:
        while not over.is_set():
            with contextlib.suppress(HostError):  # whoever waits for the end will meet it too
                done = taken()
                progress(name, min(done, total - 1) if total else 0, total, "")
            over.wait(EVERY_S)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        progress(name, total or 0, total or 0, "")
