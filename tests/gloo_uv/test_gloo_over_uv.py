"""What gloo does over libuv, as on a Mac, when a peer or a stranger misbehaves, and over TCP, as on Linux.

Needs gloo's sources with GLOO_SOURCE as their folder, where they are built once, in minutes: `apt-get source gloo` from
Debian's unstable release (of 2025-09 or later), and `apt-get install cmake g++ libuv1-dev`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path

import psutil
import pytest

SOURCE = os.environ.get("GLOO_SOURCE", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SOURCE, reason="GLOO_SOURCE is not set: gloo over libuv is not at hand"),
]
LOW, HIGH = "127.0.0.1", "127.0.0.2"  # the lower address waits for a connection, the higher one connects
TIMEOUT_S = 2.0
HANGS_S = 8 * TIMEOUT_S  # over TCP who waits for a connection gives up after five time-outs
AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection
GOES_ON, RAISES, ABORTS, HANGS = "goes on", "raises", "aborts", "hangs"


@pytest.fixture(scope="session")
def built() -> Path:
    folder = Path(SOURCE) / "over-uv"
    about = {"check": True, "env": {**os.environ, "PKG_CONFIG_ALLOW_SYSTEM_CFLAGS": "1"}}
    sources = ["-S", Path(__file__).parent, f"-DGLOO_SOURCE={Path(SOURCE).absolute()}"]
    subprocess.run(["cmake", *sources, "-B", folder, "-DCMAKE_BUILD_TYPE=Release"], **about)
    subprocess.run(["cmake", "--build", folder, "-j", "2"], **about)
    return folder


class Rank:
    """A process of meet.cc, which takes a step when it is told to, and says what became of it."""

    def __init__(self, built: Path, store: Path, transport: str, address: str, *, as_darwin: bool):
        arguments = [transport, address, str((LOW, HIGH).index(address)), str(store), str(round(TIMEOUT_S * 1000))]
        env = {**os.environ, **({"LD_PRELOAD": str(built / "libdarwin.so")} if as_darwin else {})}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen([built / "meet", *arguments], env=env, bufsize=0, **pipes)
        assert self.hear() == "listens"
        of_mine = psutil.Process(self.process.pid).net_connections("tcp4")
        self.address = next(each.laddr for each in of_mine if each.status == psutil.CONN_LISTEN)

    def hear(self) -> str:
        """The next line that it tells; "" if it has ended, or tells nothing for long."""
        told, _, _ = select.select([self.process.stdout], [], [], HANGS_S)
        return self.process.stdout.readline().decode().strip() if told else ""

    def go(self, how: str = "") -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{how}\n".encode())

    def outcome(self) -> str:
        """Of the step that it was told to take."""
        began, line = time.monotonic(), self.hear()
        print(f"{time.monotonic() - began:.1f} s: {line}")
        if line:
            return RAISES if line.startswith("raised") else GOES_ON
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert self.process.wait(1) == -signal.SIGABRT
            print(self.process.stderr.read().decode())
            return ABORTS
        return HANGS


@pytest.fixture
def pair(built, tmp_path):
    """(the one that is looked at, its peer): both have published their addresses, and do not connect yet."""
    ranks = []

    def start(transport: str, role: str = "waits", *, as_darwin: bool = False) -> list[Rank]:
        for address in (LOW, HIGH) if role == "waits" else (HIGH, LOW):
            ranks.append(Rank(built, tmp_path, transport, address, as_darwin=as_darwin))
        assert [rank.hear() for rank in ranks] == ["published"] * 2
        return ranks

    yield start
    for rank in ranks:
        rank.process.kill()
        rank.process.wait()


def form(*ranks: Rank) -> list[str]:
    for rank in ranks:
        rank.go()
    return [rank.outcome() for rank in ranks]


def stranger(rank: Rank, words: bytes = b"") -> None:
    """Connects, says this, and resets the connection."""
    with contextlib.suppress(OSError), socket.create_connection(rank.address) as connection:
        connection.sendall(words)
        time.sleep(0.1 if words else 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)


@pytest.mark.parametrize("role", ["waits", "connects"])
@pytest.mark.parametrize(("transport", "expected"), [("tcp", RAISES), ("uv", HANGS)])
def test_a_peer_that_is_killed_before_it_connects(pair, transport, expected, role):
    """Who connects is refused."""
    rank, peer = pair(transport, role)
    peer.process.kill()
    peer.process.wait()
    assert form(rank) == [expected]


@pytest.mark.parametrize("transport", ["tcp", "uv"])
@pytest.mark.parametrize("words", [b"\0", b"\xff" * 64, os.urandom(100_000)], ids=len)
def test_a_stranger_who_speaks_garbage(pair, transport, words):
    ranks = pair(transport)
    for _ in range(5):
        stranger(ranks[0], words)
    assert form(*ranks) == [GOES_ON, GOES_ON]


def test_a_stranger_who_guesses_the_number_of_a_pair(pair):
    """libuv's pairs are numbered from 0; who says such a number is taken for the peer."""
    rank, _ = pair("uv")
    stranger(rank, struct.pack("i", 0) + b"\xff" * 64)
    rank.go()  # and it may say that it has formed
    assert rank.process.wait(HANGS_S) == -signal.SIGABRT


@pytest.mark.parametrize(("transport", "as_darwin"), [("tcp", False), ("uv", False), ("uv", True)])
def test_a_stranger_who_resets_at_once(pair, transport, as_darwin):
    """On a Mac accept() fails, or setsockopt() right after it."""
    rank, peer = pair(transport, as_darwin=as_darwin)
    for _ in range(200):
        stranger(rank)
    rank.go()
    peer.go()
    assert rank.outcome() == (ABORTS if as_darwin else GOES_ON)


@pytest.mark.parametrize("role", ["waits", "connects"])
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(("transport", "at_once"), [("tcp", True), ("uv", False)])
def test_a_peer_that_is_lost_in_a_sum(pair, transport, at_once, resets, role):
    rank, peer = pair(transport, role)
    form(rank, peer)
    if resets:  # as the system does for a process that is killed before it has read everything
        peer.process.send_signal(signal.SIGSTOP)
    rank.go()
    time.sleep(0.5)
    peer.process.kill()
    began = time.monotonic()
    assert rank.outcome() == RAISES
    assert (time.monotonic() - began < TIMEOUT_S / 4) == at_once


@pytest.mark.parametrize(("transport", "stays", "leaves"), [("tcp", RAISES, GOES_ON), ("uv", ABORTS, GOES_ON)])
@pytest.mark.parametrize("has_left", [False, True])
def test_a_peer_that_comes_when_a_sum_was_given_up(pair, transport, stays, leaves, has_left):
    """As one that slept. Its word that it may be sent to finds nobody if the group was left at once."""
    rank, peer = pair(transport)
    form(rank, peer)
    rank.go()
    assert rank.outcome() == RAISES
    if has_left:
        rank.go("leave")
        assert rank.hear() == "left"
    peer.go()
    assert peer.outcome() == RAISES
    rank.go("wait" if has_left else "")
    assert rank.outcome() == (leaves if has_left else stays)
