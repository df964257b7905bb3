"""What lets SSH into another machine: its key in known_hosts, and the user's key over there.

OpenSSH's own programs do it, and ask for passwords themselves: `ssh-keyscan`, `ssh-keygen`, `ssh-copy-id`.
"""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from whisper_tuner.errors import HostError, HostKeyError, MissingProgram

from .authentication import Verdict, known_keys, verdict_on
from .connection import REMOTE_LOGIN, open_socket
from .host import Host, SshSettings

SCAN_S = 5
KINDS = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-rsa")  # the first that a machine has is shown and kept
OWN_KEY = Path("~/.ssh/id_ed25519")


@dataclass(frozen=True, kw_only=True)
class HostKey:
    """A machine's public key as it says. line: "ssh-ed25519 AAAA...". fingerprint: "SHA256:..."."""

    line: str
    fingerprint: str

    @property
    def shown_there(self) -> str:
        """The command that prints the fingerprint on the machine itself."""
        kind = self.line.removeprefix("ssh-").partition(" ")[0].partition("-")[0]
        return f"ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub"


def host_key(host: Host, settings: SshSettings) -> HostKey:
    """Ask a machine for its key, without trusting it. Raises HostError."""
    if settings.jumps or settings.proxy_command:
        what = "it is reached through another machine, so its key cannot be asked for by itself"
        raise HostError(host.address, what, remedy=f"Accept it once with: ssh {settings.target}")
    command = ["ssh-keyscan", "-T", str(SCAN_S), "-t", "ed25519,ecdsa,rsa", "-p", str(settings.port), settings.hostname]
    lines = [line.split(" ", 1)[1] for line in _said(command).splitlines() if line and line[0] != "#"]
    lines.sort(key=lambda line: ([*KINDS, line.split()[0]]).index(line.split()[0]))
    if not lines:
        open_socket(host, settings, None, SCAN_S).close()  # raises where not even a port is reached
        raise HostError(host.address, f"no SSH server answers at port {settings.port}", remedy=REMOTE_LOGIN)
    fingerprint = _said(["ssh-keygen", "-lf", "-"], input=lines[0]).split()[1]
    return HostKey(line=lines[0], fingerprint=fingerprint)


def is_known(host: Host, settings: SshSettings, key: HostKey) -> bool:
    """Tell whether known_hosts has this key. Raises HostKeyError if it has another one there."""
    known = known_keys(settings.known_as, settings.known_hosts)
    verdict = verdict_on(base64.b64decode(key.line.split()[1]), known)
    if verdict in (Verdict.CHANGED, Verdict.REVOKED):
        place = next(entry.place for entry in known)
        what = f"its key is now {key.fingerprint}, and {place} has another. Somebody may be intercepting the connection"
        remedy = f"If you know why, for example after a new installation: ssh-keygen -R '{settings.known_as}'"
        raise HostKeyError(host.address, what, remedy=f"{remedy} and pair it again.")
    return verdict is Verdict.KNOWN


def others_with(key: HostKey, settings: SshSettings) -> list[str]:
    """List other names that known_hosts has the same key under: one machine with two names, or a copy of a machine."""
    blob, names = key.line.split()[1], []
    for file in settings.known_hosts:
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        rows = [line.split() for line in lines if not line.startswith(("#", "@", "|"))]
        names += [row[0] for row in rows if blob in row and settings.known_as not in row[0].split(",")]
    return names


def accept(settings: SshSettings, key: HostKey) -> Path:
    """Add a key to the user's known_hosts, and return that file."""
    file = settings.known_hosts[0]
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = file.read_bytes() if file.exists() else b""
    gap = b"" if not before or before.endswith(b"\n") else b"\n"
    with file.open("ab") as out:
        out.write(gap + f"{settings.known_as} {key.line}\n".encode())
    file.chmod(0o600)
    return file


def own_key(settings: SshSettings) -> Path | None:
    """Return the public key that ssh offers first; None if the user has none."""
    publics = (path.with_name(path.name + ".pub") for path in settings.identities)
    return next((path for path in publics if path.is_file()), None)


def make_key() -> Path:
    """Have ssh-keygen make a key, which asks for a passphrase; return its public half. Raises HostError."""
    file = OWN_KEY.expanduser()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _status(["ssh-keygen", "-q", "-t", "ed25519", "-f", str(file)]):
        raise HostError("localhost", "ssh-keygen made no key")
    return file.with_name(file.name + ".pub")


def copy_key(host: Host, settings: SshSettings, public: Path) -> None:
    """Have ssh-copy-id put the key there, which asks for the password. Raises HostError."""
    command = ["ssh-copy-id", "-i", str(public), "-p", str(settings.port), f"{settings.user}@{settings.host}"]
    if _status(command):
        what = f"ssh-copy-id did not put {public.name} there"
        remedy = f"Is {settings.user} your name there? If not: multimac hosts pair {host.address} --user NAME"
        raise HostError(host.address, what, remedy=remedy)


def _status(command: Sequence[str]) -> int:
    """Run a program that asks the user in this terminal."""
    try:
        return subprocess.run(command).returncode
    except FileNotFoundError:
        raise MissingProgram(f"{command[0]} is not installed", remedy="Install OpenSSH's client.") from None


def _said(command: Sequence[str], input: str = "") -> str:
    try:
        done = subprocess.run(command, input=input, capture_output=True, text=True, timeout=4 * SCAN_S)
    except FileNotFoundError:
        raise MissingProgram(f"{command[0]} is not installed", remedy="Install OpenSSH's client.") from None
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout
