"""A communicator whose ranks may come and go: one generation after another, as a Roster decides."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from exogym.comm.comm import Comm
from exogym.comm.process_group import POLL
from exogym.errors import PeerLost, Rejoined
from exogym.membership.client import Mailbox
from exogym.membership.messages import ENTER, ROUND, Generation
from exogym.membership.waiting import Wait

T = TypeVar("T")
ALIVE_EVERY_S = 5.0
LARGE_BYTES = 64 << 10  # of a tensor that may fill a slow link for long enough to hold up signs of life


class ElasticComm(Comm):
    """Rank `name` among those of `hosts` who are there: `members`, in rank order.

    connect(generation, rank, interrupted) forms the group of one generation; it may take long, and runs in a thread.
    send(message) reaches the roster, and what the roster says arrives in `mailbox`. `wait` tells other threads for how
    long this rank has been waiting.
    Collectives raise PeerLost as soon as their generation is over. Only `enter`, `together` and `regroup` go on to the
    next; they raise Rejoined if this rank had fallen behind.
    """

    def __init__(
        self,
        name: str,
        hosts: Sequence[str],
        mailbox: Mailbox,
        send: Callable[[dict[str, Any]], None],
        connect: Callable[[Generation, int, Callable[[], bool]], Comm],
    ):
        super().__init__()
        self.name, self.wait = name, Wait()
        self._mailbox, self._send, self._connect = mailbox, send, connect
        self._group: Comm | None = None
        self._generation = Generation(0, tuple(hosts), "", False)  # as it will be if all of them come
        self._vote = 0
        self._digest: int | None = None
        self._regroup_due = False
        self._rejoined = False
        self._said_alive = 0.0
        self._said_exchange = False  # since the last vote
        self._enter: Callable[[], int] = lambda: 0

    @property
    def rank(self) -> int:
        return self.members.index(self.name)

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def members(self) -> tuple[str, ...]:
        return self._generation.members

    @property
    def amid_round(self) -> bool:
        return self._generation.amid_round

    @property
    def generation(self) -> int:
        return self._generation.number

    def all_reduce_(self, flat: Tensor) -> None:
        self._in_group(lambda group: group.all_reduce_(flat), flat)

    def broadcast_(self, flat: Tensor, src: int = 0) -> None:
        self._in_group(lambda group: group.broadcast_(flat, src), flat, sends=src == self.rank)

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        return self._in_group(lambda group: group.all_gather(flat), flat)

    def send(self, flat: Tensor, dst: int) -> None:
        self._in_group(lambda group: group.send(flat, dst), flat)

    def recv(self, flat: Tensor, src: int) -> None:
        self._in_group(lambda group: group.recv(flat, src), flat, sends=False)

    def barrier(self) -> None:
        self._in_group(lambda group: group.barrier())

    def enter(self, enter: Callable[[], int]) -> None:
        self._enter = enter
        self._next_generation()
        self._rejoined = False

    def together(self, what: str, work: Callable[[], T], about: Callable[[T], dict[str, Any]] = lambda _: {}) -> T:
        while True:
            try:
                result = work()
                self._regroup_due = self._decide(what, about(result))
                self.on_commit(what)
                return result
            except PeerLost as error:
                self._give_up(error)
                self._next_generation()
                if not self.amid_round:
                    raise self._begin_round() from None
                self._go_on()

    def compare(self, digest: int, where: str) -> None:
        """The roster compares: it goes with the next vote."""
        self._digest = digest

    def regroup(self) -> None:
        if self._regroup_due:
            self._leave()
            self._next_generation()
            self._go_on()

    def look_up(self) -> None:
        if self._mailbox.is_called_anew(self.generation):
            self._leave()
            self._next_generation()
            raise self._begin_round()

    def alive(self) -> None:
        if time.monotonic() - self._said_alive > ALIVE_EVERY_S:
            self._said_alive = time.monotonic()
            self._send({"type": "alive"})

    def close(self) -> None:
        self._leave()

    def _in_group(self, act: Callable[[Comm], T], flat: Tensor | None = None, *, sends: bool = True) -> T:
        if self._mailbox.superseded(self.generation):
            raise PeerLost(f"generation {self.generation} is over")
        if flat is not None and flat.nbytes >= LARGE_BYTES and not self._said_exchange:
            self._said_exchange = True
            self._send({"type": "exchange"})
        with self._counted(*([flat] if flat is not None and sends else [])), self.wait.of(self.generation):
            return act(self._group)

    def _next_generation(self) -> None:
        """Wait until this rank is called, and enter; again, if that generation ends before all of it have entered."""
        self.wait.begins(self.generation)
        while True:
            with self._counted():
                generation = self._mailbox.next_generation(after=self.generation)
            self._generation, self._vote, self._regroup_due = generation, 0, False
            self._said_exchange = False
            try:
                self._group = self._form(generation)
                self._digest = self._enter()
                self._decide(ENTER, {})
                self.on_commit(ENTER)
                return
            except PeerLost as error:
                self._give_up(error)

    def _form(self, generation: Generation) -> Comm:
        """Raises PeerLost. A thread that joins in vain is left behind: gloo cannot be interrupted there."""
        self.wait.begins(generation.number)

        def superseded() -> bool:
            return self._mailbox.superseded(generation.number)

        def connect() -> None:
            try:
                outcome.put(self._connect(generation, self.rank, superseded))
            except BaseException as error:
                outcome.put(error)

        outcome: queue.SimpleQueue[Comm | BaseException] = queue.SimpleQueue()
        threading.Thread(target=connect, daemon=True).start()
        while not superseded():
            try:
                formed = outcome.get(timeout=POLL)
            except queue.Empty:
                continue
            if isinstance(formed, BaseException):
                raise formed
            return formed
        raise PeerLost(f"generation {generation.number} is over")

    def _decide(self, what: str, vote: dict[str, Any]) -> bool:
        """Vote, and hear whether all have. True if members are to regroup now. Raises PeerLost."""
        about = {"generation": self.generation, "vote": self._vote, "what": what, "digest": self._digest}
        work = {"samples": self.trained, "position": self.position} if what == ROUND else {}
        self._send({"type": "vote", **about, **work, **vote})
        self._said_exchange = False
        with self._counted(), self.wait.of(self.generation):
            regroup = self._mailbox.wait_for_commit(self.generation, self._vote)
            if regroup is None:
                raise PeerLost(f"generation {self.generation} is over")
        self._vote += 1
        return regroup

    def rejoined(self) -> None:
        """To be called by `enter` once it has replaced this rank's state by that of the others."""
        self._rejoined = True

    def _begin_round(self) -> Rejoined:
        self._rejoined = False  # said once: a later generation may well go on amid this round
        return Rejoined(f"generation {self.generation} begins a round")

    def _go_on(self) -> None:
        if self._rejoined:
            self._rejoined = False
            raise Rejoined(f"{self.name} had fallen behind")

    def _give_up(self, error: PeerLost) -> None:
        if not self._mailbox.superseded(self.generation):
            self._send({"type": "trouble", "generation": self.generation, "message": str(error)})
        self._leave()

    def _leave(self) -> None:
        if self._group:
            self._group.close()
        self._group = None
