"""A communicator whose ranks may come and go: one generation after another, as the coordinator decides."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from torch import Tensor

from exogym.comm.comm import Comm, Member, in_background
from exogym.comm.process_group import POLL
from exogym.errors import PeerLost, Rejoined, Stranger
from exogym.membership import STATE_SYNC, Generation
from exogym.membership.client import CoordinatorClient, Wait

T = TypeVar("T")
ALIVE_EVERY_S = 5.0
LARGE_BYTES = 64 << 10  # of a tensor that may fill a slow link for long enough to hold up heartbeats


class ElasticComm(Comm):
    """Rank `name` among those of `hosts` who are there: `members`, in rank order.

    connect(generation, rank, interrupted) forms the group of one generation; it may take long, and runs in a thread.
    send(message) reaches the coordinator, whose answers arrive in `client`. `wait` tells other threads for how long
    this rank has been waiting.
    Collectives raise PeerLost as soon as their generation is over. Only `join`, `commit_together` and `regroup` go on
    to the next; the last two raise Rejoined if this rank had fallen behind.
    """

    def __init__(
        self,
        name: str,
        hosts: Sequence[str],
        client: CoordinatorClient,
        send: Callable[[dict[str, Any]], None],
        connect: Callable[[Generation, int, Callable[[], bool]], Comm],
    ):
        super().__init__()
        self.name, self.wait = name, Wait()
        self._client, self._send, self._connect = client, send, connect
        self._member: Member | None = None
        self._group: Comm | None = None
        self._become(Generation(0, tuple(hosts), "", False))  # as it will be if all of them come
        self._voted_ahead = (0, 0)  # generation, vote
        self._asked = (0, 0)  # generation, round
        self._digest: int | None = None
        self._was_replaced = False  # this rank's state, by that of the others, since it last said so
        self._said_alive = 0.0

    def _become(self, generation: Generation) -> None:
        """Be one of this generation, in which nobody has voted yet."""
        self._generation, self.continues_round = generation, generation.continues_round
        self.rank, self.world_size = generation.members.index(self.name), len(generation.members)
        self._vote, self._regroup_due = 0, False
        self._said_exchange = False  # since the last vote

    @property
    def members(self) -> tuple[str, ...]:
        return self._generation.members

    @property
    def generation(self) -> int:
        return self._generation.number

    def all_reduce_(self, flat: Tensor) -> None:
        self._in_group(lambda group: group.all_reduce_(flat), flat)

    def broadcast_(self, flat: Tensor, src: int = 0) -> None:
        self._in_group(lambda group: group.broadcast_(flat, src), flat)

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        return self._in_group(lambda group: group.all_gather(flat), flat)

    def all_to_all(self, flat: Tensor) -> Tensor:
        return self._in_group(lambda group: group.all_to_all(flat), flat)

    def send(self, flat: Tensor, dst: int) -> None:
        self._in_group(lambda group: group.send(flat, dst), flat)

    def recv(self, flat: Tensor, src: int) -> None:
        self._in_group(lambda group: group.recv(flat, src), flat)

    def join(self, member: Member) -> None:
        self._member = member
        self._next_generation()
        self._was_replaced = False

    def commit_together(
        self, kind: str, work: Callable[[], T], about: Callable[[T], dict[str, Any]] = lambda result: {}
    ) -> T:
        while True:
            try:
                result = work()
                if self._should_commit(kind, about(result)):
                    return result
                raise PeerLost(f"generation {self.generation} is over")
            except PeerLost as error:
                self._give_up(error)
                self._go_on_with_round()

    def _go_on_with_round(self) -> None:
        """Come to the next generation. Raises Rejoined if it begins a round, or this rank had fallen behind."""
        self._next_generation()
        if not self.continues_round:
            raise self._begin_round() from None
        self._check_replaced()

    def vote_ahead(self, kind: str, about: dict[str, Any]) -> None:
        self._voted_ahead = self.generation, self._vote
        self._send_vote(kind, about)

    def ask_ahead(self, round_number: int, *, stopping: bool) -> None:
        self._asked = self.generation, round_number
        self._send({"type": "round_end", "generation": self.generation, "round": round_number, "stop": stopping})

    def is_cut_short(self, round_number: int, *, stopping: bool) -> bool:
        """Do as the first member that asks wants it: the coordinator answers at once, so nobody waits for others."""
        while True:
            if stopping or self._asked != (self.generation, round_number):
                self.ask_ahead(round_number, stopping=stopping)
            with self._counted():
                self.wait.begins(self.generation)
                is_cut = self._client.wait_for_round_end(self.generation, round_number)
            # One asked ahead may be of a generation that is over: what would be sent in it is void.
            if is_cut is not None and not self._client.is_superseded(self.generation):
                self.wait.ends()
                return is_cut
            self.close()
            self._go_on_with_round()

    def compare(self, digest: int, where: str) -> None:
        """Have the coordinator compare: it goes with the next vote."""
        self._digest = digest

    @property
    def is_over(self) -> bool:
        return self._client.is_superseded(self.generation) or self._client.is_left_behind(self.generation)

    @property
    def is_regroup_due(self) -> bool:
        return self._regroup_due

    def regroup(self) -> None:
        if self._regroup_due:
            self.close()
            self._next_generation()
            self._check_replaced()

    def check_for_call(self) -> None:
        if self._client.is_left_behind(self.generation):
            self.close()
            self._next_generation()
            raise self._begin_round()

    def alive(self) -> None:
        if time.monotonic() - self._said_alive > ALIVE_EVERY_S:
            self._said_alive = time.monotonic()
            self._send({"type": "alive"})

    def interrupt(self) -> None:
        if group := self._group:
            group.interrupt()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        with super().waiting(), self.wait.of(self.generation):
            yield

    def close(self) -> None:
        """Leave the group, as before a next generation."""
        if self._group:
            self._group.close()
        self._group = None

    def _in_group(self, act: Callable[[Comm], T], flat: Tensor) -> T:
        if self._client.is_superseded(self.generation):
            raise PeerLost(f"generation {self.generation} is over")
        if flat.nbytes >= LARGE_BYTES and not self._said_exchange:
            self._said_exchange = True
            self._send({"type": "exchange"})
        waits = nullcontext() if in_background() else self.wait.of(self.generation)
        group = self._group
        assert group is not None  # of a generation that goes on
        sent = group.bytes_sent
        try:
            with self._counted(), waits:
                return act(group)
        finally:
            self.bytes_sent += group.bytes_sent - sent

    def _next_generation(self) -> None:
        """Wait for the next one and come to one state with it; again, if it ends before all of it have."""
        assert self._member is not None  # `join` comes first
        self.wait.begins(self.generation)
        while True:
            with self._counted():
                generation = self._client.next_generation(after=self.generation)
            self._become(generation)
            try:
                self._group = self._form(generation)
                self._digest, was_replaced = self._member.sync_state()
                self._was_replaced = self._was_replaced or was_replaced
                if self._should_commit(STATE_SYNC, {}):
                    self._member.has_synced()
                    if not self._regroup_due:
                        return
                    self.close()  # somebody came only to hand over its state
                    continue
                raise PeerLost(f"generation {self.generation} is over")
            except PeerLost as error:
                self._give_up(error)

    def _form(self, generation: Generation) -> Comm:
        """Form the group. Raises PeerLost. A thread that joins in vain is left behind: gloo cannot be interrupted."""
        self.wait.begins(generation.number)

        def superseded() -> bool:
            return self._client.is_superseded(generation.number)

        def connect(rank: int) -> None:
            try:
                outcome.put(self._connect(generation, rank, superseded))
            except BaseException as error:
                outcome.put(error)

        outcome: queue.SimpleQueue[Comm | BaseException] = queue.SimpleQueue()
        threading.Thread(target=connect, args=[self.rank], daemon=True).start()
        while not superseded():
            try:
                formed = outcome.get(timeout=POLL)
            except queue.Empty:
                continue
            if isinstance(formed, BaseException):
                raise formed
            return formed
        raise PeerLost(f"generation {generation.number} is over")

    def _should_commit(self, kind: str, about: dict[str, Any]) -> bool:
        """Vote, and wait until all have voted; False if this generation is over before that."""
        if self._voted_ahead != (self.generation, self._vote):
            self._send_vote(kind, about)
        with self._counted():
            self.wait.begins(self.generation)
            regroup = self._client.wait_for_commit(self.generation, self._vote)
            if regroup is None:
                return False
            self.wait.ends()
        self._regroup_due = regroup
        self._vote += 1
        return True

    def _send_vote(self, kind: str, about: dict[str, Any]) -> None:
        vote = {"generation": self.generation, "vote": self._vote, "what": kind, "digest": self._digest}
        self._send({"type": "vote", **vote, **about})
        self._said_exchange = False

    def _begin_round(self) -> Rejoined:
        self._was_replaced = False  # said once: a later generation may well continue this round
        return Rejoined(f"generation {self.generation} begins a round")

    def _check_replaced(self) -> None:
        if self._was_replaced:
            self._was_replaced = False
            raise Rejoined(f"{self.name} had fallen behind")

    def _give_up(self, error: PeerLost) -> None:
        if not self._client.is_superseded(self.generation):
            about = {"message": str(error), "stranger": isinstance(error, Stranger)}
            self._send({"type": "trouble", "generation": self.generation, **about})
        self.close()
