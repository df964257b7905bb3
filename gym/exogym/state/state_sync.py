"""How ranks that meet come to one state: compare what each has, and give the newest to those who lack it.

A *version* orders the states of a run: (term, count). `count` grows with every change that ranks make together; `term`
with every time that they begin from a checkpoint. So what was done after going back to a checkpoint is newer than what
had been done before, although it may count less; and two states of one version have the same fingerprint, except where
machines round differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from exogym.comm.comm import Comm
from exogym.errors import CheckpointError, RanksDiverged
from exogym.state.transfer import receive_state, send_state

MOST = 16  # checkpoints that a rank can offer to the others
NONE = -1  # in place of one


class Version(NamedTuple):
    term: int
    count: int


NOT_BEGUN = Version(-1, -1)


class Offer(NamedTuple):
    """A checkpoint that a rank could begin from. number: twice its agreements, plus 1 if it lies inside a round."""

    version: Version
    fingerprint: int
    number: int

    @property
    def state(self) -> tuple[Version, int]:
        """What ranks must share to go on from it together."""
        return self.version, self.fingerprint


class Replica(Protocol):
    """The state in one rank's memory."""

    def fixed_fingerprints(self) -> list[int]:
        """Numbers that must be the same on all ranks: hashes of the model's layout, of what is frozen, of the data."""

    def version(self) -> Version:
        """NOT_BEGUN if its process has just started."""

    def fingerprint(self) -> int: ...

    def agreed_state(self) -> dict[str, Any]: ...

    def load_agreed_state(self, state: dict[str, Any]) -> None: ...


class Offers(Protocol):
    """The checkpoints on one rank's disk, for a rank that may begin from them."""

    def offers(self) -> list[Offer]: ...

    def is_damaged(self) -> bool:
        """There are checkpoints, and none is good."""

    def load(self, offer: Offer, *, exactly: bool, inside: bool) -> bool:
        """Begin from it. exactly: all ranks begin from the same one; inside: some of them inside a round.

        False if it has nothing of this rank's own.
        """


@dataclass(frozen=True, kw_only=True)
class Synced:
    """received: this rank was given the state of the others. checkpoint: agreements of the one that they begin from.

    exactly: this rank goes on as if nothing had happened, its inner optimizer included. term: of what comes now.
    fingerprint: of the state that all have now; 0 if it was not asked for.
    """

    term: int
    fingerprint: int
    received: bool = False
    checkpoint: int | None = None
    exactly: bool = False


MUST_MATCH = (
    "the layout of what is trained: all must build the same model and freeze the same parts",
    "the weights that stay as they are: the hosts have other base models",
    "the data, the number of steps or what decides about batches",
)


@dataclass(frozen=True)
class _Report:
    """What one rank tells the others."""

    fixed_fingerprints: list[int]
    version: Version
    fingerprint: int
    is_damaged: bool
    offers: list[Offer]

    SIZE = len(MUST_MATCH) + 4 + 4 * MOST

    @classmethod
    def of(cls, replica: Replica, disk: Offers, *, fingerprint: bool) -> _Report:
        offers = sorted(disk.offers())[-MOST:]
        value = replica.fingerprint() if fingerprint else 0
        return cls(replica.fixed_fingerprints(), replica.version(), value, disk.is_damaged(), offers)

    def numbers(self) -> list[int]:
        offers = [number for offer in self.offers for number in (*offer.version, offer.fingerprint, offer.number)]
        head = [*self.fixed_fingerprints, *self.version, self.fingerprint, int(self.is_damaged)]
        return [*head, *offers, *[NONE] * (self.SIZE - len(head) - len(offers))]

    @classmethod
    def read(cls, numbers: list[int]) -> _Report:
        count = len(MUST_MATCH)
        term, changes, fingerprint, is_damaged, *rest = numbers[count:]
        quads = [rest[at : at + 4] for at in range(0, len(rest), 4)]
        offers = [Offer(Version(a, b), value, number) for a, b, value, number in quads if number != NONE]
        return cls(numbers[:count], Version(term, changes), fingerprint, bool(is_damaged), offers)


def sync_state(comm: Comm, replica: Replica, disk: Offers) -> Synced:
    """Every rank of a new group calls this. Raises PeerLost, RanksDiverged, CheckpointError."""
    mine = _Report.of(replica, disk, fingerprint=comm.world_size > 1 and not comm.continues_round)
    reports = [_Report.read(numbers.tolist()) for numbers in comm.all_gather(torch.tensor(mine.numbers()))]
    _check_fixed(comm, reports)
    newest = max(report.version for report in reports)
    offered = max((offer.version for report in reports for offer in report.offers), default=NOT_BEGUN)
    if newest == offered == NOT_BEGUN:
        return _begin(comm, replica, reports)
    if offered > newest:
        return _begin_from_checkpoints(comm, replica, disk, reports, offered)
    states = [(report.version, report.fingerprint) for report in reports]
    source = next(n for n, report in enumerate(reports) if report.version == newest)
    others = [n for n, state in enumerate(states) if state != states[source]]
    received = _hand_over(comm, replica, source, others)
    return Synced(received=received, term=newest.term, fingerprint=reports[source].fingerprint)


def _check_fixed(comm: Comm, reports: list[_Report]) -> None:
    mine = reports[comm.rank].fixed_fingerprints
    for name, report in zip(comm.members, reports, strict=True):
        for what, ours, theirs in zip(MUST_MATCH, mine, report.fixed_fingerprints, strict=True):
            if ours != theirs:
                raise RanksDiverged(f"{name} and {comm.members[comm.rank]} do not share {what}")


def _begin(comm: Comm, replica: Replica, reports: list[_Report]) -> Synced:
    """From rank 0's weights."""
    if damaged := [name for name, report in zip(comm.members, reports, strict=True) if report.is_damaged]:
        raise CheckpointError(f"all checkpoints are damaged: {', '.join(damaged)}")
    others = [n for n, report in enumerate(reports) if report.fingerprint != reports[0].fingerprint]
    return Synced(received=_hand_over(comm, replica, 0, others), term=1, fingerprint=reports[0].fingerprint)


def _begin_from_checkpoints(
    comm: Comm, replica: Replica, disk: Offers, reports: list[_Report], newest: Version
) -> Synced:
    """Nobody remembers anything as new as these."""
    term = max(version.term for r in reports for version in (r.version, *(o.version for o in r.offers))) + 1
    best = next(o for report in reports for o in reversed(report.offers) if o.version == newest)
    common = set.intersection(*({offer.state for offer in report.offers} for report in reports))
    if common:
        chosen = [max(o for o in report.offers if o.state == max(common)) for report in reports]
        # For what is each rank's own no more than one agreement is given up.
        if best.number // 2 - chosen[0].number // 2 <= 1:
            inside = any(offer.number % 2 for offer in chosen)
            exactly = disk.load(chosen[comm.rank], exactly=True, inside=inside)
            about = {"term": term, "fingerprint": chosen[0].fingerprint}
            return Synced(checkpoint=chosen[0].number // 2, exactly=exactly, **about)
    own = [max((o for o in report.offers if o.state == best.state), default=None) for report in reports]
    others = [n for n, offer in enumerate(own) if offer is None]
    if own[comm.rank]:
        disk.load(own[comm.rank], exactly=False, inside=False)
    source = next(n for n, offer in enumerate(own) if offer)
    received = _hand_over(comm, replica, source, others)
    return Synced(received=received, checkpoint=best.number // 2, term=term, fingerprint=best.fingerprint)


def _hand_over(comm: Comm, replica: Replica, source: int, receivers: list[int]) -> bool:
    """The agreed state of rank `source` to the others that need it. True on those."""
    if comm.rank in receivers:
        replica.load_agreed_state(receive_state(comm, source))
        return True
    if comm.rank == source:
        for receiver in receivers:
            send_state(comm, replica.agreed_state(), receiver)
    return False
