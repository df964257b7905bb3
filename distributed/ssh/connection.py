"""A machine reached over SSH: its name is looked up anew for each connection, as addresses change."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import paramiko

from whisper_tuner.errors import HostError
from whisper_tuner.files import private

from .authentication import authenticate, check_host
from .host import Host, SshSettings, resolve
from .local_network import DENIED, WAYS_OUT, is_denied
from .machine import ANNOUNCE, MOST_BYTES, Completed, quote, raise_unless_ok
from .process import FAILURES, LOST, STALLED_S, RemoteProcess, Transport, communicate, if_late

CONNECT_TIMEOUT_S = 10.0
# The first connection to a sleeping Mac may only wake it: "Wake for network access" has another device answer for it
# until then, see Apple's "Share your Mac resources when it's in sleep". Of less time than this there is nothing to
# halve: over a full link an answer may be 2 s late.
TWICE_S = 4.0
KEEPALIVE_S = 5
MAX_JUMPS = 8
BLOCK = 1 << 18
ASLEEP = "Is it awake, and its network up?"
REMOTE_LOGIN = "On a Mac: System Settings > General > Sharing > Remote Login. On Linux: install openssh-server."
logging.getLogger("paramiko").addHandler(logging.NullHandler())  # else it logs tracebacks to stderr


class Remote:
    """One SSH connection, to a machine with this program's own folder.

    name: the host's address as its hosts file has it; home: its user's home folder; python: the interpreter that trains
    there; project: the project folder there; local_address: this machine's own address on the way to it, None if that
    way is not a plain IPv4 connection.
    """

    def __init__(self, host: Host, settings: SshSettings, transport: paramiko.Transport, below: Remote | None):
        self.host, self.settings, self.name = host, settings, host.address
        self._transport, self._below = transport, below
        sock = transport.sock
        is_plain = isinstance(sock, socket.socket) and sock.family == socket.AF_INET
        self.local_address: str | None = sock.getsockname()[0] if is_plain else None
        with self._errors("cannot start a session"):
            done = self.run(["/bin/sh", "-c", 'printf %s "$HOME"'], timeout=CONNECT_TIMEOUT_S, check=True)
        self.home = done.stdout.strip()
        if not self.home.startswith("/") or "\n" in self.home:
            raise HostError(
                self.name,
                f"its shell prints text of its own: {self.home[:60]!r}",
                remedy="Whatever prints there (~/.bashrc, ~/.zshenv) may do so only in a terminal: [ -t 1 ],"
                " or in fish: status is-interactive.",
            )
        self.python, self.project = self.expand(host.python), self.expand(host.project_path)

    @classmethod
    def connect(
        cls,
        host: Host,
        *,
        timeout: float = CONNECT_TIMEOUT_S,
        connect_timeout: float | None = None,
        via: Sequence[Host] = (),
        depth: int = 0,
    ) -> Remote:
        """Connect and authenticate, through jumps. Raises HostKeyError, HostError, MissingProgram.

        timeout: seconds for each of its steps; connect_timeout: for TCP's part, if that is to be another; via: jumps to
        pass first; they win over the host's own, as in a ProxyJump list of ssh; depth: how many jumps led here.
        """
        settings = resolve(host)
        if depth > MAX_JUMPS:
            raise HostError(host.address, f"more than {MAX_JUMPS} jumps", remedy="Look for a loop of ProxyJump.")
        below = transport = None
        if jumps := via or settings.jumps:
            *before, last = jumps
            below = cls.connect(last, timeout=timeout, connect_timeout=connect_timeout, via=before, depth=depth + 1)
        try:
            transport = Transport(open_socket(host, settings, below, connect_timeout or timeout))
            check_host(host, settings, transport, timeout)
            authenticate(host, settings, transport, timeout)
            transport.set_keepalive(KEEPALIVE_S)
            return cls(host, settings, transport, below)
        except BaseException as error:
            for opened in (transport, below):
                if opened:
                    opened.close()
            if isinstance(error, FAILURES):
                what = f"SSH failed: {str(error) or type(error).__name__}"
                raise HostError(host.address, what, remedy=f"Try: ssh {settings.target}") from error
            raise

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def expand(self, path: str) -> str:
        return str(PurePosixPath(self.home, path[2:])) if path == "~" or path.startswith("~/") else path

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
        line = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', self.expand(cwd), *command] if cwd else command
        title = title or f"`{command[0]}`"
        login = f"Try: ssh {self.settings.target}"
        with self._errors(f"{title} failed"):
            channel = self._open(line)
            try:
                result = communicate(channel, input, timeout)
            except TimeoutError as error:
                kept = "What has arrived stays: the next sync continues from there."
                raise HostError(self.name, str(error), remedy=f"{ASLEEP} {kept} {login}") from error
        if result is None:
            raise HostError(self.name, f"{title} did not end within {timeout:g} s", remedy=login)
        if result.returncode == LOST and not self._transport.is_active():
            raise HostError(self.name, f"the connection was lost during {title}", remedy=f"{ASLEEP} {login}")
        if check:
            raise_unless_ok(self.name, command, result)
        return result

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> RemoteProcess:
        with self._errors(f"cannot start `{command[0]}`"):
            folder = self.expand(cwd) if cwd else self.home
            words = ["env", *(f"{key}={value}" for key, value in (env or {}).items()), *command]
            channel = self._open(["/bin/sh", "-c", ANNOUNCE, folder, *words], merge=True)
            return RemoteProcess(self, channel)

    def get(self, remote: str, local: Path, *, most: int = MOST_BYTES) -> None:
        """Copy a file. paramiko's own `get` would read on for as long as the host sends anything."""
        with self._errors(f"cannot read {remote}"):
            with self._session() as channel:
                channel.invoke_subsystem("sftp")
                sftp = paramiko.SFTPClient(channel)
            with sftp:
                channel.settimeout(STALLED_S)
                with sftp.open(self.expand(remote)) as source, open(local, "wb", opener=private) as target:
                    size = source.stat().st_size
                    if size > most:
                        raise OSError(f"it is larger than the {most:,} bytes that are taken from a host")
                    source.prefetch(size)
                    while (left := size - target.tell()) > 0:
                        block = source.read(min(left, BLOCK))
                        if not block:
                            raise OSError(f"it ended {left:,} bytes early")
                        target.write(block)

    @property
    def is_open(self) -> bool:
        return self._transport.is_active()

    def close(self) -> None:
        self._transport.close()
        if self._below:
            self._below.close()

    def _open(self, line: Sequence[str], *, merge: bool = False) -> paramiko.Channel:
        with self._session() as channel:
            channel.set_combine_stderr(merge)
            channel.exec_command(quote(line))
        return channel

    @contextlib.contextmanager
    def _session(self) -> Iterator[paramiko.Channel]:
        """Open a session; close it if it is not put to use in time: a host may fall asleep, and paramiko would wait."""
        channel = self._transport.open_session(timeout=CONNECT_TIMEOUT_S)
        with if_late(CONNECT_TIMEOUT_S, channel.close):
            yield channel

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Turn paramiko's and the system's exceptions into one that names the host."""
        try:
            yield
        except FAILURES as error:
            is_up = self._transport.is_active()
            # paramiko tells its words for it once, and not in the errors of later calls.
            why = "" if is_up else str(self._transport.get_exception() or "")
            lost = "" if is_up else f" (the connection is lost{f': {why}' if why else ''})"
            raise HostError(self.name, f"{what}: {str(error) or type(error).__name__}{lost}") from error


def open_socket(
    host: Host, settings: SshSettings, below: Remote | None, timeout: float
) -> socket.socket | paramiko.Channel | paramiko.ProxyCommand:
    """Connect to where SSH should answer. Raises HostError."""
    where = (settings.hostname, settings.port)
    if below:
        return below._transport.open_channel("direct-tcpip", where, ("127.0.0.1", 0), timeout=timeout)
    if settings.proxy_command:
        line = settings.proxy_command.replace("%h", where[0]).replace("%p", str(where[1])).replace("%r", settings.user)
        return paramiko.ProxyCommand(line)
    target = f"Try: ssh {settings.target}"
    try:
        sock = dial(*where, timeout)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: two dots in a row, or a name of 300 letters
        raise HostError(host.address, f"the name {where[0]} is not known", remedy="Check it with `ping`.") from error
    except ConnectionRefusedError as error:
        what = f"port {where[1]}: Connection refused"
        raise HostError(host.address, what, remedy=f"{REMOTE_LOGIN} {target}") from error
    except OSError as error:
        if is_denied(error, *where):
            raise HostError(host.address, f"port {where[1]}: {DENIED}", remedy=WAYS_OUT) from error
        reason = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error))
        remedy = f"{ASLEEP} {REMOTE_LOGIN} {target}"
        raise HostError(host.address, f"port {where[1]}: {reason}", remedy=remedy) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def dial(name: str, port: int, timeout: float) -> socket.socket:
    """Connect in `timeout` seconds; if half of them bring no answer, once more, to where the name leads then.

    Raises OSError, of which socket.gaierror for a name that is not known; UnicodeError for what cannot be one.
    """
    deadline = time.monotonic() + timeout
    if timeout >= TWICE_S:
        with contextlib.suppress(TimeoutError):
            return _dial_once(name, port, timeout / 2)
    return _dial_once(name, port, max(0.1, deadline - time.monotonic()))


def _dial_once(name: str, port: int, timeout: float) -> socket.socket:
    """Connect to the first of its addresses that answers; each has its share of the time.

    IPv4 is looked up, as the ranks use; IPv6 only for a name that has no other, and never for a Mac's `.local` name:
    its IPv6 address is fe80::..., good for one interface only, and comes first when a Mac has just woken.
    """
    deadline = time.monotonic() + timeout
    try:
        found = socket.getaddrinfo(name, port, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror:
        if name.lower().rstrip(".").endswith(".local"):
            raise
        found = socket.getaddrinfo(name, port, socket.AF_INET6, socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    failed: list[OSError] = []
    for number, address in enumerate(addresses):
        share = (deadline - time.monotonic()) / (len(addresses) - number)
        try:
            return socket.create_connection((address, port), timeout=max(0.1, share))
        except OSError as error:
            failed.append(error)
    raise next((error for error in failed if isinstance(error, TimeoutError)), failed[0])
