"""This host's side of the connections to all others, which the preflight tries."""

from __future__ import annotations

import socket
import threading
import time

from distributed.hosts.interfaces import route_to
from whisper_tuner.errors import HostError

from .session import say

PINGS = 8
DATAGRAMS = 3
BLOCK = bytes(1 << 16)
SEND_BUFFER = 1 << 19


class Links:
    """One TCP port and one UDP port on the chosen address; `token` is what all hosts of one preflight share."""

    def __init__(self):
        self.token = b""
        self.sources = set()  # of datagrams that arrived
        self.datagrams = None

    def open(self, peer: str, interface: str, token: str) -> dict:
        """Listen on the address that training would use, the one towards `peer` or of the interface the user named."""
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
        return {"address": route.address, "interface": route.interface, "port": port, "datagram_port": datagram_port}

    def accept(self, listener) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self.greet, args=(connection,), daemon=True).start()

    def greet(self, connection) -> None:
        """A connection of another host; without the token it is closed at once."""
        with connection:
            try:
                connection.settimeout(5)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                stream = connection.makefile("rb", buffering=0)
                if exactly(stream, len(self.token)) != self.token:
                    return
                kind, source = exactly(stream, 1), exactly(stream, 4)
                connection.sendall(b"K")
                if kind == b"b":
                    self.count_burst(connection, int(source))
                else:
                    while connection.recv(1):
                        connection.sendall(b"p")
            except OSError:
                pass

    def count_burst(self, connection, source: int) -> None:
        """Count what arrives, and say so in an event once it is over."""
        count, first, last = 0, None, None
        buffer = bytearray(1 << 18)
        try:
            while True:
                size = connection.recv_into(buffer)
                if not size:
                    break
                last = time.monotonic()
                if first is None:
                    first = last
                else:
                    count += size  # what came first marks the beginning
        except OSError:
            pass
        seconds = (last - first) if first is not None else 0.0
        say(event="burst", source=source, bytes=count, seconds=seconds)

    def receive(self) -> None:
        while True:
            data, _ = self.datagrams.recvfrom(256)
            if data.startswith(self.token):
                self.sources.add(int(data[len(self.token) :]))

    def heard(self) -> dict:
        return {"heard": sorted(self.sources)}

    def connect(self, me: int, peers: list, timeout: float) -> dict:
        """Try all peers [number, address, port, datagram port] at once: latency in seconds, or why not."""
        results = {}

        def one(number, address, port, datagram_port):
            results[number] = self.ping(me, address, port, datagram_port, timeout)

        threads = [threading.Thread(target=one, args=peer, daemon=True) for peer in peers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout + 1)
        late = {"failed": "timeout", "errno": None}
        return {"links": [[peer[0], results.get(peer[0], late)] for peer in peers]}

    def ping(self, me: int, address: str, port: int, datagram_port: int, timeout: float) -> dict:
        try:
            for _ in range(DATAGRAMS):
                self.datagrams.sendto(self.token + b"%d" % me, (address, datagram_port))
        except OSError:
            pass
        try:
            with self.reach(me, b"p", address, port, timeout) as connection:
                best = None
                for _ in range(PINGS):
                    begin = time.monotonic()
                    connection.sendall(b"p")
                    if connection.recv(1) != b"p":
                        break
                    spent = time.monotonic() - begin
                    best = spent if best is None else min(best, spent)
                return {"latency": best} if best is not None else {"failed": "broken", "errno": None}
        except TimeoutError:
            return {"failed": "timeout", "errno": None}
        except ConnectionRefusedError as error:
            return {"failed": "refused", "errno": error.errno}
        except OSError as error:
            return {"failed": error.strerror or str(error), "errno": error.errno}

    def reach(self, me: int, kind: bytes, address: str, port: int, timeout: float):
        """A connection to another agent, after it has answered for itself."""
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


def exactly(stream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        block = stream.read(count - len(data))
        if not block:
            raise OSError("end of stream")
        data += block
    return data
