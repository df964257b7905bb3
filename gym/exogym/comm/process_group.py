"""Groups of torch.distributed: ranks joined by gloo, where those of one machine meet, and a script's default group.

The only file with collectives of torch.distributed.
"""

from __future__ import annotations

import functools
import hmac
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from exogym.comm.comm import DEFAULT_TIMEOUT, Comm, all_gather_bytes, all_reduce_bytes, broadcast_bytes
from exogym.errors import ExogymError, PeerLost, Stranger

LOOPBACK = "127.0.0.1"
POLL = 0.25  # seconds; how soon an interrupt is noticed inside a collective
# A collective that was given up keeps its group and its buffers until gloo's own time-out, which on a Mac is the only
# way in which it learns of a killed peer (libuv). Ranks may have to wait for long until the slowest has come, so what
# waits is small: more than WHOLE_BYTES travel in pieces, each in a time that is enough at a megabit a second.
WHOLE_BYTES, PIECE_BYTES, PIECE_S = 1 << 20, 16 << 20, 300.0
MEETING_BYTES = 4  # float32
SWAPS, PROOFS = 1, 2  # tags of what two ranks send each other at once
PROOF_BYTES = 32  # of SHA-256, and of a nonce
# Once one rank has joined, the others are about to, for all have told where they listen. On its way to a host that may
# wait behind audio, for as long as the host goes on without a word from its launcher: 23 s.
PROVE_S = 30.0
Options = TypeVar("Options", dist.AllreduceOptions, dist.BroadcastOptions)


class _Works:
    """Sends and receives that go on at once."""

    def __init__(self, *works: dist.Work):
        self.all = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.all)


Start = Callable[[Tensor, float], Any]  # of a buffer, within so many seconds: dist.Work or _Works, as its wait takes


class ProcessGroupComm(Comm):
    """A group of gloo's, kept out of torch's global state so that several may follow.

    Collectives start asynchronously and are polled, so that a peer that is silent for `timeout` seconds becomes
    PeerLost, and so does `interrupted()` when it turns true, also in a process where signals cannot. `store` outlives
    the group: give each group that forms over it a PrefixStore of its own.

    address: this machine's IPv4 address on the network that the ranks share. Without it gloo resolves the
    host's own name, and may bind 127.0.0.1. An interface's name (GLOO_SOCKET_IFNAME) would not do: on macOS gloo takes
    the first address of any family that the interface has.

    key: of this group alone. gloo asks nobody who they are, and the numbers by which it tells its connections apart
    begin at 0: so before anything else each rank proves to each other one that it has the key too.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        store: dist.Store,
        address: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        interrupted: Callable[[], bool] = lambda: False,
        key: bytes | None = None,
    ):
        super().__init__()
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        # Of each thread: what it waits for, and the buffers of that.
        self._held: dict[int, tuple[dist.Work | _Works | None, tuple[Tensor, ...]]] = {}
        self._interrupted, self._is_interrupted = interrupted, False
        self._lost: PeerLost | None = None
        # gloo's own timeout is the same: the process of a rank that gave up cannot exit before it has passed.
        try:
            # Any: torch's stubs lack its methods. None once it is closed.
            self._group: Any = _gloo(store, rank, world_size, timedelta(seconds=timeout), address)
        except RuntimeError as error:
            raise PeerLost(f"rank {rank} of {world_size} could not join the group: {brief(error)}") from error
        if key is not None:
            try:
                self._prove(key)
            except PeerLost:
                self.close()
                raise

    def _prove(self, key: bytes) -> None:
        """Prove and check over each connection by itself, for a stranger may have taken only one. Raises PeerLost."""
        own, others = secrets.token_bytes(PROOF_BYTES), [rank for rank in range(self.world_size) if rank != self.rank]
        theirs = self._tell_each(dict.fromkeys(others, own))

        def proof(sender: int, receiver: int, sent: bytes, received: bytes) -> bytes:
            return hmac.digest(key, b"%d %d " % (sender, receiver) + sent + received, "sha256")

        proofs = self._tell_each({peer: proof(self.rank, peer, own, theirs[peer]) for peer in others})
        for peer in others:
            if not hmac.compare_digest(proofs[peer], proof(peer, self.rank, theirs[peer], own)):
                what = f"who answers rank {self.rank} of {self.world_size} as rank {peer} does not have the run's key"
                raise Stranger(what)

    def _tell_each(self, sent: dict[int, bytes]) -> dict[int, bytes]:
        """Send PROOF_BYTES to each of the others, and return as many of each."""
        going = {peer: torch.tensor(list(part), dtype=torch.uint8) for peer, part in sent.items()}
        coming = {peer: torch.zeros_like(part) for peer, part in going.items()}

        def start() -> _Works:
            works = [self._group.recv([part], peer, PROOFS) for peer, part in coming.items()]
            return _Works(*works, *(self._group.send([part], peer, PROOFS) for peer, part in going.items()))

        self._wait_whole(start, "the proof of who they are", PROVE_S, *coming.values(), *going.values())
        return {peer: bytes(part.tolist()) for peer, part in coming.items()}

    # Before the pieces of a large tensor travel all ranks meet, with a value of which this rank sends so many bytes.

    def _reducing_to_meet(self, flat: Tensor) -> int:
        return all_reduce_bytes(_meeting(flat), self.world_size)

    def _meet(self, what: str) -> None:
        met = torch.zeros(1)
        self._wait(lambda: self._reduce(met, self.timeout), what, self.timeout, met)

    def all_reduce_(self, flat: Tensor) -> None:
        with self._counted(all_reduce_bytes(flat.nbytes, self.world_size) + self._reducing_to_meet(flat)):
            self._in_pieces(flat, "all_reduce", self._reduce, meet=self._reduce)

    def _reduce(self, part: Tensor, limit: float) -> dist.Work:
        work: dist.Work = self._group.allreduce([part], _with_limit(dist.AllreduceOptions(), limit))
        return work

    def broadcast_(self, flat: Tensor, src: int = 0) -> None:
        def cast(part: Tensor, limit: float) -> Any:
            options = _with_limit(dist.BroadcastOptions(), limit)
            options.rootRank, options.rootTensor = src, 0
            return self._group.broadcast([part], options)

        sent = broadcast_bytes(flat.nbytes, self.world_size, self.rank, src)
        with self._counted(sent + self._reducing_to_meet(flat)):
            self._in_pieces(flat, "broadcast", cast, meet=self._reduce)

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        """Gather a large tensor one piece after another: what is given up then are copies of one, see _in_pieces."""

        def gather(mine: Tensor, gathered: list[Tensor], limit: float) -> None:
            def start() -> Any:
                return self._group.allgather(gathered, mine, timedelta(seconds=limit))

            self._wait(start, "all_gather", limit, mine, *gathered)

        gathered = [torch.empty_like(flat) for _ in range(self.world_size)]
        sent = all_gather_bytes(flat.nbytes, self.world_size) + self._reducing_to_meet(flat)
        with self._counted(sent):
            if flat.nbytes <= WHOLE_BYTES:
                gather(flat, gathered, self.timeout)
                return gathered
            self._meet("all_gather")
            size, limit = PIECE_BYTES // flat.element_size(), min(self.timeout, PIECE_S)
            if self.world_size == 2:  # gloo sends first, see _swap
                other = 1 - self.rank
                gathered[self.rank].copy_(flat)
                self._swap(flat, other, gathered[other], other, "all_gather", limit)
                return gathered
            for piece, *places in zip(flat.split(size), *(whole.split(size) for whole in gathered), strict=True):
                parts = [torch.empty_like(piece) for _ in places]
                gather(piece.clone(), parts, limit)
                for place, part in zip(places, parts, strict=True):
                    place.copy_(part)
        return gathered

    def all_to_all(self, flat: Tensor) -> Tensor:
        with self._counted(flat.nbytes // self.world_size * (self.world_size - 1) + self._reducing_to_meet(flat)):
            received, limit = torch.empty_like(flat), self.timeout
            if _meeting(flat):
                self._meet("all_to_all")
                limit = min(self.timeout, PIECE_S)
            parts, places = flat.view(self.world_size, -1), received.view(self.world_size, -1)
            places[self.rank].copy_(parts[self.rank])
            for distance in range(1, self.world_size):
                to, of = ((self.rank + way * distance) % self.world_size for way in (1, -1))
                self._swap(parts[to], to, places[of], of, "all_to_all", limit)
        return received

    def _swap(self, part: Tensor, to: int, place: Tensor, of: int, what: str, limit: float) -> None:
        """Send `part` to one rank while `place` comes from another, in pieces; what is given up in here are copies.

        gloo's own all-to-all sends first. Between two ranks its word that it may be sent to then stands behind all that
        it sends, and the link carries one way at a time: half of the rate.
        """
        size = PIECE_BYTES // part.element_size()
        for piece, its_place in zip(part.split(size), place.split(size), strict=True):
            sent, came = piece.clone(), torch.empty_like(its_place)

            def start(sent: Tensor = sent, came: Tensor = came) -> _Works:
                coming = self._group.recv([came], of, SWAPS)
                return _Works(coming, self._group.send([sent], to, SWAPS))

            self._wait_whole(start, what, limit, sent, came)
            its_place.copy_(came)

    def send(self, flat: Tensor, dst: int) -> None:
        def send(part: Tensor, _: float) -> _Works:
            return _Works(self._group.send([part], dst, 0))

        with self._counted(flat.nbytes + _meeting(flat)):
            self._in_pieces(flat, f"send to rank {dst}", send, meet=send, wait=self._wait_whole)

    def recv(self, flat: Tensor, src: int) -> None:
        def receive(part: Tensor, _: float) -> _Works:
            return _Works(self._group.recv([part], src, 0))

        with self._counted():
            self._in_pieces(flat, f"receive from rank {src}", receive, meet=receive, wait=self._wait_whole)

    def interrupt(self) -> None:
        self._is_interrupted = True

    def close(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        for work, buffers in self._held.values():
            if self._lost and work is not None:
                _abandon(group, work, buffers)
        self._held = {}

    def _in_pieces(
        self, flat: Tensor, what: str, start: Start, *, meet: Start, wait: Callable[..., None] | None = None
    ) -> None:
        """Run a collective piece by piece: what is given up holds little memory, or not for long, and never `flat`.

        Ranks first wait for each other with a single value. Once all are there, a piece takes no longer than its way.
        While one travels, the one before it goes home, and the next one gets ready.
        """
        wait = wait or self._wait
        if not _meeting(flat):
            wait(lambda: start(flat, self.timeout), what, self.timeout, flat)
            return
        met = torch.zeros(1)
        wait(lambda: meet(met, self.timeout), what, self.timeout, met)
        pieces, limit = flat.split(PIECE_BYTES // flat.element_size()), min(self.timeout, PIECE_S)
        parts = [piece.clone() for piece in pieces[:1]] + [torch.empty_like(piece) for piece in pieces[1:2]]

        def part_of(number: int) -> Tensor:
            part: Tensor = parts[number % 2][: pieces[number].numel()]
            return part

        def begin(number: int) -> Any:
            work = start(part_of(number), limit)
            if number > 0:
                pieces[number - 1].copy_(part_of(number - 1))
            if number + 1 < len(pieces):
                part_of(number + 1).copy_(pieces[number + 1])
            return work

        for number in range(len(pieces)):
            wait(functools.partial(begin, number), what, limit, part_of(number))
        pieces[-1].copy_(part_of(len(pieces) - 1))

    def _wait(self, start: Callable[[], dist.Work], what: str, limit: float, *buffers: Tensor) -> None:
        def finished(work: dist.Work) -> bool:
            """Wait for POLL seconds at most. Raises RuntimeError if the work failed."""
            try:
                work.wait(timedelta(seconds=POLL))
                return True
            except RuntimeError:
                if not work.is_completed():
                    return False
            work.wait()
            return True

        self._poll(start, what, limit, buffers, finished)

    def _wait_whole(self, start: Callable[[], _Works], what: str, limit: float, *buffers: Tensor) -> None:
        """Wait in a thread for a send or receive: gloo cuts the connection when such a wait ends early."""
        outcome: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()

        def wait(works: _Works) -> None:
            deadline = time.monotonic() + limit
            for work in works.all:  # also after an error: none is completed before that
                try:
                    work.wait(timedelta(seconds=max(POLL, deadline - time.monotonic())))
                except RuntimeError as error:
                    outcome.put(error)
            outcome.put(None)

        def begin() -> _Works:
            works = start()
            threading.Thread(target=wait, args=(works,), daemon=True).start()
            return works

        def finished(_: _Works) -> bool:
            try:
                error = outcome.get(timeout=POLL)
            except queue.Empty:
                return False
            if error:
                raise error
            return True

        self._poll(begin, what, limit, buffers, finished)

    def _poll(
        self,
        start: Callable[[], Any],
        what: str,
        limit: float,
        buffers: tuple[Tensor, ...],
        finished: Callable[[Any], bool],
    ) -> None:
        """Start a work, and ask whether it has finished until it has. Raises PeerLost, now and ever after."""
        if self._lost:
            raise self._lost
        if self._group is None:
            raise ExogymError(f"{what} on a closed communicator")
        deadline, thread = time.monotonic() + limit, threading.get_ident()
        try:
            self._held[thread] = None, buffers
            if self._is_interrupted or self._interrupted():
                raise RuntimeError("interrupted")
            work = start()
            self._held[thread] = work, buffers
            while not finished(work):
                if self._is_interrupted or self._interrupted():
                    raise RuntimeError("interrupted")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no answer within {limit:g} s")
            self._held.pop(thread, None)
        except RuntimeError as error:
            self._lost = PeerLost(f"rank {self.rank} of {self.world_size} lost a peer in {what}: {brief(error)}")
            raise self._lost from error


def _meeting(flat: Tensor) -> int:
    """Return the bytes of the value with which ranks meet before a tensor travels in pieces; 0 if it does not."""
    return MEETING_BYTES if flat.nbytes > WHOLE_BYTES else 0


def _gloo(store: dist.Store, rank: int, size: int, wait: timedelta, address: str | None) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, size, gloo_options(wait, address) or wait)


def gloo_options(timeout: timedelta, address: str | None) -> Any:
    """Return the options of a group whose ranks listen on this address; None without one."""
    if address is None:
        return None
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return options


def _with_limit(options: Options, seconds: float) -> Options:
    options.timeout = timedelta(seconds=seconds)
    return options


# Groups that were given up, with their work and its buffers: a peer that wakes up may still write into them.
_abandoned: list[tuple[Any, dist.Work | _Works, tuple[Tensor, ...]]] = []


def _abandon(group: Any, work: dist.Work | _Works, buffers: tuple[Tensor, ...]) -> None:
    """Keep a group with its work and buffers until the work has failed, and let it go then.

    Not before, as that would block until its time-out. And not later: a peer that wakes up then and goes on with the
    work aborts this process, where gloo uses libuv.
    """

    def let_go() -> None:
        while not work.is_completed():
            time.sleep(POLL)
        abandoned.remove(kept)

    kept, abandoned = (group, work, buffers), _abandoned
    abandoned.append(kept)
    threading.Thread(target=let_go, daemon=True).start()


def brief(error: Exception) -> str:
    """Return the first line of an error, as torch's go on for long."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def local_store(timeout: float = DEFAULT_TIMEOUT, address: str = LOOPBACK) -> dist.TCPStore:
    """Open a store on this address of this machine alone, since it asks nobody who they are; its `port` is free."""
    listener = socket.create_server((address, 0), backlog=128)
    port, wait = listener.getsockname()[1], timedelta(seconds=timeout)
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=wait, master_listen_fd=listener.detach()
    )


def join_local_store(port: int, timeout: float = DEFAULT_TIMEOUT) -> dist.TCPStore:
    return dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout))


class DefaultGroupComm(Comm):
    """The default group of torch.distributed, for scripts that have joined one themselves, whatever its backend is.

    Tensors that the backend cannot send from where they are go by way of `device`. bytes_sent is computed as for gloo,
    whose ring all_reduce and all_gather send as much as those of nccl.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        kinds = [pair.split(":")[0] for pair in dist.get_backend_config().split(",")]
        if "cpu" not in kinds:  # this process's own accelerator
            self.device = torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())

    def all_reduce_(self, flat: Tensor) -> None:
        with self._sending(flat, all_reduce_bytes(flat.nbytes, self.world_size)) as there:
            dist.all_reduce(there)

    def broadcast_(self, flat: Tensor, src: int = 0) -> None:
        with self._sending(flat, broadcast_bytes(flat.nbytes, self.world_size, self.rank, src)) as there:
            dist.broadcast(there, src)

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        with self._sending(flat, all_gather_bytes(flat.nbytes, self.world_size)) as there:
            gathered = [torch.empty_like(there) for _ in range(self.world_size)]
            dist.all_gather(gathered, there)
        return [tensor.to(flat.device) for tensor in gathered]

    def send(self, flat: Tensor, dst: int) -> None:
        with self._sending(flat, flat.nbytes) as there:
            dist.send(there, dst)

    def recv(self, flat: Tensor, src: int) -> None:
        with self._sending(flat, 0) as there:
            dist.recv(there, src)

    @contextmanager
    def _sending(self, flat: Tensor, sent: int) -> Iterator[Tensor]:
        """Give `flat`, or what takes its place on the device of the group."""
        there = flat.to(self.device)
        try:
            with self._counted(sent):
                yield there
        except RuntimeError as error:
            raise PeerLost(f"rank {self.rank} of {self.world_size} lost a peer: {brief(error)}") from error
        if there is not flat:
            flat.copy_(there)


_default_groups: dict[dist.ProcessGroup, DefaultGroupComm] = {}


def default_group() -> DefaultGroupComm | None:
    """Always the same one for the same group; None if there is no default group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD
    assert group is not None
    if group not in _default_groups:
        _default_groups.clear()
        _default_groups[group] = DefaultGroupComm()
    return _default_groups[group]


def leave_default_group() -> None:
    """Leave it: a process that ends while gloo's threads still run may be aborted (`terminate called`, SIGABRT)."""
    _default_groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
