"""Collectives on tensors of any shape, dtype and device: for strategies of your own, and for any script.

They run on the communicator that was set with `use` in this thread, as in a strategy; else on the default group of
torch.distributed, if there is one; else this process is a group of one. All ranks must make the same calls in the same
order, with tensors of the same shape and dtype. What is not on the CPU travels through a copy there (with nccl, through
one on the GPU). An array of numpy is taken as a tensor. Errors: SettingError for arguments, PeerLost for a rank.

    from exogym.strategy import communicate

    communicate.all_reduce(gradient, op="mean")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce as fold
from typing import Any

import torch
from torch import Tensor

from exogym.comm.comm import Comm, SingleComm, comm_in_use, exchange
from exogym.comm.comm import use as use
from exogym.comm.process_group import default_group
from exogym.config import one_of
from exogym.errors import SettingError

OPS = ("sum", "mean", "max", "min", "product")
OTHER_NAMES = {"average": "mean", "avg": "mean", "prod": "product"}  # torch's, as ReduceOp has them, and upstream's
BETWEEN_TWO = {"max": torch.maximum, "min": torch.minimum, "product": torch.mul}  # the rest are added up
SUMMED = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int32, torch.int64, torch.int8, torch.uint8),
)
MAXED = (*SUMMED, torch.int16, torch.bool)


def current() -> Comm:
    """The communicator on which the collectives of this thread run."""
    return comm_in_use() or default_group() or SingleComm()


def all_reduce(tensor: Tensor, op: Any = "sum") -> Tensor:
    """Replace `tensor` on every rank by one of OPS over ranks, with the same bits on all; `op` may be a ReduceOp."""
    comm, tensor = current(), torch.as_tensor(tensor)
    op = _checked_op(op, tensor)
    with _flat(tensor, comm) as flat:
        flat.copy_(_reduced(comm, flat, op))
    return tensor


def all_gather(tensor: Tensor | list[Tensor], own: Tensor | None = None) -> list[Tensor]:
    """The ranks' tensors in rank order, on the device of `tensor`; also as torch's, with a list to write into first."""
    if isinstance(tensor, list):
        if own is None:
            raise SettingError("all_gather: after a list to write into comes this rank's own tensor")
        return [place.copy_(found) for place, found in zip(tensor, all_gather(own), strict=True)]
    comm, tensor = current(), torch.as_tensor(tensor)
    return [_back(flat, tensor) for flat in comm.all_gather(_bytes(_copy(tensor, comm)))]


def broadcast(tensor: Tensor, src: int = 0) -> Tensor:
    """Replace `tensor` on every rank by that of rank `src`."""
    comm, tensor = current(), torch.as_tensor(tensor)
    _check_rank("src", src, comm)
    with _flat(tensor, comm) as flat:
        comm.broadcast_(_bytes(flat), src)
    return tensor


def reduce(tensor: Tensor, dst: int = 0, op: Any = "sum") -> Tensor:
    """Replace `tensor` on rank `dst` by one of OPS over ranks; the others keep theirs."""
    comm, tensor = current(), torch.as_tensor(tensor)
    op = _checked_op(op, tensor)
    _check_rank("dst", dst, comm)
    reduced = _reduced(comm, _copy(tensor, comm), op)
    if comm.rank == dst:
        with torch.no_grad():
            tensor.copy_(reduced.view(tensor.shape))
    return tensor


def scatter(tensor: Tensor, parts: Sequence[Tensor] | None = None, src: int = 0) -> Tensor:
    """Replace `tensor` on each rank by its own of the `parts` that rank `src` has; the others pass none."""
    comm, tensor = current(), torch.as_tensor(tensor)
    _check_rank("src", src, comm)
    if comm.rank != src and parts is not None:
        raise SettingError(f"scatter: only rank {src}, which is src, has parts; this is rank {comm.rank}")
    checked = _checked_parts("scatter", tensor, parts, comm) if comm.rank == src else []
    with _flat(tensor, comm) as flat:
        if comm.rank == src:
            for dst in _others(comm):
                comm.send(_bytes(_copy(checked[dst], comm)), dst)
            flat.copy_(_copy(checked[src], comm))
        else:
            comm.recv(_bytes(flat), src)
    return tensor


def gather(tensor: Tensor, dst: int = 0) -> list[Tensor] | None:
    """The ranks' tensors in rank order on rank `dst`; None on the others."""
    comm, tensor = current(), torch.as_tensor(tensor)
    _check_rank("dst", dst, comm)
    own = _copy(tensor, comm)
    if comm.rank != dst:
        comm.send(_bytes(own), dst)
        return None
    flats = [own if rank == dst else torch.empty_like(own) for rank in range(comm.world_size)]
    for rank in _others(comm):
        comm.recv(_bytes(flats[rank]), rank)
    return [_back(flat, tensor) for flat in flats]


def reduce_scatter(tensor: Tensor, parts: Sequence[Tensor] | None = None, op: Any = "sum") -> Tensor:
    """Replace `tensor` on each rank by one of OPS over the ranks' `parts` for it: `parts[rank]`.

    Without `parts` these are equal parts of `tensor`, which stays: the result is a new tensor.
    """
    comm, tensor = current(), torch.as_tensor(tensor)
    op = _checked_op(op, tensor)
    if parts is None:
        if len(tensor) % comm.world_size:
            raise SettingError(f"reduce_scatter: {len(tensor)} rows are not {comm.world_size} equal parts: give parts")
        parts = tensor.chunk(comm.world_size)
        tensor = torch.empty_like(parts[0])
    checked = _checked_parts("reduce_scatter", tensor, parts, comm)
    received = exchange(comm, [_bytes(_copy(part, comm)) for part in checked], range(comm.world_size))
    of_ranks = [flat.view(tensor.dtype) for flat in received]
    with _flat(tensor, comm) as flat:
        flat.copy_(fold(BETWEEN_TWO.get(op, torch.add), of_ranks))
        if op == "mean":
            flat /= comm.world_size
    return tensor


def _reduced(comm: Comm, flat: Tensor, op: str) -> Tensor:
    """Return one of OPS of `flat` over the ranks; `flat` itself may change."""
    if op in BETWEEN_TWO:
        return fold(BETWEEN_TWO[op], (other.view(flat.dtype) for other in comm.all_gather(_bytes(flat))))
    comm.all_reduce_(flat)
    return flat.div_(comm.world_size) if op == "mean" else flat


@contextmanager
def _flat(tensor: Tensor, comm: Comm) -> Iterator[Tensor]:
    """Give `tensor` as a flat one on the communicator's device: its own memory, or a copy that is written back."""
    with torch.no_grad():
        own = tensor.detach()
        flat = own.to(comm.device).contiguous().view(-1)
        yield flat
        if flat.data_ptr() != own.data_ptr() or flat.device != own.device:
            own.copy_(flat.view(own.shape))


def _copy(tensor: Tensor, comm: Comm) -> Tensor:
    return tensor.detach().to(comm.device, copy=True, memory_format=torch.contiguous_format).view(-1)


def _bytes(flat: Tensor) -> Tensor:
    """Return `flat` as bytes: where nothing is added up, any dtype can be sent."""
    return flat.view(torch.uint8)


def _back(flat: Tensor, like: Tensor) -> Tensor:
    return flat.view(like.dtype).view(like.shape).to(like.device)


def _others(comm: Comm) -> list[int]:
    return [rank for rank in range(comm.world_size) if rank != comm.rank]


def _checked_op(given: Any, tensor: Tensor) -> str:
    """Return which of OPS it is: a name, or a ReduceOp of torch.distributed."""
    name = str(given).rpartition(".")[2].lower()
    op = OTHER_NAMES.get(name, name)
    one_of("op", op, OPS)
    if op == "mean" and not tensor.is_floating_point():
        raise SettingError(f"op mean: not of {tensor.dtype}; convert the tensor to a float, or take the sum")
    if tensor.dtype not in (MAXED if op in ("max", "min") else SUMMED):
        remedy = "take the max, or convert the tensor" if tensor.dtype in MAXED else "convert the tensor"
        raise SettingError(f"op {op}: not of {tensor.dtype}; {remedy}")
    return op


def _check_rank(name: str, rank: int, comm: Comm) -> None:
    if rank not in range(comm.world_size):
        raise SettingError(f"{name} must be a rank from 0 to {comm.world_size - 1}, not {rank}")


def _checked_parts(what: str, tensor: Tensor, parts: Sequence[Tensor] | None, comm: Comm) -> Sequence[Tensor]:
    """Return `parts`. Raises SettingError unless there is one for each rank, each like `tensor`."""
    parts = [] if parts is None else [torch.as_tensor(part) for part in parts]
    wanted = tuple(tensor.shape), tensor.dtype
    if (count := len(parts)) != comm.world_size:
        raise SettingError(f"{what}: one part for each of the {comm.world_size} ranks, not {count}")
    for number, part in enumerate(parts):
        if (tuple(part.shape), part.dtype) != wanted:
            raise SettingError(
                f"{what}: part {number} is {tuple(part.shape)} {part.dtype}, not {wanted[0]} {wanted[1]}"
            )
    return parts
