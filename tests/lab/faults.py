"""What happens to hosts in real life:

    with faults.cut(lab["h2"]):
        ...

Leaving the context undoes the fault. Only `kill` cannot be undone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lab import network
from lab.errors import LabError, LabLacks
from lab.hosts import LabHost, LabProcess, user_home
from lab.keys import ENVIRONMENT, PRIVATE

SMALL_DISK = "mmlab-disk"  # its name in the list of mounts
STRANGER = Path(__file__).with_name("stranger.py")
RELOAD_TIMEOUT_S = 5.0
RELOAD_AGAIN_S = 0.5


def kill(host: LabHost, pattern: str) -> list[LabProcess]:
    """SIGKILL to each process whose command line contains `pattern`; LabError if there is none."""
    return some(host, pattern, host.signal(signal.SIGKILL, pattern))


@contextlib.contextmanager
def frozen(host: LabHost, pattern: str = "") -> Iterator[list[LabProcess]]:
    """Stop processes in mid-air; without a pattern the whole host, its sshd too.

    The kernel goes on: it takes connections to a frozen process, and acknowledges what is sent to it.
    """
    try:
        if pattern:
            yield some(host, pattern, host.signal(signal.SIGSTOP, pattern))
        else:
            host.freeze()
            yield host.processes()
    finally:
        if pattern:
            host.signal(signal.SIGCONT, pattern)
        else:
            host.thaw()


def some(host: LabHost, pattern: str, hit: list[LabProcess]) -> list[LabProcess]:
    if not hit:
        raise LabError(f"{host.name}: no process {pattern!r}")
    return hit


@contextlib.contextmanager
def asleep(host: LabHost) -> Iterator[None]:
    """A closed lid: nothing runs, and nobody gets an answer."""
    with blackhole(host), frozen(host):
        yield


@contextlib.contextmanager
def cut(host: LabHost) -> Iterator[None]:
    """The cable out: the host itself knows it, the others just hear nothing any more."""
    try:
        network.set_link(host.name, False)
        yield
    finally:
        network.set_link(host.name, True)


@contextlib.contextmanager
def moved(host: LabHost, address: str) -> Iterator[None]:
    """Another address, as from a router: connections over the old one are dead, and nobody is told.

    Who knows the host by name needs `names` to find it.
    """
    try:
        _move(host, host.address, address)
        yield
    finally:
        _move(host, address, host.address)


def _move(host: LabHost, before: str, address: str) -> None:
    network.set_address(host.name, address)
    config = host.path(PRIVATE / "sshd_config")
    config.write_text(config.read_text().replace(f"ListenAddress {before}:", f"ListenAddress {address}:"))
    reload_sshd(host)


@contextlib.contextmanager
def names(host: LabHost, file: Path) -> Iterator[None]:
    """A host looks names up in `file`, written as /etc/hosts, which may change meanwhile."""
    host.in_files("mount", "--bind", str(file), "/etc/hosts")
    try:
        yield
    finally:
        host.in_files("umount", "--lazy", "/etc/hosts")


@contextlib.contextmanager
def blackhole(host: LabHost, peer: LabHost | None = None, way: str = "both") -> Iterator[None]:
    """Lose the packets between a host and `peer` (None: everybody) although the link is up; one at a time per host.

    way: "in" loses only what is sent to the host, "out" only what it sends. TCP is told nothing, on either side; a
    datagram that the host itself sends fails with EPERM.
    """
    try:
        network.drop(host.name, peer.address if peer else None, way)
        yield
    finally:
        network.pass_all(host.name)


@contextlib.contextmanager
def slow(host: LabHost, rate: str) -> Iterator[None]:
    """Limit the link, each way, to `rate` in tc's words: "1mbit"."""
    before = network.rate(host.name)
    try:
        network.set_rate(host.name, rate)
        yield
    finally:
        network.set_rate(host.name, before)


@contextlib.contextmanager
def small_disk(host: LabHost, folder: str | Path, size: str = "64m") -> Iterator[Path]:
    """A disk of its own for `folder` of a host, empty at first, gone afterwards; yields where this machine finds it.

    Nobody but the host sees it, and not its processes that stand in the folder already.
    """
    path, target = host.path(folder), str(user_home() / folder)
    path.mkdir(parents=True, exist_ok=True)
    host.in_files("mount", "-t", "tmpfs", "-o", f"size={size},mode=755", SMALL_DISK, target)
    try:
        yield path
    finally:
        host.in_files("umount", "--lazy", target)


@contextlib.contextmanager
def full_disk(host: LabHost, folder: str | Path) -> Iterator[int]:
    """Fill the disk of `folder` (see `small_disk`); yields how many bytes were free."""
    if SMALL_DISK not in host.in_files("df", "--output=source", str(user_home() / folder)):
        raise LabError(f"{host.name}: {folder} is on the disk of this machine: give it a small_disk first")
    filler = host.path(folder) / ".filler"
    try:
        yield fill(filler)
    finally:
        filler.unlink(missing_ok=True)


def fill(path: Path) -> int:
    """Write a file until the disk is full; returns its size."""
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(1 << 20))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return file.tell()


def clock(host: LabHost, seconds: float) -> dict[str, str]:
    """Variables that shift the clock of a process on the host by `seconds`; CLOCK_MONOTONIC stays right."""
    library = PRIVATE / "clock.so"
    if not host.path(library).exists():
        found = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
        if found is None:
            raise LabLacks("not installed: libfaketime (apt-get install faketime)")
        # In 0.9.10 absolute sleeps by CLOCK_MONOTONIC fail, and so does Python's time.sleep: hide that function.
        content = found.read_bytes().replace(b"\0clock_nanosleep\0", b"\0XXXXX_nanosleep\0", 1)
        host.path(library).write_bytes(content)
    return {"LD_PRELOAD": str(library), "FAKETIME": f"{seconds:+f}s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


@contextlib.contextmanager
def skewed(host: LabHost, seconds: float) -> Iterator[None]:
    """A wrong clock in all that sshd starts in the meantime, also afterwards; for `Lab.popen` there is `clock`.

    The host's sshd takes no connections for a moment, at both ends.
    """
    settings = host.path(ENVIRONMENT)
    try:
        settings.write_text(f"SetEnv {' '.join(f'{name}={value}' for name, value in clock(host, seconds).items())}\n")
        reload_sshd(host)
        yield
    finally:
        settings.unlink(missing_ok=True)
        reload_sshd(host)


def reload_sshd(host: LabHost) -> None:
    """Let it read its settings again; open sessions stay."""
    log = Path(f"/proc/{host.pid}/fd/2")
    begin = time.monotonic()
    before = log.read_bytes().count(b"Server listening")
    again = begin
    while log.read_bytes().count(b"Server listening") == before:
        if time.monotonic() > begin + RELOAD_TIMEOUT_S:
            raise LabError(f"{host.name}: sshd does not read its settings again")
        if time.monotonic() >= again:  # one that is just starting ignores the signal
            os.kill(host.pid, signal.SIGHUP)
            again += RELOAD_AGAIN_S
        time.sleep(0.01)


@contextlib.contextmanager
def garbage(host: LabHost, pattern: str = "", *, connections: int = 9, seed: int = 0) -> Iterator[dict[int, int]]:
    """Random bytes to each TCP port that processes with `pattern` listen on; yields {port: connections made}.

    They come from the bridge, as from a stranger in the same network, or for a loopback address from the host itself.
    A part of the connections stays open until the end.
    """
    found = [listener for listener in host.listeners() if pattern in " ".join(listener.process.command)]
    if not found:
        raise LabError(f"{host.name}: no process {pattern!r} listens")
    local = {f"{each.address}:{each.port}" for each in found if each.loopback}
    public = {f"{host.address}:{each.port}" for each in found if not each.loopback}
    made: Counter[int] = Counter()
    with contextlib.ExitStack() as strangers:
        for enter, addresses in (([], public), (["ip", "netns", "exec", network.namespace(host.name)], local)):
            if addresses:
                command = [*enter, sys.executable, str(STRANGER), str(seed), str(connections), *sorted(addresses)]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                stranger = strangers.enter_context(subprocess.Popen(command, text=True, **pipes))
                for address, count in json.loads(stranger.stdout.readline()).items():
                    made[int(address.rpartition(":")[2])] += count
        yield dict(made)


@contextlib.contextmanager
def damaged(path: Path, *, seed: int = 0, bytes_hit: int = 8, cut: bool = False) -> Iterator[str]:
    """Change `bytes_hit` bytes of a file, or cut its end off; yields what was done, in words.

    Undone in the very file that was damaged, whatever has taken its name since.
    """
    rng = random.Random(seed)
    with path.open("r+b", buffering=0) as file:
        size = path.stat().st_size
        if not size:
            raise LabError(f"{path}: an empty file cannot be damaged")
        if cut:
            left = rng.randrange(size)
            lost = os.pread(file.fileno(), size - left, left)
            file.truncate(left)
            changes, words = {left: lost}, f"{left} of {size} bytes left"
        else:
            places = sorted(rng.sample(range(size), min(bytes_hit, size)))
            changes = {place: os.pread(file.fileno(), 1, place) for place in places}
            for place, byte in changes.items():
                os.pwrite(file.fileno(), bytes([byte[0] ^ rng.randrange(1, 256)]), place)
            words = f"bytes {places} changed"
        try:
            yield f"{path.name}: {words}"
        finally:
            for place, right in changes.items():
                os.pwrite(file.fileno(), right, place)
