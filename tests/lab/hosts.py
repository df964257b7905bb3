"""One host: its namespaces, its home, its sshd, and how to run something in it.

sshd is the first process of the host's PID namespace, so the host and all it ever started end with that one process.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab import cpu, memory, network
from lab.errors import LabError
from lab.keys import PRIVATE

START_TIMEOUT_S = 10.0
SIGNAL_TIMEOUT_S = 5.0
GONE = ("", "Z", "X")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def user_home() -> Path:
    return Path(pwd.getpwuid(os.getuid()).pw_dir)


@dataclass(frozen=True, kw_only=True)
class LabProcess:
    """`pid` as this machine counts, `host_pid` as the host does."""

    pid: int
    host_pid: int
    command: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.pid} {shlex.join(self.command)}"


@dataclass(frozen=True, kw_only=True)
class LabListener:
    """A TCP port on which a process of a host waits for connections."""

    address: str
    port: int
    process: LabProcess

    @property
    def loopback(self) -> bool:
        return self.address == "::1" or self.address.startswith("127.")

    def __str__(self) -> str:
        return f"{self.address}:{self.port} {self.process}"


@dataclass(frozen=True, kw_only=True)
class LabHost:
    """`home` is the folder that the host sees as its user's home; `hidden` are paths it must not see;
    `shown` are paths under the real home that it sees all the same (an interpreter)."""

    name: str
    address: str
    home: Path
    tmp: Path | None
    hidden: tuple[Path, ...] = ()
    shown: tuple[Path, ...] = ()
    pid: int = field(default=0)

    def mounts(self) -> str:
        """Shell commands that build the host's view of the file system, in its own mount namespace."""
        user = user_home()
        lines, tmp = [], f"{PRIVATE}/tmp"
        if self.tmp is not None:  # it may lie in the home that is hidden, and the host's home in the old /tmp
            lines += [f"mkdir -p {tmp}", f"mount --bind {q(self.tmp)} {tmp}"]
        for path in self.shown:
            if path.is_relative_to(user):
                target = self.home / path.relative_to(user)
                lines += [f"mkdir -p {q(target)}", f"mount --bind {q(path)} {q(target)}"]
        lines += [f"mount --rbind {q(self.home)} {q(user)}"]
        for path in self.hidden:
            if path.is_relative_to(user):
                continue  # the host's own home is there instead
            if path.is_dir():
                lines.append(f"mount -t tmpfs -o size=64k,mode=755 none {q(path)}")
            elif path.exists():
                lines.append(f"mount --bind /dev/null {q(path)}")
        if self.tmp is not None:
            lines.append(f"mount --bind {tmp} /tmp")
        lines.append("mount -t tmpfs none /dev/shm")  # names there hold PIDs, and each host counts its own
        return "\n".join(lines)

    def start(self, sshd_config: Path, log: Path) -> int:
        """Start the host; returns the PID of its first process (sshd)."""
        # The keys and the homes may lie in a hidden folder, so sshd reads its files through a mount of its own.
        PRIVATE.mkdir(mode=0o755, exist_ok=True)
        script = f"""set -e
hostname {self.name}
mount --make-rprivate /
mount --bind {q(sshd_config.parent)} {q(PRIVATE)}
{self.mounts()}
cd /
exec /usr/sbin/sshd -D -e -f {PRIVATE}/sshd_config -h {PRIVATE}/host_key
"""
        join = f'{cpu.join(self.name)}{memory.join(self.name)}exec "$@"'
        command = ["sh", "-c", join, "sh", "ip", "netns", "exec", network.namespace(self.name)]
        command += ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-c", script]
        with log.open("ab") as stream:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={"PATH": PATH},
                start_new_session=True,
            )
        return self._wait_for_sshd(process, log)

    def _wait_for_sshd(self, process: subprocess.Popen, log: Path) -> int:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            if "Server listening" in log.read_text(errors="replace"):
                return first_child(process.pid)
            time.sleep(0.02)
        raise LabError(f"{self.name}: sshd did not start: {log.read_text(errors='replace')[-2000:]}")

    def command(
        self, command: Sequence[str], *, env: dict[str, str] | None = None, cwd: str | None = None
    ) -> list[str]:
        """The command line that runs `command` inside the host: its namespaces, its home, its groups."""
        user = user_home()
        settings = {"HOME": str(user), "USER": pwd.getpwuid(os.getuid()).pw_name, "PATH": PATH, "LANG": "C.UTF-8"}
        settings |= env or {}
        variables = [f"{key}={value}" for key, value in settings.items()]
        join = f'{cpu.join(self.name)}{memory.join(self.name)}exec "$@"'
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--uts", "--net", "--pid", "--"]
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', cwd or str(user), "env", "-i", *variables, *command]
        return ["sh", "-c", join, "sh", *enter, *inside]

    def path(self, inside: str | Path) -> Path:
        """Where this machine reaches what the host sees as `inside`, which is absolute or relative to its home."""
        return Path(f"/proc/{self.pid}/root{user_home() / inside}")

    def in_files(self, *command: str) -> str:
        """Run a command of this machine with the host's view of the file system; returns its stdout."""
        return network.sh("nsenter", "--target", str(self.pid), "--mount", "--pid", "--", *command)

    def pids(self) -> list[int]:
        """All processes in the host's UTS namespace: its own, and each nsenter that waits for one."""
        own = uts_namespace(self.pid)
        found = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
        return sorted(pid for pid in found if own and uts_namespace(pid) == own)

    def processes(self) -> list[LabProcess]:
        """What runs in the host now, except the listening sshd and processes that have ended already."""
        found = (describe(pid) for pid in self.pids() if pid != self.pid)
        return [process for process in found if process is not None and process.host_pid > 1]

    def listeners(self) -> list[LabListener]:
        """Every TCP port that is listened on, except sshd's own; once for each process that holds it."""
        found = []
        for line in network.in_namespace(self.name, "ss", "-Hltnp").splitlines():
            address, _, port = line.split()[3].rpartition(":")
            for pid in map(int, re.findall(r"pid=(\d+)", line)):
                process = describe(pid)
                if process and pid != self.pid:
                    found.append(LabListener(address=address.strip("[]"), port=int(port), process=process))
        return found

    def signal(self, number: signal.Signals, pattern: str) -> list[LabProcess]:
        """Send a signal to each process whose command line contains `pattern`."""
        hit = [process for process in self.processes() if pattern in " ".join(process.command)]
        for process in hit:
            kill(process.pid, number)
        if number in {signal.SIGCONT, signal.SIGKILL}:
            # nsenter stops together with the process it waits for, and must be woken to see it go on or end.
            for pid in set(self.pids()) - {process.pid for process in self.processes()}:
                kill(pid, signal.SIGCONT)
        return hit

    def freeze(self) -> None:
        """Stop all processes of the host, its sshd too. Its kernel still answers: connections are taken and kept."""
        self._signal_all(signal.SIGSTOP, lambda state: state in {"T", *GONE})

    def thaw(self) -> None:
        self._signal_all(signal.SIGCONT, lambda state: state != "T")

    def _signal_all(self, number: signal.Signals, done: Callable[[str], bool]) -> None:
        """Repeats, for processes that were being started, and for an nsenter that stops itself after its child."""
        deadline = time.monotonic() + SIGNAL_TIMEOUT_S
        while left := [pid for pid in self.pids() if not done(state(pid))]:
            if time.monotonic() > deadline:
                raise LabError(f"{self.name}: {number.name} does not reach the processes {left}")
            for pid in left:
                kill(pid, number)
            time.sleep(0.01)


def state(pid: int) -> str:
    """One letter: R running, S sleeping, D in the kernel, T stopped, Z ended but not waited for; "" gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def uts_namespace(pid: int) -> str:
    """Empty for a process that is gone, or is not to be seen."""
    try:
        return str(Path(f"/proc/{pid}/ns/uts").readlink())
    except OSError:
        return ""


def kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def q(path: Path) -> str:
    return shlex.quote(str(path))


def first_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if not children:
        raise LabError(f"process {pid} has no child")
    return int(children[0])


def describe(pid: int) -> LabProcess | None:
    """None for a process that is gone, a zombie, or outside any inner PID namespace."""
    try:
        status = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
        )
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    pids = status["NSpid"].split()
    if status["State"].startswith(("Z", "X")) or len(pids) < 2:
        return None
    return LabProcess(
        pid=pid, host_pid=int(pids[-1]), command=tuple(os.fsdecode(part) for part in command.rstrip(b"\0").split(b"\0"))
    )
