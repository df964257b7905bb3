"""An optimizer that holds hardly more than the weights: Adafactor (Shazeer and Stern, 1804.04235), without momentum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from exogym.flat import CHUNK, PIECE

TINY = 1e-30  # added to squares: none is zero


class LowMemory(Optimizer):
    """Makes steps about as long as AdamW's, from mean squares of rows and columns: m + n values for [m, n].

    Weights in bf16 are rounded up or down by chance, since most steps are smaller than their last bit. Chance depends
    on the number of the step and the place of the parameter alone: ranks that make the same steps keep the same
    weights, and so does a run that is resumed. Weight decay is decoupled, as AdamW's.
    """

    def __init__(self, params: Iterable[Any], *, lr: float = 1e-3, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        all_of_them = [(p, group) for group in self.param_groups for p in group["params"]]
        for number, (p, group) in enumerate(all_of_them):
            if p.grad is None:
                continue
            weights, grad, state = torch.atleast_1d(p), torch.atleast_1d(p.grad), self.state[p]
            state["step"] = step = state.get("step", 0) + 1
            _add_squares(state, grad, step**-0.8)
            parts = list(_parts(weights))
            squares = sum(torch.linalg.vector_norm(_direction(state, grad, part)) ** 2 for part in parts)
            rate = group["lr"] / (squares / p.numel()).sqrt().clamp(min=1)  # no step is longer than lr a weight
            chance = torch.Generator(p.device).manual_seed(step * len(all_of_them) + number)
            for part in parts:
                moved = weights[part].float().mul_(1 - group["lr"] * group["weight_decay"])
                moved.sub_(_direction(state, grad, part).mul_(rate))
                weights[part] = rounded_by_chance(moved, chance) if p.dtype == torch.bfloat16 else moved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, in float32; torch alone makes it what the parameter is, perhaps bf16."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, kept in state_dict["state"].items():
            p = parameters[number]
            self.state[p] = {k: value.to(p.device) if isinstance(value, Tensor) else value for k, value in kept.items()}


def _parts(tensor: Tensor) -> Iterator[slice]:
    """Yield slices of the first dimension, of which each has some thousand values: what is made float32 at once."""
    most = PIECE if tensor.device.type == "cpu" else CHUNK
    size = max(1, most * len(tensor) // max(1, tensor.numel()))
    for first in range(0, len(tensor), size):
        yield slice(first, first + size)


def _add_squares(state: dict[str, Any], grad: Tensor, new: float) -> None:
    """Bring a gradient into the mean squares, of which it becomes the part `new`."""
    if grad.ndim == 1:
        _mix(state, "squares", grad.float().square().add_(TINY), new)
        return
    rows, columns = [], []
    for part in _parts(grad):
        squares = grad[part].flatten(1).float().square().add_(TINY)
        rows.append(squares.mean(1))
        columns.append(squares.sum(0))
    _mix(state, "rows", torch.cat(rows), new)
    _mix(state, "columns", torch.stack(columns).sum(0) / len(grad), new)


def _mix(state: dict[str, Any], name: str, found: Tensor, new: float) -> None:
    state[name] = state[name].lerp_(found, new) if name in state else found


def _direction(state: dict[str, Any], grad: Tensor, part: slice) -> Tensor:
    """Return a part of the gradient in float32, divided by the roots of its mean squares."""
    if grad.ndim == 1:
        squares: Tensor = state["squares"][part]
        return grad[part] / squares.sqrt()
    rows, columns = (state["rows"][part] / state["rows"].mean()).sqrt_(), state["columns"].sqrt()
    values: Tensor = grad[part].flatten(1) / rows[:, None]
    return values.div_(columns).view_as(grad[part])


def rounded_by_chance(values: Tensor, generator: torch.Generator) -> Tensor:
    """Return float32 values as bf16: each becomes one of its two neighbours, the likelier the nearer it is."""
    bits = values.view(torch.int32)
    noise = torch.randint(1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    return bits.add(noise).bitwise_and_(-1 << 16).view(torch.float32).bfloat16()
