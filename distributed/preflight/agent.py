"""Runs on a host during the preflight, sent there as text, by the Python that trains (else by any other, for the rest).

Needs Python >= 3.9. JSON lines on stdin, JSON lines back. It ends when stdin does, and on an alarm of its own: a cut
link brings no end of file. Nothing of this project is imported from the host's disk; what both sides share (the choice
of the interface, the reading of the memory) arrives as text as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

OURS = ("distributed", "exogym", "whisper_tuner")
LOOK_AT_TORCH = """
import json, signal, sys
signal.alarm(int(sys.argv[1]))
import torch
mps = torch.backends.mps
print(json.dumps({"cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
                  "cuda_memory": torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0,
                  "mps": mps.is_available()}))
"""
PINGS = 8
DATAGRAMS = 3
BLOCK = bytes(1 << 16)
SEND_BUFFER = 1 << 19

children = []
write_lock = threading.Lock()


def say(**message) -> None:
    with write_lock:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def main() -> None:
    requests = queue.Queue()
    threading.Thread(target=listen, args=(requests,), daemon=True).start()
    links = Links()
    operations = {
        "facts": facts,
        "clock": lambda: {"clock": time.time()},
        "space": space,
        "code": code,
        "torch": torch_facts,
        "open": links.open,
        "connect": links.connect,
        "heard": links.answer_heard,
        "burst": links.burst,
    }
    while True:
        request = requests.get()
        threading.Thread(target=serve, args=(operations, request), daemon=True).start()


def listen(requests: queue.Queue) -> None:
    """Stdin has a thread of its own, so that its end is noticed whatever else goes on."""
    for line in sys.stdin.buffer:
        requests.put(json.loads(line))
    for child in children:
        child.kill()
    os._exit(0)


def serve(operations: dict, request: dict) -> None:
    number, name = request.pop("id"), request.pop("op")
    try:
        say(id=number, answer=operations[name](**request))
    except OSError as error:
        where = error.filename or name
        say(id=number, error=f"{where}: {error.strerror or error}", errno=error.errno)
    except Exception as error:  # the boundary: whatever it is must reach the other side
        say(id=number, error=f"{type(error).__name__}: {error}", errno=None)


def facts(names: list, project: str, memory: dict) -> dict:
    """What this host is, and what its Python has."""
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "system": platform.system(),
        "memory": load(memory).machine_memory(),
        "training": sys.argv[1:] == ["training"],
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "venv": sys.prefix != sys.base_prefix,
        "versions": versions,
        "rivals": rivals(Path(project).expanduser()),
    }


def rivals(project: Path) -> list:
    """[name, place, whether it would be loaded instead of ours] of other packages with our names.

    Workers get the project by PYTHONPATH: only what stands before that wins (a .pth file or an import hook).
    """
    standard = str(Path(os.__file__).parent)
    stdlib = next((i for i, entry in enumerate(sys.path) if entry == standard), 0)
    path_finder = importlib.machinery.PathFinder
    before = sys.meta_path.index(path_finder) if path_finder in sys.meta_path else 0
    found = []
    for name in OURS:
        for finder in sys.meta_path[:before]:
            spec = finder.find_spec(name, None) if hasattr(finder, "find_spec") else None
            if spec and spec.origin:
                found.append([name, spec.origin, True])
        for position, entry in enumerate(sys.path):
            if entry in ("", str(project), str(project / "gym")):
                continue
            spec = path_finder.find_spec(name, [entry])
            if spec and spec.origin:
                found.append([name, str(Path(spec.origin).parent.parent), position < stdlib])
    return [entry for position, entry in enumerate(found) if entry not in found[:position]]


def space(project: str, held: list) -> dict:
    """Write a file where the project is or will be; how much is free there, and what its folders `held` hold."""
    root = Path(project).expanduser()
    folder = root
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        next(folder.iterdir(), None)
        with tempfile.TemporaryFile(prefix=".preflight-", dir=str(folder)) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{folder} cannot be used for {root}") from None
    return {
        "root": str(root),
        "free": shutil.disk_usage(str(folder)).free,
        "held": sum(size_below(root / name) for name in held),
    }


def size_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def code(project: str, files: list) -> dict:
    """Which of the files [name, sha256] are missing or different under the project folder."""
    root = Path(project).expanduser()
    differ = []
    for name, digest in files:
        try:
            same = hashlib.sha256((root / name).read_bytes()).hexdigest() == digest
        except OSError:
            same = False
        if not same:
            differ.append(name)
    return {"differ": differ}


def torch_facts(seconds: int) -> dict:
    """In a process of its own, which also ends on an alarm of its own."""
    line = [sys.executable, "-c", LOOK_AT_TORCH, str(seconds)]
    child = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    children.append(child)
    out, err = child.communicate()
    if child.returncode == -signal.SIGALRM:
        return {"late": True}
    if child.returncode:
        last = err.decode("utf-8", "replace").strip().splitlines() or [f"status {child.returncode}"]
        return {"failed": last[-1][:300]}
    return json.loads(out.decode().splitlines()[-1])


class Links:
    """This host's side of the connections to all others: one TCP port and one UDP port on the chosen address."""

    def __init__(self):
        self.token = b""
        self.heard = set()
        self.datagrams = None

    def open(self, sources: dict, peer: str, interface: str, token: str) -> dict:
        """Listen on the address that training would use, the one towards `peer` or of the interface the user named."""
        module = load(sources)
        try:
            route = module.route_to(peer, interface=interface or None)
        except module.HostError as error:
            return {"wrong": str(error)}
        self.token = token.encode()
        listener = socket.create_server((route.address, 0), backlog=64)
        self.datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.datagrams.bind((route.address, 0))
        threading.Thread(target=self.accept, args=(listener,), daemon=True).start()
        threading.Thread(target=self.hear, daemon=True).start()
        port, datagram_port = listener.getsockname()[1], self.datagrams.getsockname()[1]
        return {"address": route.address, "interface": route.interface, "port": port, "datagram_port": datagram_port}

    def accept(self, listener) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self.welcome, args=(connection,), daemon=True).start()

    def welcome(self, connection) -> None:
        """One visitor: nothing is done for anybody who lacks the token."""
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
                    self.swallow(connection, int(source))
                else:
                    while connection.recv(1):
                        connection.sendall(b"p")
            except OSError:
                pass

    def swallow(self, connection, source: int) -> None:
        """Count what a burst brings; told without being asked, once it is over."""
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

    def hear(self) -> None:
        while True:
            data, _ = self.datagrams.recvfrom(256)
            if data.startswith(self.token):
                self.heard.add(int(data[len(self.token) :]))

    def answer_heard(self) -> dict:
        return {"heard": sorted(self.heard)}

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
            with self.visit(me, b"p", address, port, timeout) as connection:
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

    def visit(self, me: int, kind: bytes, address: str, port: int, timeout: float):
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
        with self.visit(me, b"b", address, port, 2.0) as connection:
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


def load(sources: dict):
    """The last of the modules whose texts were sent, each under its own name."""
    module = None
    for name, text in sources.items():
        parent = name.rpartition(".")[0]
        sys.modules.setdefault(parent, types.ModuleType(parent))
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(text, name, "exec"), module.__dict__)
    return module


if __name__ == "__main__":
    main()
