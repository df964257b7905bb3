"""A machine reached over SSH: the only file that imports paramiko.

Host keys are never accepted here: an unknown or changed key is refused with the command that settles it.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm

from whisper_tuner.errors import HostError, HostKeyError

from . import known_hosts
from . import settings as ssh_settings
from .host import Host
from .known_hosts import Verdict
from .machine import ANNOUNCE, ANNOUNCED, Completed, quote, raise_unless_ok, with_env
from .settings import SshSettings

CONNECT_TIMEOUT_S = 10.0
CHUNK = 1 << 18
KEEPALIVE_S = 5
TRANSFER_TIMEOUT_S = 30.0  # without a single byte moving
MAX_JUMPS = 8
LOST = 255
SOME_SIGNAL = 128
FAILURES = (paramiko.SSHException, OSError, EOFError)
# What paramiko raises for a key file; it asserts that both halves of an Ed25519 key fit.
BAD_KEY = (TypeError, ValueError, AssertionError, UnsupportedAlgorithm, paramiko.UnknownKeyType)
FASTEST_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
REMOTE_LOGIN = "On a Mac: System Settings > General > Sharing > Remote Login. On Linux: install openssh-server."


# (local, remote, offset, sent): write `local` from `offset` on into the absolute path `remote`, mode 0600; calls
# sent(bytes) as it goes. Raises HostError, and OSError if `local` cannot be opened.
Append = Callable[[Path, str, int, Callable[[int], None]], None]


class Remote:
    """One SSH connection. `name` is the host's address as its hosts file has it; `home` its user's home folder;
    `local_address` is this machine's own address on the way to it, None if that way is not a plain IPv4 connection."""

    def __init__(self, host: Host, settings: SshSettings, transport: paramiko.Transport, below: Remote | None):
        self.host, self.settings, self.name = host, settings, host.address
        self._transport, self._below = transport, below
        self.local_address = _local_address(transport.sock)
        with self._errors("cannot start a session"):
            done = self.run(["/bin/sh", "-c", 'printf %s "$HOME"'], timeout=CONNECT_TIMEOUT_S, check=True)
        self.home = done.stdout.strip()
        if not self.home.startswith("/") or "\n" in self.home:
            raise HostError(
                self.name,
                f"its shell prints text of its own: {self.home[:60]!r}",
                remedy="Whatever prints there (~/.bashrc, ~/.zshenv) must do so in a terminal only: [ -t 1 ].",
            )

    @classmethod
    def connect(cls, host: Host, *, timeout: float = CONNECT_TIMEOUT_S, connect_timeout: float | None = None) -> Remote:
        """Connect and authenticate. Raises HostKeyError, HostError, MissingProgram.

        timeout: seconds for each of its steps; connect_timeout: for TCP's part, if that is to be another.
        """
        return _connect(host, timeout, connect_timeout or timeout, depth=0)

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def expand(self, path: str) -> str:
        if path == "~" or path.startswith("~/"):
            return str(PurePosixPath(self.home, path[2:]))
        return path

    def run(
        self,
        command: Sequence[str],
        *,
        input: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        check: bool = False,
    ) -> Completed:
        line = with_env(command, env)
        if cwd:
            line = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', self.expand(cwd), *line]
        with self._errors(f"`{command[0]}` failed"):
            channel = self._open(line)
            result = _communicate(channel, input, timeout)
        if result is None:
            raise HostError(self.name, f"`{command[0]}` did not end within {timeout:g} s", remedy=_try(self.settings))
        if result.returncode == LOST and not self._transport.is_active():
            remedy = f"Is it awake, and its network there? {_try(self.settings)}"
            raise HostError(self.name, f"the connection was lost during `{command[0]}`", remedy=remedy)
        if check:
            raise_unless_ok(self.name, command, result)
        return result

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> RemoteProcess:
        with self._errors(f"cannot start `{command[0]}`"):
            folder = self.expand(cwd) if cwd else self.home
            channel = self._open(["/bin/sh", "-c", ANNOUNCE, folder, *with_env(command, env)], merge=True)
            return RemoteProcess(self, channel)

    def put(self, local: Path, remote: str) -> None:
        with self._errors(f"cannot write {remote}"), self.sftp() as sftp:
            sftp.put(str(local), self.expand(remote))

    def get(self, remote: str, local: Path) -> None:
        with self._errors(f"cannot read {remote}"), self.sftp() as sftp:
            sftp.get(self.expand(remote), str(local))

    @contextlib.contextmanager
    def appending(self) -> Iterator[Append]:
        """One SFTP session for many files: to start one takes longer than to send a short clip. Raises HostError."""
        with self.sftp() as sftp:
            yield functools.partial(self._append, sftp)

    def _append(
        self, sftp: paramiko.SFTPClient, local: Path, remote: str, offset: int, sent: Callable[[int], None]
    ) -> None:
        mode = "ab" if offset else "wb"
        with (
            local.open("rb") as source,  # not the host's fault
            self._errors(f"cannot write {remote}"),
            sftp.open(remote, mode) as target,
        ):
            target.chmod(0o600)
            target.set_pipelined(True)
            source.seek(offset)
            while block := source.read(CHUNK):
                target.write(block)
                sent(len(block))
            # Pipelined writes do not report their failure.
            arrived, size = sftp.stat(remote).st_size, os.fstat(source.fileno()).st_size
        if arrived < size:
            remedy = "Is its disk full?"
            raise HostError(self.name, f"cannot write {remote}: it stops at {arrived} bytes", remedy=remedy)

    @contextlib.contextmanager
    def sftp(self) -> Iterator[paramiko.SFTPClient]:
        with self._errors("cannot start SFTP"):
            client = paramiko.SFTPClient.from_transport(self._transport)
            client.get_channel().settimeout(TRANSFER_TIMEOUT_S)
        try:
            yield client
        finally:
            client.close()

    @property
    def is_open(self) -> bool:
        return self._transport.is_active()

    def close(self) -> None:
        self._transport.close()
        if self._below:
            self._below.close()

    def _open(self, line: Sequence[str], *, merge: bool = False) -> paramiko.Channel:
        channel = self._transport.open_session(timeout=CONNECT_TIMEOUT_S)
        channel.set_combine_stderr(merge)
        channel.exec_command(quote(line))
        return channel

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """paramiko's and the system's exceptions become one that names the host."""
        try:
            yield
        except FAILURES as error:
            lost = "" if self._transport.is_active() else " (the connection is lost)"
            raise HostError(self.name, f"{what}: {error or type(error).__name__}{lost}") from error


class RemoteProcess:
    """A command on a host; the leader of its own process group there."""

    def __init__(self, remote: Remote, channel: paramiko.Channel):
        self.name = remote.name
        self._remote, self._channel = remote, channel
        self._lines = _lines(channel)
        first = next(self._lines, "")
        announced = ANNOUNCED.fullmatch(first)
        if not announced:
            rest = "\n".join([first, *self._lines]).strip()
            raise HostError(self.name, f"cannot start: {rest or 'the session ended at once'}")
        self.pid = int(announced[1])

    def write(self, data: bytes) -> None:
        try:
            self._channel.sendall(data)
        except FAILURES as error:
            raise HostError(self.name, "the process is gone") from error

    def close_stdin(self) -> None:
        with contextlib.suppress(*FAILURES):
            self._channel.shutdown_write()

    def lines(self) -> Iterator[str]:
        return self._lines

    def poll(self) -> int | None:
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> int | None:
        if not self._channel.status_event.wait(timeout):
            return None if self._channel.get_transport().is_active() and not self._channel.closed else LOST
        return _status(self._channel)

    def kill(self) -> None:
        """Kill the process group; then close the session, whatever state the host is in."""
        if self.poll() is None:
            with contextlib.suppress(HostError):
                self._remote.run(["/bin/sh", "-c", f"kill -9 -{self.pid}"], timeout=5)
        with contextlib.suppress(*FAILURES):
            self._channel.close()


def _local_address(sock: object) -> str | None:
    return sock.getsockname()[0] if isinstance(sock, socket.socket) and sock.family == socket.AF_INET else None


def _connect(host: Host, timeout: float, connect_timeout: float, depth: int, via: Sequence[str] = ()) -> Remote:
    """via: the jumps to pass through first; they win over the host's own, as in a ProxyJump list of ssh."""
    settings = ssh_settings.resolve(host)
    if depth > MAX_JUMPS:
        raise HostError(host.address, f"more than {MAX_JUMPS} jumps", remedy="Look for a loop of ProxyJump.")
    *before, last = via or settings.jumps or [None]
    below = _connect(ssh_settings.parse_jump(last), timeout, connect_timeout, depth + 1, before) if last else None
    transport = None
    try:
        transport = paramiko.Transport(_socket(host, settings, below, connect_timeout))
        _begin(host, settings, transport, timeout)
        _authenticate(host, settings, transport, timeout)
        transport.set_keepalive(KEEPALIVE_S)
        return Remote(host, settings, transport, below)
    except BaseException as error:
        for opened in (transport, below):
            if opened:
                opened.close()
        if isinstance(error, FAILURES):
            raise HostError(
                host.address, f"SSH failed: {error or type(error).__name__}", remedy=_try(settings)
            ) from error
        raise


def _socket(host: Host, settings: SshSettings, below: Remote | None, timeout: float):
    where = (settings.hostname, settings.port)
    if below:
        return below._transport.open_channel("direct-tcpip", where, ("127.0.0.1", 0), timeout=timeout)
    if settings.proxy_command:
        line = settings.proxy_command.replace("%h", where[0]).replace("%p", str(where[1])).replace("%r", settings.user)
        try:
            return paramiko.ProxyCommand(line)
        except ValueError as error:  # a quote that is never closed
            remedy = "Mend it in ~/.ssh/config."
            raise HostError(host.address, f"ProxyCommand cannot be read: {error}", remedy=remedy) from error
    try:
        sock = socket.create_connection(where, timeout=timeout)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: two dots in a row, or a name of 300 letters
        raise HostError(host.address, f"the name {where[0]} is not known", remedy="Check it with `ping`.") from error
    except (TimeoutError, OSError) as error:
        reason = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error))
        raise HostError(
            host.address, f"port {where[1]}: {reason}", remedy=f"{REMOTE_LOGIN} {_try(settings)}"
        ) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _begin(host: Host, settings: SshSettings, transport: paramiko.Transport, timeout: float) -> None:
    """Key exchange, then the host key's check; nothing is sent to a host whose key does not pass."""
    known = known_hosts.load(settings.known_hosts)
    name = settings.key_alias or known_hosts.lookup_name(settings.hostname, settings.port)
    options = transport.get_security_options()
    kinds = [
        k for kind in known.kinds(name) for k in (("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,))
    ]
    options.key_types = sorted(options.key_types, key=lambda kind: kinds.index(kind) if kind in kinds else len(kinds))
    options.ciphers = sorted(options.ciphers, key=lambda cipher: cipher not in FASTEST_CIPHERS)
    transport.banner_timeout = timeout
    transport.start_client(timeout=timeout)
    key = transport.get_remote_server_key()
    verdict = known.check(name, key.asbytes())
    if verdict is not Verdict.KNOWN:
        raise _key_error(host, settings, known, name, key, verdict)


def _key_error(
    host: Host,
    settings: SshSettings,
    known: known_hosts.KnownHosts,
    name: str,
    key: paramiko.PKey,
    verdict: Verdict,
) -> HostKeyError:
    finger = f"{key.get_name()} {known_hosts.fingerprint(key.asbytes())}"
    if verdict is Verdict.REVOKED:
        return HostKeyError(
            host.address, f"its key {finger} is marked @revoked in known_hosts", remedy="Do not connect to it."
        )
    if verdict is Verdict.CHANGED:
        entry = known.of(name)[0]
        return HostKeyError(
            host.address,
            f"its key has CHANGED: it is now {finger}, unlike {entry.file}:{entry.line}. Somebody may be in between",
            remedy=f"If you know why (reinstalled?): ssh-keygen -R {shlex.quote(name)} && ssh {settings.target}",
        )
    skipped = [f"{file}:{line}" for file, line in known.authorities]
    note = f" (@cert-authority lines are not supported: {', '.join(skipped)})" if skipped else ""
    return HostKeyError(
        host.address,
        f"its key is not known here: {finger}{note}",
        remedy=f"Compare it with `ssh-keygen -lf /etc/ssh/ssh_host_{_kind(key)}_key.pub` over there,"
        f" and accept it once with: ssh {settings.target}",
    )


def _kind(key: paramiko.PKey) -> str:
    return key.get_name().removeprefix("ssh-").partition("-")[0]


def _authenticate(host: Host, settings: SshSettings, transport: paramiko.Transport, timeout: float) -> None:
    """Offer the agent's keys and the key files, in ssh's order. Raises HostError that lists what was tried."""
    transport.auth_timeout = timeout
    tried: list[str] = []
    with contextlib.ExitStack() as stack:
        for label, key in _keys(settings, tried, stack):
            tried.append(label)
            try:
                if not transport.auth_publickey(settings.user, key):
                    return
                tried[-1] += " (accepted, but the host asks for more than a key)"
            except paramiko.BadAuthenticationType as error:
                raise HostError(
                    host.address, f"it takes no keys, only {', '.join(error.allowed_types)}", remedy=_try(settings)
                ) from error
            except paramiko.AuthenticationException:
                continue
            except FAILURES:
                tried.append("(then it closed the connection)")
                break
    if host.key_path and not host.key_path.exists() and not tried:
        raise HostError(
            host.address,
            f"there is no key {host.key_path}",
            remedy='Name a private key with "ssh_key_path", for example ~/.ssh/id_ed25519; `ssh-keygen` makes one.',
        )
    locked = [label.split()[0] for label in tried if "passphrase" in label]
    remedy = f"Run: ssh-add {locked[0]}" if locked else f"Run: ssh-copy-id {_copy_id(settings)}"
    raise HostError(
        host.address,
        f"no key was accepted for user {settings.user}; tried: {', '.join(tried) or 'none found'}",
        remedy=remedy,
    )


def _keys(settings: SshSettings, tried: list[str], stack: contextlib.ExitStack) -> Iterator[tuple[str, paramiko.PKey]]:
    """Keys to offer, with the words for each; files that cannot be used are put into `tried`."""
    wanted = {path: blob for path in settings.identities if (blob := _public_blob(path))}
    offered: set[bytes] = set()
    agent = _Agent.open(settings.agent, stack)
    keys = agent.get_keys() if agent else ()
    for key in sorted(keys, key=lambda key: key.asbytes() not in wanted.values()):
        if key.asbytes() in wanted.values() or not settings.identities_only:
            offered.add(key.asbytes())
            yield f"agent:{key.comment or key.get_name()}", key
    for path in settings.identities:
        if not path.exists() or wanted.get(path) in offered:
            continue
        try:
            yield str(path), paramiko.PKey.from_path(path)
        except (*BAD_KEY, *FAILURES) as error:
            locked = (
                isinstance(error, TypeError | paramiko.PasswordRequiredException) or "password" in str(error).lower()
            )
            tried.append(f"{path} ({'has a passphrase, and the agent does not hold it' if locked else 'unreadable'})")


def _public_blob(path: Path) -> bytes | None:
    try:
        entry = known_hosts.parse("x " + path.with_name(path.name + ".pub").read_text("utf-8", "replace"), path, 1)
    except OSError:
        return None
    return entry.blob if entry else None


class _Agent(paramiko.agent.AgentSSH):
    """An agent at a socket of the user's choice (IdentityAgent); paramiko's own knows SSH_AUTH_SOCK only."""

    @classmethod
    def open(cls, path: Path | None, stack: contextlib.ExitStack) -> _Agent | None:
        if path is None:
            return None
        agent = cls()
        sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.settimeout(CONNECT_TIMEOUT_S)
        try:
            sock.connect(str(path))
            sock.settimeout(None)  # the agent may ask its user
            agent._connect(sock)
        except FAILURES:
            return None
        return agent


def _communicate(channel: paramiko.Channel, input: bytes | None, timeout: float | None) -> Completed | None:
    """Feed stdin and read both streams to their end; None if that takes longer than `timeout`."""
    output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}

    def feed() -> None:
        with contextlib.suppress(*FAILURES):
            channel.sendall(input or b"")
            channel.shutdown_write()

    def read(name: str, receive: Callable[[int], bytes]) -> None:
        with contextlib.suppress(*FAILURES):
            while block := receive(1 << 16):
                output[name] += block

    work = [(feed, ()), (read, ("stdout", channel.recv)), (read, ("stderr", channel.recv_stderr))]
    threads = [threading.Thread(target=function, args=arguments, daemon=True) for function, arguments in work]
    deadline = None if timeout is None else time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
    late = any(thread.is_alive() for thread in threads[1:])
    status = None if late else _status(channel)
    channel.close()
    if late:
        return None
    return Completed(
        returncode=status,
        stdout=output["stdout"].decode("utf-8", "replace"),
        stderr=output["stderr"].decode("utf-8", "replace"),
    )


def _status(channel: paramiko.Channel) -> int:
    """A session that ends without a status while the connection lives was killed; paramiko does not tell by what."""
    status = channel.recv_exit_status()
    if status >= 0:
        return status
    return SOME_SIGNAL if channel.get_transport().is_active() else LOST


def _lines(channel: paramiko.Channel) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    with contextlib.suppress(*FAILURES):
        while block := channel.recv(1 << 16):
            *whole, rest = (rest + decoder.decode(block)).split("\n")
            for line in whole:
                yield line.rstrip("\r")
    if rest and channel.eof_received:  # else the connection has ended amid a line
        yield rest


def _copy_id(settings: SshSettings) -> str:
    key = f"-i {shlex.quote(str(settings.identities[0]))} " if len(settings.identities) == 1 else ""
    return key + settings.target


def _try(settings: SshSettings) -> str:
    return f"Try: ssh {settings.target}"
