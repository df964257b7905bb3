"""Who answers, and who asks: the host's key against known_hosts, then the user's keys.

Host keys are never accepted here: an unknown or changed key is refused with the command that settles it. OpenSSH's
known_hosts files are read by its own `ssh-keygen`.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm

from whisper_tuner.errors import AccessError, HostError, HostKeyError, MissingProgram

from .host import Host, SshSettings
from .process import FAILURES

AGENT_TIMEOUT_S = 10.0
APPLE_SSH_ADD = "/usr/bin/ssh-add"  # Homebrew's knows no Keychain
LOCKED = "has a passphrase, and the agent does not hold it"
# What paramiko raises for a key file; it asserts that both halves of an Ed25519 key fit.
BAD_KEY = (TypeError, ValueError, AssertionError, UnsupportedAlgorithm, paramiko.UnknownKeyType)
RSA = {"rsa-sha2-512", "rsa-sha2-256"}  # how an ssh-rsa key signs
FASTEST_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
# A line that `ssh-keygen -F` found: its number and mark; then the line itself: [mark] names kind key [comment].
FOUND = re.compile(
    r"^# Host .* found: line (\d+) (|CA|REVOKED)\n[ \t]*(?:@\S+[ \t]+)?\S+[ \t]+(\S+)[ \t]+(\S+)", re.MULTILINE
)


class Verdict(Enum):
    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A line for one host. mark: "REVOKED", "CA" for @cert-authority, else ""; blob: the key in SSH's wire format."""

    place: str
    mark: str
    kind: str
    blob: bytes


def known_keys(name: str, files: Iterable[Path]) -> list[Entry]:
    """Find what stands there for a host. A missing file or an odd line counts as empty, as it does for ssh.

    Raises HostError, MissingProgram.
    """
    entries = []
    for file in files:
        try:
            done = subprocess.run(["ssh-keygen", "-F", name, "-f", str(file)], capture_output=True, timeout=20)
        except FileNotFoundError as error:
            raise MissingProgram("ssh-keygen is not installed", remedy="Run: apt-get install openssh-client") from error
        except subprocess.TimeoutExpired as error:
            remedy = "Is it on a network drive that does not answer?"
            raise HostError(name, f"ssh-keygen does not finish reading {file}", remedy=remedy) from error
        for number, mark, kind, key in FOUND.findall(done.stdout.decode("utf-8", "replace")):
            with contextlib.suppress(ValueError):
                blob = base64.b64decode(key, validate=True)
                entries.append(Entry(place=f"{file}:{number}", mark=mark, kind=kind, blob=blob))
    return entries


def verdict_on(blob: bytes, entries: Sequence[Entry]) -> Verdict:
    """Judge a host's key. Certificates are not supported: what an authority has signed is not known."""
    if any(entry.mark == "REVOKED" and entry.blob == blob for entry in entries):
        return Verdict.REVOKED
    accepted = [entry.blob for entry in entries if not entry.mark]
    if blob in accepted:
        return Verdict.KNOWN
    return Verdict.CHANGED if accepted else Verdict.UNKNOWN


def check_host(host: Host, settings: SshSettings, transport: paramiko.Transport, timeout: float) -> None:
    """Key exchange, then the host key's check; nothing is sent to a host whose key does not pass."""
    name = settings.known_as
    known = known_keys(name, settings.known_hosts)
    # Asked for another kind of key than the known ones, an honest host would seem to have changed.
    kinds = {kind for entry in known for kind in (RSA if entry.kind == "ssh-rsa" else {entry.kind}) if not entry.mark}
    options = transport.get_security_options()
    options.key_types = sorted(options.key_types, key=lambda kind: kind not in kinds)
    options.ciphers = sorted(options.ciphers, key=lambda cipher: cipher not in FASTEST_CIPHERS)
    transport.banner_timeout = timeout
    try:
        transport.start_client(timeout=timeout)
        key = transport.get_remote_server_key()
    except FAILURES as error:
        if transport.remote_version:  # it said that it speaks SSH
            raise
        what = f"port {settings.port} answers, but not as an SSH server does"
        remedy = "Is ssh_port right? SSH's own is 22. Or its SSH server turns this machine away, or is too busy."
        raise HostError(host.address, what, remedy=f"{remedy} Try: ssh {settings.target}") from error
    _raise_unless_known(host, settings, known, name, key)


def _raise_unless_known(
    host: Host, settings: SshSettings, known: Sequence[Entry], name: str, key: paramiko.PKey
) -> None:
    verdict = verdict_on(key.asbytes(), known)
    finger = f"{key.get_name()} {key.fingerprint}"
    if verdict is Verdict.KNOWN:
        return
    if verdict is Verdict.REVOKED:
        what = f"its key {finger} is marked @revoked in known_hosts"
        raise HostKeyError(host.address, what, remedy="Do not connect to it.")
    if verdict is Verdict.CHANGED:
        place = next(entry.place for entry in known if not entry.mark)
        raise HostKeyError(
            host.address,
            f"its key has CHANGED: it is now {finger}, unlike the one in {place}. Somebody may be intercepting"
            " the connection",
            remedy="If you know why it changed, for example after a new installation:"
            f" ssh-keygen -R {shlex.quote(name)} && ssh {settings.target}",
        )
    skipped = ", ".join(entry.place for entry in known if entry.mark == "CA")
    note = f" (@cert-authority lines are not supported: {skipped})" if skipped else ""
    kind = key.get_name().removeprefix("ssh-").partition("-")[0]
    raise HostKeyError(
        host.address,
        f"its key is not known here: {finger}{note}",
        remedy=f"Compare it with `ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub` on that machine,"
        f" and accept it once with: ssh {settings.target}",
    )


def authenticate(host: Host, settings: SshSettings, transport: paramiko.Transport, timeout: float) -> None:
    """Offer the agent's keys and the key files, in ssh's order. Raises AccessError that lists what was tried."""
    transport.auth_timeout = timeout
    tried: list[str] = []
    with contextlib.ExitStack() as stack:
        for label, key in usable_keys(settings, tried, stack):
            tried.append(label)
            try:
                if not transport.auth_publickey(settings.user, key):
                    return
                tried[-1] += " (accepted, but the host asks for more than a key)"
            except paramiko.BadAuthenticationType as error:
                raise AccessError(
                    host.address,
                    f"it accepts no keys, only {', '.join(error.allowed_types)}",
                    remedy=f"Try: ssh {settings.target}",
                ) from error
            except paramiko.AuthenticationException:
                continue
            except FAILURES:
                tried.append("(then it closed the connection)")
                break
    raise _not_accepted(host, settings, tried)


def _not_accepted(host: Host, settings: SshSettings, tried: list[str]) -> AccessError:
    if host.key_path and not host.key_path.exists() and not tried:
        remedy = 'Name a private key with "ssh_key_path", for example ~/.ssh/id_ed25519; `ssh-keygen` makes one.'
        return AccessError(host.address, f"there is no key {host.key_path}", remedy=remedy)
    what = f"no key was accepted for user {settings.user}; tried: {', '.join(tried) or 'none found'}"
    if locked := [label.removesuffix(f" ({LOCKED})") for label in tried if label.endswith(f" ({LOCKED})")]:
        add = f"{APPLE_SSH_ADD} --apple-use-keychain" if platform.system() == "Darwin" else "ssh-add"
        return AccessError(host.address, what, remedy=f"Run: {add} {shlex.quote(locked[0])}")
    only = len(settings.identities) == 1
    key = f"-i {shlex.quote(str(settings.identities[0]))} " if only else ""
    return AccessError(
        host.address, what, remedy=f"If {settings.user} is your name there, run: ssh-copy-id {key}{settings.target}"
    )


def usable_keys(
    settings: SshSettings, tried: list[str], stack: contextlib.ExitStack
) -> Iterator[tuple[str, paramiko.PKey]]:
    """Keys to offer, with the words for each; files that cannot be used are put into `tried`."""
    wanted: dict[Path, bytes] = {}
    for path in settings.identities:
        with contextlib.suppress(OSError, ValueError, paramiko.SSHException):
            wanted[path] = paramiko.pkey.PublicBlob.from_file(f"{path}.pub").key_blob
    offered: set[bytes] = set()
    locked: list[Path] = []

    def held_by_agent() -> Iterator[tuple[str, paramiko.PKey]]:
        for key in sorted(_agent_keys(settings.agent, stack), key=lambda key: key.asbytes() not in wanted.values()):
            is_wanted = key.asbytes() in wanted.values() or not settings.identities_only
            if is_wanted and key.asbytes() not in offered:
                offered.add(key.asbytes())
                yield f"agent:{key.comment or key.get_name()}", key

    yield from held_by_agent()
    for path in settings.identities:
        if not path.exists() or wanted.get(path) in offered:
            continue
        try:
            yield str(path), paramiko.PKey.from_path(path)
        except (*BAD_KEY, *FAILURES) as error:
            if isinstance(error, TypeError | paramiko.PasswordRequiredException) or "password" in str(error).lower():
                locked.append(path)
            else:
                tried.append(f"{path} (unreadable)")
    if locked and load_keychain(settings.agent):
        yield from held_by_agent()
    tried += [f"{path} ({LOCKED})" for path in locked if wanted.get(path) not in offered]


@functools.cache  # once is enough
def load_keychain(agent: Path | None) -> bool:
    """On a Mac, hand the agent those keys whose passphrases are in the Keychain, which only Apple's ssh asks.

    `--apple-load-keychain` (man ssh-add of macOS) asks nobody anything. False if that cannot have helped.
    """
    if agent is None or platform.system() != "Darwin":
        return False
    env = {**os.environ, "SSH_AUTH_SOCK": str(agent)}
    command = [APPLE_SSH_ADD, "--apple-load-keychain"]
    print(
        f"your ssh-agent gets the keys of your Keychain: {shlex.join(command)}; `ssh-add -D` undoes it", file=sys.stderr
    )
    try:
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=AGENT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _agent_keys(path: Path | None, stack: contextlib.ExitStack) -> Sequence[paramiko.AgentKey]:
    """Ask the agent at a socket of the user's choice (IdentityAgent); paramiko's own class knows SSH_AUTH_SOCK only."""
    if path is None:
        return ()
    agent = paramiko.agent.AgentSSH()
    sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    sock.settimeout(AGENT_TIMEOUT_S)
    try:
        sock.connect(str(path))
        sock.settimeout(None)  # the agent may ask its user
        agent._connect(sock)
    except FAILURES:
        return ()
    return agent.get_keys()
