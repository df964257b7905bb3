"""One way to make a mistake: the real command in a user's folder, its one message, its exit status, nothing changed."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

import cli_typer

PROJECT = Path(__file__).parents[2]
CONFIG = """\
[profile:mine]
base_model = model
train = clips.csv
max_steps = 2
batch_size = 2
num_threads = 1

[distributed:both]
base_profile = mine
"""
MESSAGE = "error: |not transcribed: "  # with several recordings it goes on with the next
SET_SECUREBITS = 28
Words = str | tuple[str, ...]


class Desk:
    """A user's folder: config.ini, four clips in clips.csv, and the bundled model."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture):
        self.folder, self._capsys = folder, capsys
        self.watched: list[Path] = [folder]
        self.permissions = False  # whether they count for root as well
        (folder / "audio").mkdir(parents=True)
        header, *rows = (PROJECT / "bundled/data/train.csv").read_text().splitlines()[:5]
        for row in rows:
            name = row.split(",")[1]
            shutil.copy(PROJECT / "bundled/data" / name, folder / "audio")
        self.write("clips.csv", "\n".join([header, *rows]).replace(",train/", ",audio/") + "\n")
        self.write("config.ini", CONFIG)
        shutil.copytree(PROJECT / "bundled/model", folder / "model")

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def change(self, name: str, old: str, new: str) -> None:
        text = (self.folder / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def snapshot(self) -> dict[str, str]:
        """Every folder and file with its hash. `lock` files tell only whether somebody lives."""
        found = {}
        for path in (path for folder in self.watched for path in sorted(folder.rglob("*"))):
            data = content(path) if path.is_file() else b""
            found[str(path)] = hashlib.sha256(data).hexdigest() if path.is_file() else "folder"
        return found

    def refuses(self, command: str, status: int, place: Words, remedy: Words, **more) -> str:
        """Run the command. One message on stderr that names `place` and then `remedy`; nothing else is left of it."""
        before, processes = self.snapshot(), children()
        code, out, err = self.run(command)
        assert code == status, out + err
        assert "Traceback" not in out + err
        assert len(re.findall(MESSAGE, err)) == 1 and re.match(MESSAGE, err), err
        advice = err.partition("\n  ")[2]
        for word in words(place):
            assert word.format(desk=self.folder) in err, f"{word!r} is not in: {err}"
        for word in words(remedy):
            assert word.format(desk=self.folder) in advice, f"{word!r} is no remedy in: {err}"
        assert self.snapshot() == before
        wait_until(
            lambda: not children() - processes, tell=lambda: [*map(str, psutil.Process().children(recursive=True))]
        )
        return err

    def run(self, command: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        with held_to_permissions() if self.permissions else contextlib.nullcontext():
            status = cli_typer.main(shlex.split(command.format(desk=self.folder)))
        said = self._capsys.readouterr()
        return int(status), said.out, said.err


@contextlib.contextmanager
def held_to_permissions() -> Iterator[None]:
    """Root, too, opens only what its mode allows: this thread and those it starts lose the two rights to more."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    rights = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    assert libc.capget(header, rights) == 0
    effective = rights[0]
    rights[0] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.prctl(SET_SECUREBITS, 1) == 0  # a program that root starts does not get them back
    assert libc.capset(header, rights) == 0
    try:
        yield
    finally:
        rights[0] = effective
        assert libc.capset(header, rights) == 0
        assert libc.prctl(SET_SECUREBITS, 0) == 0


def content(path: Path) -> bytes:
    """Also of a file that its owner may not read, as root may."""
    try:
        return path.read_bytes()
    except PermissionError:
        mode = path.stat().st_mode
        path.chmod(0o600)
        try:
            return path.read_bytes()
        finally:
            path.chmod(mode)


def words(some: Words) -> tuple[str, ...]:
    return (some,) if isinstance(some, str) else some


def children() -> set[int]:
    """What this process and the sshd of a test have started, and what lives on of it."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != "zombie":
                found.add(child.pid)
    return found
