"""One flat float32 CPU view of what a model trains: the only form in which weights and gradients travel."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from exogym.errors import SettingError

CHUNK = 16 * 1024 * 1024  # float32 values: 64 MB, the most that is staged from an accelerator at once
TRAINED = (torch.float32, torch.bfloat16, torch.float16)
SENT = (*TRAINED, torch.complex64)
PIECE = 256 * 1024  # values: what is computed of so many stays in a CPU's caches
Weights = Tensor | list[Tensor]  # a flat; or `copies`, which take half of its memory where a model is in bf16


class FlatParameters:
    """Copies a model's trainable parameters and floating-point buffers to and from flat tensors, in a fixed order.

    A flat is float32 [numel] on the CPU: parameters in [0, num_parameters), then buffers. Frozen parameters are left
    out, tied ones stand once, buffers that the state dict leaves out are left out too, and those of OtherBuffers. A
    complex number is two values. Holds no flat itself. Raises SettingError for a model that check_model refuses.
    """

    def __init__(self, model: nn.Module):
        check_model(model)
        saved = model.state_dict().keys()
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._model, self._checks = model, 0
        self._known = {n: (p, p.requires_grad) for n, p in model.named_parameters()}
        self._frozen = [p.detach() for p in model.parameters() if not p.requires_grad]
        buffers = [n for n, b in model.named_buffers() if n in saved and b.dtype in SENT]
        self.parameters: list[nn.Parameter] = list(parameters.values())
        self._buffers = [_place(model, n) for n in buffers]
        self.names = [*parameters, *buffers]
        self._frozen_digest: int | None = None
        self.num_parameters = sum(p.numel() for p in self.parameters)
        self.numel = self.num_parameters + sum(b.numel() for b in self.buffers)

    @property
    def buffers(self) -> list[Tensor]:
        """Looked up each time: a module may replace a buffer rather than write into it."""
        return [as_real(getattr(*place)) for place in self._buffers]

    def check_grads(self, only: slice = slice(None)) -> None:
        """Raise SettingError for a gradient that is sparse."""
        for name, p in zip(self.names[only], self.parameters[only], strict=False):  # names of buffers follow
            if p.grad is not None and p.grad.layout != torch.strided:
                what = f"the gradient of {name} is sparse, and ranks add up dense ones"
                raise SettingError(f"{what}: make its module with sparse=False")

    def check(self) -> None:
        """Raise SettingError if what is trained is not what it was at first, or its gradient cannot be sent."""
        self.check_grads()
        self._checks += 1
        is_due = not self._checks & (self._checks - 1)  # 1, 2, 4, ...: to find all takes milliseconds in a large model
        known = ((name, p) for name, (p, _) in self._known.items())
        for name, p in self._model.named_parameters() if is_due else known:
            first, was_trained = self._known.get(name, (None, False))
            if p is not first or p.requires_grad != was_trained:
                what = f"{name} is new, or its requires_grad was changed, since training began"
                raise SettingError(f"{what}: settle before `fit` what is trained, and call it once for each stage")

    def layout(self) -> int:
        """Return 64 bits that two ranks share only if their flats mean the same."""
        shapes = repr([(n, *t.shape) for n, t in zip(self.names, self.tensors(), strict=True)])
        return _signed(hashlib.blake2b(shapes.encode(), digest_size=8).digest())

    def frozen_digest(self) -> int:
        """Return 64 bits of the hash of what is not trained, which ranks must have in common and never send.

        Gigabytes with LoRA, and asked for at every generation: computed once.
        """
        if self._frozen_digest is None:
            hasher = hashlib.blake2b(digest_size=8)
            for piece in pieces(self._frozen):
                hasher.update(_bytes(piece))
            self._frozen_digest = _signed(hasher.digest())
        return self._frozen_digest

    def empty(self, extra: int = 0) -> Tensor:
        """Return a fresh zeroed flat with room for `extra` more values at its end."""
        return torch.zeros(self.numel + extra)

    def read(self, out: Tensor | None = None, *, buffers: Tensor | None = None) -> Tensor:
        """Copy parameters and buffers to `out` (new if None). Never aliases the model.

        buffers: those that `read_buffers` gave earlier, instead of what they are now.
        """
        out = torch.empty(self.numel) if out is None else out
        gather(self.tensors() if buffers is None else [*self._weights(), buffers], out)
        return out

    def copies(self, out: list[Tensor] | None = None, *, buffers: Tensor | None = None) -> list[Tensor]:
        """Return copies of parameters and buffers on the CPU, each in its own dtype; in `out`, if it is given.

        buffers: as for `read`.
        """
        own, tensors = len(self.parameters), self.tensors()
        out = out or [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        put(tensors[:own], out[:own])
        put(tensors[own:] if buffers is None else buffers, out[own:])
        return out

    @property
    def version(self) -> int:
        """Another one after each change of a parameter in place."""
        return sum(p._version for p in self.parameters)

    @property
    def is_on_cpu(self) -> bool:
        return all(tensor.device.type == "cpu" for tensor in self.tensors())

    def parts(self) -> Iterator[tuple[slice, torch.dtype]]:
        """Yield slices of a flat, of PIECE values at most, with the dtype that the model has there."""
        at = 0
        for tensors in (self._weights(), self.buffers):
            for dtype, run in groupby(tensors, key=lambda tensor: tensor.dtype):
                end = at + sum(tensor.numel() for tensor in run)
                for first in range(at, end, PIECE):
                    yield slice(first, min(first + PIECE, end)), dtype
                at = end

    def write(self, weights: Weights) -> None:
        """Copy weights to parameters and buffers, in their own dtype and on their own device."""
        put(weights, self.tensors())

    def move(self, to: Weights, *, since: Weights) -> None:
        """Add `to - since` to parameters and buffers, on their own device. `since` may be used up."""
        if isinstance(to, list):
            for own, *values in zip(self.tensors(), to, since, strict=True):
                for piece, new, old in zip(*(pieces([each]) for each in (own, *values)), strict=True):
                    piece.add_((new.float() - old).to(piece.device))
            return
        assert isinstance(since, Tensor), "both have one form"
        is_on_cpu = self.is_on_cpu

        def change(part: slice) -> Tensor:
            return torch.sub(to[part], since[part], out=None if is_on_cpu else since[part])

        _scatter(change, self.tensors(), torch.Tensor.add_, most=PIECE if is_on_cpu else CHUNK)

    @torch.no_grad()
    def read_at(self, indices: Tensor) -> Tensor:
        """Return the values at sorted int64 indices of a flat, float32 on the CPU."""
        parts = [t.reshape(-1)[at.to(t.device)].float() for t, at in self._at(indices)]
        return torch.cat([part.cpu() for part in parts]) if parts else torch.zeros(0)

    @torch.no_grad()
    def write_at(self, indices: Tensor, values: Tensor) -> None:
        """Write values at sorted int64 indices of a flat; everything else stays as it is."""
        first = 0
        for tensor, at in self._at(indices):
            part = values[first : first + at.numel()].to(tensor.device, tensor.dtype)
            flat = tensor.reshape(-1)  # a copy where the tensor is not contiguous
            flat[at.to(tensor.device)] = part
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))
            first += at.numel()

    def _at(self, indices: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Return each tensor of which there are some, and which."""
        tensors = self.tensors()
        ends = torch.tensor([t.numel() for t in tensors]).cumsum(0)
        first = 0
        for tensor, end, last in zip(tensors, ends.tolist(), torch.searchsorted(indices, ends).tolist(), strict=True):
            if last > first:
                yield tensor, indices[first:last] - (end - tensor.numel())
            first = last

    def read_buffers(self, out: Tensor | None = None) -> Tensor:
        """Copy buffers to `out` [numel - num_parameters] (new if None)."""
        out = torch.zeros(self.numel - self.num_parameters) if out is None else out
        gather(self.buffers, out)
        return out

    def write_buffers(self, flat: Tensor) -> None:
        _scatter(flat.__getitem__, self.buffers)

    def read_grads(self, out: Tensor | None = None, only: slice = slice(None)) -> Tensor:
        """Copy gradients to the beginning of `out`, without gaps; a gradient that is None reads as zeros."""
        out = self.empty() if out is None else out
        self.check_grads(only)
        gather([_zeros_like(p) if p.grad is None else p.grad for p in self.parameters[only]], out)
        return out

    def write_grads(self, flat: Tensor) -> None:
        """Copy flat[:num_parameters] to gradients, made where they are None."""
        grads = []
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.empty_like(p)
            grads.append(p.grad)
        _scatter(flat.__getitem__, grads)

    def _weights(self) -> list[Tensor]:
        return [p.detach() for p in self.parameters]

    def tensors(self) -> list[Tensor]:
        """Return parameters and buffers themselves, as they are on their device."""
        return [*self._weights(), *self.buffers]


class OtherBuffers:
    """A model's buffers of whole numbers, truth values and float64, as BatchNorm's `num_batches_tracked`, by name.

    They are each rank's own and no flat has them. Those that the state dict leaves out are left out here too.
    """

    def __init__(self, model: nn.Module):
        saved = model.state_dict().keys()
        buffers = {n: b for n, b in model.named_buffers() if n in saved}
        self._places = {n: _place(model, n) for n, b in buffers.items() if b.dtype not in SENT}

    def read(self) -> dict[str, Tensor]:
        """Return copies, on the device of the model."""
        return {name: as_real(getattr(*place)).clone() for name, place in self._places.items()}

    def write(self, values: dict[str, Tensor]) -> None:
        """Leaves those that `values` does not have as they are."""
        for name, place in self._places.items():
            if name in values:
                as_real(getattr(*place)).copy_(values[name])


def as_real(tensor: Tensor) -> Tensor:
    """Return a view of complex numbers as pairs [..., 2], and any other tensor as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def check_model(model: nn.Module) -> None:
    """Raise SettingError for a model that ranks cannot train together as it is."""
    if not isinstance(model, nn.Module):
        raise SettingError(f"the model must be a torch.nn.Module, not {model!r}")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"{name or 'the model'} is a ScriptModule, which cannot be copied"
            raise SettingError(f"{what}: give the module that it was scripted or traced from")
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(p):
            raise SettingError(f"{name} has no shape yet: call the model with a batch before you make the trainer")
        if p.requires_grad and p.dtype not in TRAINED:
            what = f"{name} is {p.dtype}, and ranks agree on float32"
            raise SettingError(f"{what}: train model.float(), and torch.view_as_real of complex numbers")


def digest(weights: Weights) -> int:
    """Return 64 bits that tell the bytes of CPU tensors from others, as a signed number that fits an int64 tensor.

    The CRC-32 of each half: it is against accidents, and takes a fifth of the time of a cryptographic hash.
    """
    sums = [0, 0]
    for tensor in [weights] if isinstance(weights, Tensor) else weights:
        data = _bytes(tensor.detach())
        half = len(data) // 2
        sums = [zlib.crc32(part, value) for part, value in zip((data[:half], data[half:]), sums, strict=True)]
    return _signed(b"".join(value.to_bytes(4, "big") for value in sums))


def unshared(flat: Tensor) -> Tensor:
    """Mark a flat that nobody changes any more: a checkpoint is written from it, and not from a copy."""
    flat.is_unshared = True  # type: ignore[attr-defined]
    return flat


def is_finite(flat: Tensor) -> bool:
    """Say whether a CPU tensor holds neither NaN nor infinity."""
    return not flat.numel() or all(map(math.isfinite, map(float, flat.aminmax())))  # NaN if there is one


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module of a buffer, and its name there, as `getattr` takes them."""
    path, _, own = name.rpartition(".")
    return model.get_submodule(path), own


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().data


def _zeros_like(parameter: Tensor) -> Tensor:
    return torch.zeros((), device=parameter.device).expand(parameter.shape)  # takes the memory of one value


# Copies below are blocking on purpose: non_blocking ones from and to mps corrupted data (pytorch 189690).


@torch.no_grad()
def gather(tensors: Iterable[Tensor], out: Tensor) -> None:
    """Copy tensors on any device to `out`, flat on the CPU, one after the other."""
    at = 0
    for group in groups(tensors):
        # From an accelerator in one piece, as each transfer has its price; here each tensor without a copy between.
        staged = [torch.cat([piece.reshape(-1).float() for piece in group])] if group[0].device.type != "cpu" else group
        for piece in staged:
            out[at : at + piece.numel()].view(piece.shape).copy_(piece)
            at += piece.numel()


@torch.no_grad()
def put(weights: Weights, tensors: list[Tensor]) -> None:
    """Copy weights to tensors, in the dtype and on the device of these."""
    if isinstance(weights, Tensor):
        _scatter(weights.__getitem__, tensors)
        return
    for tensor, values in zip(tensors, weights, strict=True):
        tensor.copy_(values)


@torch.no_grad()
def _scatter(
    part_of: Callable[[slice], Tensor],
    tensors: Iterable[Tensor],
    put: Callable[[Tensor, Tensor], Tensor] = torch.Tensor.copy_,
    *,
    most: int = CHUNK,
) -> None:
    """Put part_of(slice), a part of a flat, into the tensors it is for. most: values at once, see groups."""
    at = 0
    for group in groups(tensors, most):
        sizes = [piece.numel() for piece in group]
        staged = part_of(slice(at, at + sum(sizes))).to(group[0].device)
        for piece, values in zip(group, staged.split(sizes), strict=True):
            put(piece, values.view(piece.shape))
        at += sum(sizes)


def groups(tensors: Iterable[Tensor], most: int = CHUNK) -> Iterator[list[Tensor]]:
    """Yield views of consecutive rows, in lists of at most so many values on one device (one row may be more)."""
    group: list[Tensor] = []
    size = 0
    for piece in pieces(tensors, most):
        if group and (size + piece.numel() > most or piece.device != group[0].device):
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.numel()
    if group:
        yield group


def pieces(tensors: Iterable[Tensor], most: int = CHUNK) -> Iterator[Tensor]:
    """Yield views of consecutive rows, each of at most so many values (one row may be more)."""
    for tensor in tensors:
        tensor = tensor.unsqueeze(0) if tensor.dim() == 0 else tensor
        if tensor.numel():
            yield from tensor.split(max(1, most * tensor.shape[0] // tensor.numel()))
