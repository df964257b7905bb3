"""Which host keys the owner has accepted: OpenSSH's known_hosts files, read only."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Verdict(Enum):
    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line; `blob` is the public key in SSH's wire format."""

    file: Path
    line: int
    revoked: bool
    names: tuple[str, ...]
    kind: str
    blob: bytes

    def matches(self, name: str) -> bool:
        if any(matches(name, pattern[1:]) for pattern in self.names if pattern.startswith("!")):
            return False
        return any(matches(name, pattern) for pattern in self.names if not pattern.startswith("!"))


@dataclass(frozen=True, kw_only=True)
class KnownHosts:
    """`authorities` are the `@cert-authority` lines (file, line), which do not count: no certificates here."""

    entries: tuple[Entry, ...]
    authorities: tuple[tuple[Path, int], ...] = ()

    def of(self, name: str) -> list[Entry]:
        return [entry for entry in self.entries if not entry.revoked and entry.matches(name)]

    def kinds(self, name: str) -> list[str]:
        """Key types known for a name, so that the server is asked for one of these."""
        return list(dict.fromkeys(entry.kind for entry in self.of(name)))

    def check(self, name: str, blob: bytes) -> Verdict:
        if any(entry.revoked and entry.blob == blob and entry.matches(name) for entry in self.entries):
            return Verdict.REVOKED
        known = self.of(name)
        if any(entry.blob == blob for entry in known):
            return Verdict.KNOWN
        return Verdict.CHANGED if known else Verdict.UNKNOWN


def matches(name: str, pattern: str) -> bool:
    if pattern.startswith("|1|"):
        return matches_hash(name, pattern)
    # fnmatch would read [host]:port as a character class.
    return fnmatch.fnmatchcase(name.lower(), pattern.lower().replace("[", "[[]"))


def matches_hash(name: str, pattern: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part) for part in pattern[3:].split("|"))
    except ValueError:  # binascii.Error is one
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)


def load(files: Iterable[Path]) -> KnownHosts:
    """Read known_hosts files; a missing file or an odd line counts as empty, as it does for ssh."""
    entries: list[Entry] = []
    authorities: list[tuple[Path, int]] = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for number, line in enumerate(lines, 1):
            if line.startswith("@cert-authority"):
                authorities.append((file, number))
            elif entry := parse(line, file, number):
                entries.append(entry)
    return KnownHosts(entries=tuple(entries), authorities=tuple(authorities))


def parse(line: str, file: Path, number: int) -> Entry | None:
    fields = line.split()
    revoked = fields[:1] == ["@revoked"]
    fields = fields[1:] if revoked else fields
    if len(fields) < 3 or fields[0].startswith(("#", "@")):
        return None
    try:
        blob = base64.b64decode(fields[2], validate=True)
    except ValueError:
        return None
    return Entry(file=file, line=number, revoked=revoked, names=tuple(fields[0].split(",")), kind=fields[1], blob=blob)


def lookup_name(host: str, port: int) -> str:
    """How known_hosts writes a host: `[host]:port` unless the port is 22."""
    return host if port == 22 else f"[{host}]:{port}"


def fingerprint(blob: bytes) -> str:
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"
