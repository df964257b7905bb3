"""This machine, with the interface of one reached over SSH (connection.py): commands are run and started alike."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from whisper_tuner.errors import HostError

M = TypeVar("M")
T = TypeVar("T")
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
    def of(cls, returncode: int, stdout: bytes | bytearray, stderr: bytes | bytearray) -> Completed:
        out, err = stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace")
        return cls(returncode=returncode, stdout=out, stderr=err)


class Process(Protocol):
    """A running command, here or on a host; the leader of its own process group. name: of the machine."""

    name: str
    pid: int

    def write(self, data: bytes) -> None:
        """Send to its stdin. Raises HostError if it is gone."""

    def close_stdin(self) -> None: ...

    def lines(self) -> Iterator[str]:
        """Yield each line of stdout and stderr, merged, as it comes and without its newline, until their end."""

    def poll(self) -> int | None:
        """Return the exit status: None while it runs, below 0 or from 128 on after a signal, 255 for a lost link."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Do as poll does, after at most `timeout` seconds."""

    def kill(self) -> None:
        """Kill it, and all that it has started; may be called again. Raises HostError if it may not be killed."""


class Machine(Protocol):
    """A machine on which commands run: LocalMachine, or a Remote of connection.py.

    python: the interpreter that trains there; project: the folder of this program there.
    """

    name: str
    python: str
    project: str

    def expand(self, path: str) -> str:
        """Make a path absolute: `~/` is that machine's home."""

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

    def start(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None) -> Process:
        """Start a command. Others on the machine can read `env`, so it is no place for secrets. Raises HostError."""

    def get(self, remote: str, local: Path, *, most: int = MOST_BYTES) -> None:
        """Copy a file. most: bytes that are taken from another machine."""

    def close(self) -> None: ...


def quote(command: Sequence[str]) -> str:
    """One command line for any login shell (POSIX sh, zsh, fish, csh); the only place where commands are quoted.

    Inside single quotes these shells differ in backslashes and newlines only: such text goes through printf's octal.
    By `exec` the command takes the shell's place, and leads its process group: fish and dash would fork.
    """
    words = ["exec"]
    for word in command:
        inner = word.replace("'", """'"'"'""")  # without a backslash, also where zsh or fish would expand the word
        words.append(word if PLAIN.fullmatch(word) else f"'{inner}'")
    line = " ".join(words)
    if not re.search(r"[\\\n\r!]", line):
        return line
    octal = "".join(f"\\{byte:03o}" for byte in os.fsencode(line))
    return f"""exec /bin/sh -c 'eval "$(printf "{octal}")"'"""


def raise_unless_ok(name: str, command: Sequence[str], result: Completed) -> None:
    if result.returncode:
        said = (result.stderr or result.stdout).strip()[-2000:]
        raise HostError(name, f"`{command[0]}` ended with status {result.returncode}: {said}")


def on_each(machines: Sequence[M], work: Callable[[M], T]) -> list[T]:
    """Do `work` for all machines at once, results in their order; then raise one HostError for all that failed."""
    with ThreadPoolExecutor(max_workers=max(1, len(machines))) as pool:
        futures = [pool.submit(work, machine) for machine in machines]
    errors = [error for future in futures if (error := future.exception())]
    for error in errors:
        if len(errors) == 1 or not isinstance(error, HostError):
            raise error
    if of_hosts := [error for error in errors if isinstance(error, HostError)]:
        raise HostError(", ".join(error.host for error in of_hosts), "failed:\n" + "\n".join(map(str, of_hosts)))
    return [future.result() for future in futures]


class LocalProcess:
    def __init__(self, command: Sequence[str], *, name: str, env: Mapping[str, str] | None, cwd: str | None):
        self.name = name
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                cwd=cwd,
                start_new_session=True,
            )
        except OSError as error:
            raise HostError(name, f"cannot start {command[0]}: {error.strerror}") from error
        assert self._process.stdin and self._process.stdout
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.pid, self._killed = self._process.pid, False

    def write(self, data: bytes) -> None:
        try:
            self._stdin.write(data)
            self._stdin.flush()
        except (OSError, ValueError) as error:
            raise HostError(self.name, "the process is gone") from error

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()

    def lines(self) -> Iterator[str]:
        for line in self._stdout:
            yield line.decode("utf-8", "replace").rstrip("\r\n")

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int | None:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        # macOS refuses a group of zombies with EPERM, as if it were somebody else's (killpg1 in xnu's kern_sig.c).
        # So it is reaped, before and after: what has ended is no error, what goes on is one. Its number may soon be
        # another group's, so it is killed once.
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
    python, project = sys.executable, str(Path(__file__).resolve().parents[2])

    def __init__(self, name: str | None = None):
        self.name = name or socket.gethostname()

    def expand(self, path: str) -> str:
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
        return LocalProcess(command, name=self.name, env=env, cwd=cwd)

    def get(self, remote: str, local: Path, *, most: int = MOST_BYTES) -> None:
        local.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.expand(remote), local)

    def close(self) -> None:
        pass
