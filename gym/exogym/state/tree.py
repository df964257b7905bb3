"""A state as JSON beside named tensors: its hash, and its way from one rank to another."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from exogym.comm.comm import Comm
from exogym.errors import CheckpointError, PeerLost, SettingError

PIECE = 64 * 1024 * 1024  # bytes sent at once
_SENT = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
DTYPES = {str(dtype): dtype for dtype in _SENT}


def to_tree(value: Any, tensors: dict[str, torch.Tensor], *, copy: bool = False) -> Any:
    """JSON that mirrors `value`, its tensors replaced by names and put into `tensors`: on the CPU, and copied if asked.

    From another device each is copied once, in either case.
    """
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=copy).contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        pairs = value.items()
        return {"dict": [[to_tree(key, tensors, copy=copy), to_tree(item, tensors, copy=copy)] for key, item in pairs]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [to_tree(item, tensors, copy=copy) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(f"a {type(value).__name__} cannot be part of a checkpoint")


def from_tree(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    [(kind, content)] = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {from_tree(key, tensors): from_tree(item, tensors) for key, item in content}
    items = [from_tree(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


def fingerprint(state: Any) -> int:
    """64 bits of the hash of a state, as a signed number; the same for states that are equal to the bit."""
    tensors: dict[str, torch.Tensor] = {}
    hasher = hashlib.blake2b(json.dumps(_sorted(to_tree(state, tensors))).encode(), digest_size=8)
    for tensor in tensors.values():
        hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
    return int.from_bytes(hasher.digest(), "big", signed=True)


def _sorted(tree: Any) -> Any:
    """Dicts that are equal may have their keys in another order."""
    if not isinstance(tree, dict):
        return tree
    [(kind, content)] = tree.items()
    if kind == "tensor":
        return tree
    if kind == "dict":
        return {kind: sorted(([_sorted(key), _sorted(item)] for key, item in content), key=lambda pair: repr(pair[0]))}
    return {kind: [_sorted(item) for item in content]}


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
