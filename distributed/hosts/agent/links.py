"""This host's side of the connections to all others, which the preflight tries."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from distributed.hosts.interfaces import other_networks, route_to
from distributed.ssh.local_network import DENIED, is_denied
from whisper_tuner.errors import HostError

PINGS = 8
DATAGRAMS = 3
BLOCK = bytes(1 << 16)
SEND_BUFFER = 1 << 19


class Links:
    """A TCP port and a UDP port on each address that is tried. tell: is told how much a burst has brought here."""

    def __init__(self, tell: Callable):
        self.tell = tell
        self.token = b""  # what all hosts of one preflight share
        self.sources: set = set()  # of datagrams that arrived
        self.datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def open(self, peer: str, interface: str, token: str) -> dict:
        """Listen on the address that training would use, the one towards `peer` or of the interface the user named.

        networks: where else ranks might meet.
        """
        try:
            route = route_to(peer, interface=interface or None)
        except HostError as error:
            return {"wrong": str(error)}
        self.token = token.encode()
        listener = socket.create_server((route.address, 0), backlog=64)
        self.datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.datagrams.bind((route.address, 0))
        threading.Thread(target=self.accept, args=(listener,), daemon=True).start()
        threading.Thread(target=self.receive, daemon=True).start()
        port, datagram_port = listener.getsockname()[1], self.datagrams.getsockname()[1]
        return {
            "address": route.address,
            "interface": route.interface,
            "port": port,
            "datagram_port": datagram_port,
            "networks": [list(network) for network in other_networks(route.address)],
        }

    def accept(self, listener) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self.greet, args=(connection,), daemon=True).start()

    def greet(self, connection) -> None:
        """Answer a connection of another host: its pings, or one burst. Without the token it is closed at once."""
        with connection, connection.makefile("rb") as stream, contextlib.suppress(OSError, ValueError):
            connection.settimeout(5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if stream.read(len(self.token)) != self.token:
                return
            kind, source = stream.read(1), int(stream.read(4))
            connection.sendall(b"K")
            if kind == b"b":
                port, count, first, last = connection.getsockname()[1], 0, 0.0, 0.0
                buffer = bytearray(1 << 18)
                with contextlib.suppress(OSError):
                    while size := stream.readinto1(buffer):
                        last = time.monotonic()
                        count += size if first else 0  # what came first marks the beginning
                        first = first or last
                self.tell(source=source, port=port, bytes=count, seconds=last - first)
            else:
                while stream.read(1):
                    connection.sendall(b"p")

    def receive(self) -> None:
        while True:
            data, _ = self.datagrams.recvfrom(256)
            if data.startswith(self.token):
                self.sources.add(int(data[len(self.token) :]))

    def heard(self) -> dict:
        return {"heard": sorted(self.sources)}

    def connect(self, me: int, peers: list, timeout: float) -> dict:
        """Try all peers [number, address, port, datagram port] at once: latency in seconds, or why not."""
        pool = ThreadPoolExecutor(max(1, len(peers)))
        futures = [
            (number, pool.submit(self.ping, me, address, port, datagram_port, timeout))
            for number, address, port, datagram_port in peers
        ]
        done, _ = wait([future for _, future in futures], timeout + 1)
        late = {"failed": "timeout", "errno": None}
        return {"links": [[number, future.result() if future in done else late] for number, future in futures]}

    def ping(self, me: int, address: str, port: int, datagram_port: int, timeout: float) -> dict:
        with contextlib.suppress(OSError):
            for _ in range(DATAGRAMS):
                self.datagrams.sendto(self.token + b"%d" % me, (address, datagram_port))
        try:
            with self.reach(me, b"p", address, port, timeout) as connection:
                trips = []
                for _ in range(PINGS):
                    begin = time.monotonic()
                    connection.sendall(b"p")
                    if connection.recv(1) != b"p":
                        raise OSError(None, "broken")
                    trips.append(time.monotonic() - begin)
                return {"latency": min(trips)}
        except TimeoutError:
            return {"failed": "timeout", "errno": None}
        except ConnectionRefusedError as error:
            return {"failed": "refused", "errno": error.errno}
        except OSError as error:
            denied = is_denied(error, address, port)
            return {"failed": DENIED if denied else error.strerror or str(error), "errno": error.errno}

    def reach(self, me: int, kind: bytes, address: str, port: int, timeout: float):
        """Connect to another agent, and wait until it has answered for itself."""
        connection = socket.create_connection((address, port), timeout=timeout)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(self.token + kind + b"%04d" % me)
            if connection.recv(1) != b"K":
                raise OSError(None, "another machine answers there")
        except BaseException:
            connection.close()
            raise
        return connection

    def burst(self, me: int, address: str, port: int, seconds: float, limit: int) -> dict:
        """Send as much as goes in `seconds`, at most `limit` bytes; the other side counts."""
        sent = 0
        with self.reach(me, b"b", address, port, 2.0) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            connection.settimeout(seconds + 0.6)
            end = time.monotonic() + seconds
            while sent < limit and time.monotonic() < end:
                sent += connection.send(BLOCK)
        return {"sent": sent}
