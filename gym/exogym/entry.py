"""How ranks that meet come to one state: compare what each has, and give the newest to those who lack it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from exogym.checkpoint import from_tree, to_tree
from exogym.communication import Comm
from exogym.errors import CheckpointError, PeerLost, RanksDiverged

MOST = 16  # checkpoints that a rank can offer to the others
NONE, DAMAGED = -1, -2  # in place of one
PIECE = 64 * 1024 * 1024  # bytes sent at once
_SENT = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int32, torch.int64),
)
DTYPES = {str(dtype): dtype for dtype in _SENT}
NOT_BEGUN = -1


class Entrant(Protocol):
    """What one rank brings."""

    def marks(self) -> list[int]:
        """Numbers that must be the same on all ranks: hashes of the model's layout, of what is frozen, of the data."""

    def agreements(self) -> int:
        """How often it has agreed with others; NOT_BEGUN if its process has just started."""

    def digest(self) -> int:
        """Hash of the weights that it last agreed on."""

    def offers(self) -> list[int]:
        """Numbers of the checkpoints that it could begin from; [DAMAGED] if it has some and none is good."""

    def load(self, number: int, *, exactly: bool) -> bool:
        """Begin from a checkpoint. exactly: all ranks do, so also what is this rank's own, and inside a round.

        False if the checkpoint has nothing of its own.
        """

    def agreed_state(self) -> dict[str, Any]: ...

    def load_agreed_state(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Entered:
    """received: this rank was given the state of the others. checkpoint: the one that the group begins from, if any.

    exactly: this rank goes on as if nothing had happened, its inner optimizer included.
    """

    received: bool = False
    checkpoint: int | None = None
    exactly: bool = False


MARKS = (
    "the layout of what is trained: all must build the same model and freeze the same parts",
    "frozen weights: other base models?",
    "the data, the number of steps or what decides about batches",
)


def enter(comm: Comm, rank: Entrant) -> Entered:
    """Every rank of a new group calls this. Raises PeerLost, RanksDiverged, CheckpointError."""
    offers = sorted(rank.offers())[-MOST:]
    mine = [*rank.marks(), rank.agreements(), rank.digest(), *offers, *[NONE] * (MOST - len(offers))]
    all_ranks = [theirs.tolist() for theirs in comm.all_gather(torch.tensor(mine))]
    count = len(MARKS)
    for name, values in zip(comm.members, all_ranks, strict=True):
        for what, ours, theirs in zip(MARKS, mine, values[:count], strict=False):
            if ours != theirs:
                raise RanksDiverged(f"{name} and {comm.members[comm.rank]} do not share {what}")
    progress = [values[count] for values in all_ranks]
    digests = [values[count + 1] for values in all_ranks]
    offered = [set(values[count + 2 :]) - {NONE} for values in all_ranks]
    if max(progress) == NOT_BEGUN or max(set.union(*offered), default=NONE) // 2 > max(progress):
        return _begin(comm, rank, digests, offered)
    ahead = [n for n, reached in enumerate(progress) if reached == max(progress)]
    for n in ahead:
        if digests[n] != digests[ahead[0]]:
            raise RanksDiverged(f"the weights of {comm.members[n]} are not those of {comm.members[ahead[0]]}")
    return Entered(received=_hand_over(comm, rank, ahead[0], [n for n in range(comm.world_size) if n not in ahead]))


def _begin(comm: Comm, rank: Entrant, digests: list[int], offers: list[set[int]]) -> Entered:
    """Nobody remembers anything as new as a checkpoint: from these if there are any, else from rank 0's weights."""
    damaged = [name for name, numbers in zip(comm.members, offers, strict=True) if DAMAGED in numbers]
    offers = [numbers - {DAMAGED} for numbers in offers]
    if damaged and not any(offers):
        raise CheckpointError(f"all checkpoints are damaged: {', '.join(damaged)}")
    if not any(offers):
        others = [n for n, digest in enumerate(digests) if digest != digests[0]]
        return Entered(received=_hand_over(comm, rank, 0, others))
    newest = max(set.union(*offers))
    common = max(set.intersection(*offers), default=NONE)
    # Two numbers are an agreement. For the inner moments alone no more than one is given up.
    if common != NONE and newest // 2 - common // 2 <= 1:
        return Entered(checkpoint=common, exactly=rank.load(common, exactly=True))
    holders = [n for n, numbers in enumerate(offers) if newest in numbers]
    if comm.rank in holders:
        rank.load(newest, exactly=False)
    others = [n for n in range(comm.world_size) if n not in holders]
    return Entered(received=_hand_over(comm, rank, holders[0], others), checkpoint=newest)


def _hand_over(comm: Comm, rank: Entrant, source: int, receivers: list[int]) -> bool:
    """The agreed state of rank `source` to the others that need it. True on those."""
    if comm.rank in receivers:
        rank.load_agreed_state(receive_state(comm, source))
        return True
    if comm.rank == source:
        for receiver in receivers:
            send_state(comm, rank.agreed_state(), receiver)
    return False


def send_state(comm: Comm, state: dict[str, Any], to: int) -> None:
    """`state` as for Checkpoints.save. Nothing on the way is pickled."""
    tensors: dict[str, torch.Tensor] = {}
    tree = to_tree(state, tensors)
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
    """Raises PeerLost if what arrives is not what was sent; sizes are checked before memory is taken."""
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
