"""One way to make a mistake: the real command in a user's folder, its one message, its exit status, nothing changed."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

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
Words = str | tuple[str, ...]


class Desk:
    """A user's folder: config.ini, four clips in clips.csv, and the bundled model."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture):
        self.folder, self._capsys = folder, capsys
        self.watched: list[Path] = [folder]
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
            data = path.read_bytes() if path.is_file() else b""
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
        wait_until(lambda: not children() - processes)
        return err

    def run(self, command: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        status = cli_typer.main(shlex.split(command.format(desk=self.folder)))
        said = self._capsys.readouterr()
        return int(status), said.out, said.err


def words(some: Words) -> tuple[str, ...]:
    return (some,) if isinstance(some, str) else some


def children() -> set[int]:
    """What this process and the sshd of a test have started, and what lives on of it."""
    return {child.pid for child in psutil.Process().children(recursive=True) if child.status() != "zombie"}


def wait_until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, [str(child) for child in psutil.Process().children(recursive=True)]
        time.sleep(0.05)
