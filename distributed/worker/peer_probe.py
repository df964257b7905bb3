"""Whether a worker's peers answer on the training network: asked while its rank waits for them.

gloo raises nothing when packets between two hosts are lost, as by a firewall or by a Wi-Fi that keeps its clients
apart. So each worker has a TCP port that takes connections and closes them, nothing is read there or kept; and one
whose rank waits tries those of the others, from a thread of its own. The launcher makes the ports known.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import threading
import time
from collections.abc import Callable

from distributed.control.messages import Endpoint, endpoint
from distributed.ssh.local_network import DENIED, WAYS_OUT, is_denied
from exogym.membership.client import UNREACHED_S, Unanswered, Wait
from whisper_tuner.errors import HostError

EVERY_S = 1.0  # each peer is asked once
WAIT_S = 1.0  # of a rank, before it asks
LOOK_S = 5.0  # how often this machine's own address is looked at: a laptop wakes up in another network
BACKLOG = 1024  # connections that may wait while the thread that trains holds the interpreter
AGAIN_S = 0.1  # where no connection can be taken
# Its calls keep the interpreter. The socket module's hand it over, and wait to get it back while another thread
# computes: strangers could then fill the queue, and peers would find nobody.
LIBC = ctypes.PyDLL(None)


class PeerProbe:
    """Tells the launcher where it listens ("listens"), and which peers do not answer ("reach"), with macOS's reason.

    address() is that of this machine on the training network; it may change. Raises HostError while there is none.
    """

    def __init__(
        self,
        wait: Wait,
        address: Callable[[], str],
        send: Callable[[dict], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._wait, self._address, self._send, self._clock = wait, address, send, clock
        self._lock = threading.Lock()
        self._peers: set[Endpoint] = set()
        # All that follows belongs to the thread of `run`.
        self._listener: socket.socket | None = None
        self._attempts: set[asyncio.Task] = set()
        self._unanswered = Unanswered()
        self._told: set[Endpoint] = set()
        self._is_denied = False
        self._turned, self._looked = clock(), -LOOK_S

    def meet(self, peers: list) -> None:
        """Note, from any thread, where the others listen now, as [address, port]."""
        with self._lock:
            self._peers = {endpoint(*peer) for peer in peers}

    def start(self) -> None:
        threading.Thread(target=lambda: asyncio.run(self.run()), daemon=True).start()

    async def run(self) -> None:
        try:
            while True:
                self.turn()
                await asyncio.sleep(EVERY_S)
        finally:
            self._stop_listening()

    def turn(self) -> None:
        """Once in EVERY_S: tell who has not answered, and ask anew."""
        now = self._clock()
        passed, self._turned = min(now - self._turned, 2 * EVERY_S), now
        if now - self._looked >= LOOK_S:
            self._looked = now
            self._look()
        generation, waited = self._wait.read()
        waits = waited >= WAIT_S
        with self._lock:
            peers = self._peers
        asked = peers if waits else peers & self._told
        self._unanswered.turn(asked, passed)
        unreached = self._unanswered.unreached()
        if unreached or self._told:  # as long as there is somebody: the launcher may not have made use of it before
            listed = [list(peer) for peer in sorted(unreached)]
            self._send({"type": "reach", "generation": generation, "waits": waits, "unreached": listed})
        self._told = unreached
        for peer in asked:
            attempt = asyncio.create_task(self._ask(peer))
            self._attempts.add(attempt)  # the loop itself holds no task
            attempt.add_done_callback(self._attempts.discard)

    def _look(self) -> None:
        """Listen where this machine is now, and on no other address."""
        with contextlib.suppress(HostError, OSError):
            address = self._address()
            if self._listener and self._listener.getsockname()[0] == address:
                return
            listener = socket.create_server((address, 0), backlog=BACKLOG)
            listener.setblocking(False)
            self._stop_listening()
            self._listener = listener
            asyncio.get_running_loop().add_reader(listener, self._take_all, listener.fileno())
            self._send({"type": "listens", "address": address, "port": listener.getsockname()[1]})

    def _stop_listening(self) -> None:
        if self._listener:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()

    def _take_all(self, listener: int) -> None:
        taken = 0
        while taken < BACKLOG and (connection := LIBC.accept(listener, None, None)) >= 0:
            LIBC.close(connection)
            taken += 1
        if not taken:
            time.sleep(AGAIN_S)

    async def _ask(self, peer: Endpoint) -> None:
        """Try a new connection each time: TCP itself tries a lost one again ever more slowly."""
        try:
            with socket.socket() as attempt:
                attempt.setblocking(False)
                async with asyncio.timeout(UNREACHED_S):
                    await asyncio.get_running_loop().sock_connect(attempt, peer)
                self._unanswered.answered(peer)
        except OSError as error:
            if not self._is_denied and await asyncio.to_thread(is_denied, error, *peer):
                self._is_denied = True  # said once: gloo would not say it at all
                self._send({"type": "warning", "what": f"{DENIED}. {WAYS_OUT}"})
