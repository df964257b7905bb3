"""This machine, with the interface of one reached over SSH (connection.py): commands are run and started alike."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union

from whisper_tuner.errors import HostError

if TYPE_CHECKING:
    from .connection import Remote
    from .process import RemoteProcess

Machine: TypeAlias = Union["LocalMachine", "Remote"]
Process: TypeAlias = Union["LocalProcess", "RemoteProcess"]
PLAIN = re.compile(r"[A-Za-z0-9_@+:,./-]+")  # no % or =: fish knows %self, zsh =ls
MOST_BYTES = 64 << 30  # that one host may send: a checkpoint of Whisper large takes 20 GB
DYING_S = 1.0  # until a process that is killed can be reaped
# A session's first line tells its process group, so that it can be killed with all that it started. In words: a number
# alone may be what a shell has to say, and `kill -9 -1` ends everything that the user has there.
ANNOUNCE = 'cd "$0" && echo "process group $$" && exec "$@"'
ANNOUNCED = re.compile(r"process group ([2-9]|[1-9][0-9]{1,9})")


@dataclass(frozen=True, kw_only=True)
class Completed:
    """A command's outcome; the output is decoded as UTF-8, undecodable bytes replaced."""

    returncode: int
    stdout: str
    stderr: str

    @classmethod
    def of(cls, returncode: int, stdout: bytes, stderr: bytes) -> Completed:
        return cls(
            returncode=returncode, stdout=stdout.decode("utf-8", "replace"), stderr=stderr.decode("utf-8", "replace")
        )


def quote(command: Sequence[str]) -> str:
    """One command line for any login shell (POSIX sh, zsh, fish, csh); the only place where commands are quoted.

    Inside single quotes these shells differ in backslashes and newlines only: such text goes through printf's octal.
    By `exec` the command takes the shell's place, and leads its process group: fish and dash would fork.
    """
    line = " ".join(["exec", *map(_quoted, command)])
    if not re.search(r"[\\\n\r!]", line):
        return line
    octal = "".join(f"\\{byte:03o}" for byte in os.fsencode(line))
    return f"""exec /bin/sh -c 'eval "$(printf "{octal}")"'"""


def _quoted(argument: str) -> str:
    """Without a backslash, unlike shlex.quote also where zsh or fish would expand the word."""
    if PLAIN.fullmatch(argument):
        return argument
    inner = argument.replace("'", """'"'"'""")
    return f"'{inner}'"


def too_large(remote: str, most: int) -> str:
    return f"{remote} is larger than the {most:,} bytes that are taken from a host"


def raise_unless_ok(name: str, command: Sequence[str], result: Completed) -> None:
    if result.returncode:
        said = (result.stderr or result.stdout).strip()[-2000:]
        raise HostError(name, f"`{command[0]}` ended with status {result.returncode}: {said}")


class LocalProcess:
    """A running command. Its output is stdout and stderr merged."""

    def __init__(self, command: Sequence[str], *, name: str, env: Mapping[str, str] | None, cwd: str | None):
        self.name = name
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        env = {**os.environ, **(env or {})}
        try:
            self._process = subprocess.Popen(list(command), **pipes, env=env, cwd=cwd, start_new_session=True)
        except OSError as error:
            raise HostError(name, f"cannot start {command[0]}: {error.strerror}") from error
        self.pid, self._killed = self._process.pid, False

    def write(self, data: bytes) -> None:
        """Send to its stdin. Raises HostError if it is gone."""
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise HostError(self.name, "the process is gone") from error

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def lines(self) -> Iterator[str]:
        """Each line as it comes, without its newline, until the end of the output."""
        for line in self._process.stdout:
            yield line.decode("utf-8", "replace").rstrip("\r\n")

    def poll(self) -> int | None:
        """Exit status, None while it runs; below 0 or 255 after a signal, 255 if the connection was lost."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int | None:
        """As poll, after at most `timeout` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """It, and all that it has started; may be called again. Raises HostError if it may not be killed.

        A group of zombies is refused by macOS with EPERM, as if it were somebody else's (killpg1 in xnu's kern_sig.c).
        So it is reaped, before and after: what has ended is no error, what goes on is one. Its number may soon be
        another group's, so it is killed once.
        """
        self.poll()
        if self._killed:
            return
        try:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._killed = True
        except PermissionError as error:
            if self.wait(DYING_S) is None:
                raise HostError(self.name, f"process {self.pid} may not be killed: {error.strerror}") from error


class LocalMachine:
    def __init__(self, name: str | None = None):
        self.name = name or socket.gethostname()

    def expand(self, path: str) -> str:
        """Absolute path there: `~/` is that machine's home."""
        return str(Path(path).expanduser())

    def run(
        self,
        command: Sequence[str],
        *,
        input: Iterable[bytes] = (),
        cwd: str | None = None,
        timeout: float | None = None,
        check: bool = False,
        title: str = "",
    ) -> Completed:
        """Run to the end. Raises HostError on a timeout, a lost connection, or (check) a status other than 0.

        timeout: seconds; over SSH they count from the end of `input`. title: the command's name in messages.
        """
        title = title or f"`{command[0]}`"
        try:
            done = subprocess.run(list(command), input=b"".join(input), capture_output=True, cwd=cwd, timeout=timeout)
        except subprocess.TimeoutExpired as error:
            raise HostError(self.name, f"{title} did not end within {timeout:g} s") from error
        except OSError as error:
            raise HostError(self.name, f"cannot start {command[0]}: {error.strerror}") from error
        result = Completed.of(done.returncode, done.stdout, done.stderr)
        if check:
            raise_unless_ok(self.name, command, result)
        return result

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> LocalProcess:
        """Others on the machine can read `env`, so it is no place for secrets."""
        return LocalProcess(command, name=self.name, env=env, cwd=cwd)

    def get(self, remote: str, local: Path, *, most: int = MOST_BYTES) -> None:
        """Copy a file from there. Raises HostError, or OSError for what cannot be written here.

        most: bytes; a larger file is an error.
        """
        source = Path(self.expand(remote))
        if source.stat().st_size > most:
            raise HostError(self.name, too_large(remote, most))
        local.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, local)

    def close(self) -> None:
        pass
