"""Real connections on loopback. No answer at all is made by a port whose queue of connections is full."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time

import pytest
from waiting import wait_until

from distributed.control.messages import endpoint
from distributed.ssh.local_network import DENIED, WAYS_OUT
from distributed.worker import peer_probe
from distributed.worker.peer_probe import PeerProbe
from exogym.membership import client as waiting
from exogym.membership.client import Wait
from whisper_tuner.errors import HostError


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(peer_probe, "EVERY_S", 0.05)
    monkeypatch.setattr(peer_probe, "WAIT_S", 0.1)
    monkeypatch.setattr(peer_probe, "LOOK_S", 0.0)
    for module in (peer_probe, waiting):
        monkeypatch.setattr(module, "UNREACHED_S", 0.5)


class Host:
    """A worker's probe, in a thread as there, and all that it has said."""

    def __init__(self):
        self.wait, self.said, self.address = Wait(), [], lambda: "127.0.0.1"
        self.probe = PeerProbe(self.wait, lambda: self.address(), self.said.append)
        self.closing = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.work()))
        self.thread.start()

    async def work(self):
        running = asyncio.create_task(self.probe.run())
        while not self.closing.is_set():
            await asyncio.sleep(0.01)
        running.cancel()

    def of(self, kind):
        return [event for event in list(self.said) if event["type"] == kind]

    @property
    def place(self):
        wait_until(lambda: self.of("listens"))
        return [self.of("listens")[-1]["address"], self.of("listens")[-1]["port"]]

    def close(self):
        self.closing.set()
        self.thread.join(5)


@pytest.fixture
def hosts():
    made = [Host(), Host()]
    yield made
    for host in made:
        host.close()


@contextlib.contextmanager
def dead_end():
    """Where nothing comes back: the kernel drops what does not fit into the queue."""
    with socket.socket() as listener, contextlib.ExitStack() as queue:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(8):
            waiting = queue.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        time.sleep(0.1)
        yield list(listener.getsockname())


def test_peers_who_answer_are_not_spoken_of(hosts):
    one, other = hosts
    one.probe.meet([other.place])
    one.wait.begins(1)
    time.sleep(1.5)
    assert one.of("reach") == [] and other.of("reach") == []


def test_one_that_does_not_wait_asks_nobody(hosts):
    with dead_end() as nowhere:
        hosts[0].probe.meet([nowhere])
        time.sleep(1)
        assert hosts[0].of("reach") == [] and not hosts[0].probe._attempts


def test_who_does_not_answer_is_named_until_it_does(hosts):
    one, other = hosts
    with dead_end() as nowhere:
        one.probe.meet([nowhere, other.place])
        one.wait.begins(7)
        begun = time.monotonic()
        wait_until(lambda: one.of("reach"))
        assert 0.5 < time.monotonic() - begun < 1.5
        assert one.of("reach")[0] == {"type": "reach", "generation": 7, "waits": True, "unreached": [nowhere]}
        with one.wait.of(8):
            pass
        wait_until(lambda: one.of("reach")[-1] == {**one.of("reach")[0], "generation": 8, "waits": False})
        assert len(one.probe._attempts) < 20
        one.probe.meet([other.place])  # it has moved
    wait_until(lambda: one.of("reach")[-1]["unreached"] == [])
    told = len(one.of("reach"))
    wait_until(lambda: not one.probe._attempts)
    assert len(one.of("reach")) == told


def test_one_that_answers_again_is_heard_at_once(hosts):
    with dead_end() as nowhere:
        hosts[0].probe.meet([nowhere])
        hosts[0].wait.begins(1)
        wait_until(lambda: hosts[0].of("reach"))
    with socket.create_server(tuple(nowhere)):
        wait_until(lambda: hosts[0].of("reach")[-1]["unreached"] == [], 3)


def test_one_that_macos_keeps_from_its_peers_says_so_once(hosts, monkeypatch):
    """gloo over libuv would say nothing at all."""
    monkeypatch.setattr(peer_probe, "is_denied", lambda error, address, port: isinstance(error, ConnectionError))
    gone = Host()
    place = gone.place
    gone.close()
    hosts[0].probe.meet([place])
    hosts[0].wait.begins(1)
    wait_until(lambda: hosts[0].of("reach"))
    assert [event["what"] for event in hosts[0].of("warning")] == [f"{DENIED}. {WAYS_OUT}"]


def test_a_port_where_nobody_listens_is_no_answer(hosts):
    one, other = hosts
    gone = Host()
    place = gone.place
    gone.close()
    one.probe.meet([place, other.place])
    one.wait.begins(1)
    wait_until(lambda: one.of("reach"))
    assert one.of("reach")[0]["unreached"] == [place]


def test_a_sleep_of_this_process_is_no_silence_of_the_others():
    now, said = 0.0, []

    async def turns(probe):
        nonlocal now
        for now in (0.0, 1.0, 1.1, 900.0):  # noqa: B007
            probe.turn()
        probe._stop_listening()

    with dead_end() as nowhere:
        wait = Wait(lambda: now)
        probe = PeerProbe(wait, lambda: "127.0.0.1", said.append, lambda: now)
        wait.begins(1)
        probe.meet([nowhere])
        asyncio.run(turns(probe))
        assert [event["type"] for event in said] == ["listens"]


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has one loopback address")
def test_it_moves_with_this_machine_and_waits_while_there_is_no_network(hosts):
    one, other = hosts

    def gone():
        raise HostError("master", "no route")

    before = one.place
    one.address = gone
    time.sleep(0.3)
    assert one.place == before
    one.address = lambda: "127.0.0.2"
    wait_until(lambda: one.place[0] == "127.0.0.2")
    with pytest.raises(OSError):
        socket.create_connection(before, 1)
    other.probe.meet([one.place])
    other.wait.begins(1)
    time.sleep(1)
    assert other.of("reach") == []


def test_strangers_are_neither_kept_nor_listened_to(hosts):
    one, other = hosts
    place = one.place
    held = []
    for n in range(300):
        held.append(socket.create_connection(place, 5))
        with contextlib.suppress(OSError):
            held[-1].sendall(b'{"type": "reach"}\n' * n)
    other.probe.meet([place])
    other.wait.begins(1)
    for stranger in held:
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b""
        stranger.close()
    time.sleep(1)
    assert other.of("reach") == [] and [event["type"] for event in one.said] == ["listens"]
    assert one.thread.is_alive()


STRANGERS = """
import contextlib, socket
connections = [socket.create_connection({place}, 30) for _ in range(300)]
for connection in connections:
    with contextlib.suppress(ConnectionResetError):
        assert not connection.recv(1)
"""


def test_a_flood_of_strangers_is_taken_while_the_interpreter_is_busy(hosts):
    """A thread that hands the interpreter over for each connection waits so long each time: half a minute in all."""
    done, interval = threading.Event(), sys.getswitchinterval()
    busy = threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(done.is_set, True)])
    sys.setswitchinterval(0.2)
    busy.start()
    try:
        flood = STRANGERS.format(place=tuple(hosts[0].place))
        subprocess.run([sys.executable, "-c", flood], check=True, timeout=12)
    finally:
        sys.setswitchinterval(interval)
        done.set()
        busy.join()


def test_only_an_address_and_a_port_are_believed():
    for port in (0, 65536, "22", True, 1.0):
        with pytest.raises(ValueError):
            endpoint("10.0.0.1", port)
    for address in ("::1", "mac.local", "10.0.0.1; rm", 167772161, None, "10.0.0"):
        with pytest.raises(ValueError):
            endpoint(address, 22)
    assert endpoint("10.0.0.1", 22) == ("10.0.0.1", 22)
