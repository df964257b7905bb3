"""Which host keys the owner has accepted: OpenSSH's known_hosts files, as its own `ssh-keygen` reads them."""

from __future__ import annotations

import base64
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from whisper_tuner.errors import HostError, MissingProgram

# Its number and mark; then the line itself: [mark] names kind key [comment].
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


def look_up(name: str, files: Iterable[Path]) -> list[Entry]:
    """Find what stands there for a host. A missing file or an odd line counts as empty, as it does for ssh.

    Raises HostError, MissingProgram.
    """
    return [entry for file in files for entry in _entries(name, file)]


def _entries(name: str, file: Path) -> Iterator[Entry]:
    try:
        done = subprocess.run(["ssh-keygen", "-F", name, "-f", str(file)], capture_output=True, timeout=20)
    except FileNotFoundError as error:
        raise MissingProgram("ssh-keygen is not installed", remedy="apt-get install openssh-client") from error
    except subprocess.TimeoutExpired as error:
        remedy = "Is it on a network drive that does not answer?"
        raise HostError(name, f"ssh-keygen does not finish reading {file}", remedy=remedy) from error
    for number, mark, kind, key in FOUND.findall(done.stdout.decode("utf-8", "replace")):
        try:
            blob = base64.b64decode(key, validate=True)
        except ValueError:
            continue
        yield Entry(place=f"{file}:{number}", mark=mark, kind=kind, blob=blob)


def check(entries: Sequence[Entry], blob: bytes) -> Verdict:
    """Judge a key. Certificates are not supported: what an authority has signed is not known."""
    if any(entry.mark == "REVOKED" and entry.blob == blob for entry in entries):
        return Verdict.REVOKED
    accepted = [entry.blob for entry in entries if not entry.mark]
    if blob in accepted:
        return Verdict.KNOWN
    return Verdict.CHANGED if accepted else Verdict.UNKNOWN


def lookup_name(host: str, port: int) -> str:
    """Write a host as known_hosts does: `[host]:port` unless the port is 22."""
    return host if port == 22 else f"[{host}]:{port}"
