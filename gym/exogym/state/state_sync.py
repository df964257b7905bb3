"""How ranks that meet come to one state: compare what each has, and give the newest to those who lack it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from exogym.comm.comm import Comm
from exogym.errors import CheckpointError, PeerLost, RanksDiverged, SettingError
from exogym.flat import digest
from exogym.membership import DRIFT_CHECK
from exogym.state.checkpoint import from_tree, to_tree
from exogym.state.node_state import NodeState
from exogym.state.position import NOT_BEGUN, Offer, Version
from exogym.state.saved_states import SavedStates

MOST = 16  # checkpoints that a rank can offer to the others
NONE = -1  # in place of one
FIRST_TERM = 1
PIECE = 64 * 1024 * 1024  # bytes sent at once
_SENT = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
DTYPES = {str(dtype): dtype for dtype in _SENT}


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
    """The report of one rank to the others."""

    fixed_fingerprints: list[int]
    version: Version
    fingerprint: int
    is_damaged: bool
    offers: list[Offer]

    SIZE = len(MUST_MATCH) + 4 + 4 * MOST

    @classmethod
    def of(cls, state: NodeState, saved: SavedStates, *, fingerprint: bool) -> _Report:
        offers = sorted(saved.offers())[-MOST:]
        value = state.fingerprint() if fingerprint else 0
        return cls(state.fixed_fingerprints(), state.version(), value, saved.is_damaged(), offers)

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


def sync_state(comm: Comm, state: NodeState, saved: SavedStates) -> Synced:
    """Bring all ranks of a new group to one state; each calls this. Raises PeerLost, RanksDiverged, CheckpointError."""
    mine = _Report.of(state, saved, fingerprint=comm.world_size > 1 and not comm.continues_round)
    reports = [_Report.read(numbers.tolist()) for numbers in comm.all_gather(torch.tensor(mine.numbers()))]
    _check_fixed(comm, reports)
    newest = max(report.version for report in reports)
    offered = max((offer.version for report in reports for offer in report.offers), default=NOT_BEGUN)
    if offered > newest:
        return _begin_from_checkpoints(comm, state, saved, reports, offered)
    damaged = [name for name, report in zip(comm.members, reports, strict=True) if report.is_damaged]
    if newest == NOT_BEGUN and damaged:
        raise CheckpointError(f"all checkpoints are damaged: {', '.join(damaged)}")
    # At the beginning nobody has a version yet, and rank 0's weights are everybody's.
    states = [(report.version, report.fingerprint) for report in reports]
    source = next(n for n, report in enumerate(reports) if report.version == newest)
    others = [n for n, other in enumerate(states) if other != states[source]]
    received = _hand_over(comm, state, source, others)
    return Synced(received=received, term=max(newest.term, FIRST_TERM), fingerprint=reports[source].fingerprint)


def _check_fixed(comm: Comm, reports: list[_Report]) -> None:
    mine = reports[comm.rank].fixed_fingerprints
    for name, report in zip(comm.members, reports, strict=True):
        for what, ours, theirs in zip(MUST_MATCH, mine, report.fixed_fingerprints, strict=True):
            if ours != theirs:
                raise RanksDiverged(f"{name} and {comm.members[comm.rank]} do not share {what}")


def _begin_from_checkpoints(
    comm: Comm, state: NodeState, saved: SavedStates, reports: list[_Report], newest: Version
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
            exactly = saved.load(chosen[comm.rank], exactly=True, inside=inside)
            return Synced(
                term=term, fingerprint=chosen[0].fingerprint, checkpoint=chosen[0].number // 2, exactly=exactly
            )
    own = [max((o for o in report.offers if o.state == best.state), default=None) for report in reports]
    others = [n for n, offer in enumerate(own) if offer is None]
    if own[comm.rank]:
        saved.load(own[comm.rank], exactly=False, inside=False)
    source = next(n for n, offer in enumerate(own) if offer)
    received = _hand_over(comm, state, source, others)
    return Synced(received=received, checkpoint=best.number // 2, term=term, fingerprint=best.fingerprint)


def _hand_over(comm: Comm, state: NodeState, source: int, receivers: list[int]) -> bool:
    """Give the agreed state of rank `source` to the others that need it. True on those."""
    if comm.rank in receivers:
        state.load_agreed_state(receive_state(comm, source))
        return True
    if comm.rank == source:
        for receiver in receivers:
            send_state(comm, state.agreed_state(), receiver)
    return False


def remove_drift(comm: Comm, state: NodeState) -> float | None:
    """Take on the same weights on all ranks, right after an agreement.

    They are rank 0's where weights differ by rounding, the mean where the strategy lets them differ. Returns how
    far apart this rank's were, None if all are equal.
    """
    own = state.strategy.agreed_weights()
    taken = common_weights(comm, state, own)
    if taken is None:
        return None
    apart = (taken - own).abs().max().item()
    state.take_weights(taken)
    return apart


def common_weights(comm: Comm, state: NodeState, own: torch.Tensor) -> torch.Tensor | None:
    """Return the weights [numel] that ranks with weights `own` should have in common; None if all are equal."""
    if comm.world_size == 1:
        return None
    return comm.commit_together(DRIFT_CHECK, lambda: _compared(comm, state, own))


def _compared(comm: Comm, state: NodeState, own: torch.Tensor) -> torch.Tensor | None:
    digests = [int(value) for value in comm.all_gather(torch.tensor([digest(own)]))]
    if all(value == digests[0] for value in digests):
        return None
    if state.strategy.differs:
        return state.strategy.consensus()
    taken = own.clone()
    comm.broadcast_(taken)
    return taken


def send_state(comm: Comm, state: dict[str, Any], to: int) -> None:
    """Send a `state` as for Checkpoints.save. Nothing on the way is pickled."""
    tensors: dict[str, torch.Tensor] = {}
    tree = to_tree(state, tensors)
    if unknown := {str(tensor.dtype) for tensor in tensors.values()} - {*DTYPES}:
        raise SettingError(f"an optimizer's state of {', '.join(sorted(unknown))} cannot be sent to another rank")
    listing = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
    flats = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    record = {"state": tree, "tensors": listing, "hash": _hash([_text(tree), *flats])}
    text = _text(record)
    comm.send(torch.tensor([text.numel(), sum(flat.numel() for flat in flats)]), to)
    for flat in (text, *flats):
        for piece in _pieces(flat):
            comm.send(piece.contiguous(), to)
            comm.alive()


def receive_state(comm: Comm, source: int) -> dict[str, Any]:
    """Receive a state. Raises PeerLost if what arrives is not what was sent; checks sizes before it takes memory."""
    sizes = torch.zeros(2, dtype=torch.int64)
    comm.recv(sizes, source)
    text_size, total = sizes.tolist()
    if not (0 < text_size < PIECE and 0 <= total < 2**40):
        raise PeerLost(f"rank {source} sent a state of an impossible size ({text_size} and {total} bytes)")
    try:
        record = json.loads(bytes(_receive(comm, source, text_size).numpy()))
        tensors, flats = {}, []
        for name, dtype, shape in record["tensors"]:
            count = torch.Size(shape).numel() * DTYPES[dtype].itemsize
            if count > total - sum(flat.numel() for flat in flats):
                raise ValueError("larger than announced")
            flats.append(_receive(comm, source, count))
            tensors[name] = flats[-1].view(DTYPES[dtype]).reshape(shape)
        if _hash([_text(record["state"]), *flats]) != record["hash"]:
            raise ValueError("another hash")
        return from_tree(record["state"], tensors)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise PeerLost(f"the state that rank {source} sent arrived damaged: {error}") from error


def _receive(comm: Comm, source: int, count: int) -> torch.Tensor:
    flat = torch.empty(count, dtype=torch.uint8)
    for piece in _pieces(flat):
        comm.recv(piece, source)
        comm.alive()
    return flat


def _pieces(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return flat.split(PIECE) if flat.numel() else ()


def _text(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _hash(flats: list[torch.Tensor]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for flat in flats:
        hasher.update(memoryview(flat.contiguous().numpy()))
    return hasher.hexdigest()
