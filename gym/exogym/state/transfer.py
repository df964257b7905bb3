"""A state on its way from one rank to another."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from exogym.comm.comm import Comm
from exogym.errors import PeerLost, SettingError
from exogym.state.tree import from_tree, to_tree

PIECE = 64 * 1024 * 1024  # bytes sent at once
_SENT = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int32, torch.int64),
)
DTYPES = {str(dtype): dtype for dtype in _SENT}


def send_state(comm: Comm, state: dict[str, Any], to: int) -> None:
    """`state` as for Checkpoints.save. Nothing on the way is pickled."""
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
