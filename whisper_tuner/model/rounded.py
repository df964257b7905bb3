"""Weights in fewer bits: bf16, or int8 with a scale for each row where they are not trained.

They are made float for a part of a layer at a time, in the forward and again in the backward pass. torchao, quanto and
bitsandbytes have such layers too; these are plain operations that every device has, and sum as Apple's GPU needs it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

# Parts of a layer: what is float at once is small, and Apple's GPU sums rightly (exogym.device.MPS_TERMS).
ROWS = 8192
# Names of parameters that stay in float32: they are small, and their rounding is felt most.
IN_FLOAT32 = ("bias", "layer_norm", "conv1", "conv2", "embed_positions")


class RoundedLinear(nn.Linear):
    """An nn.Linear whose weight [out, in] is bf16, or int8 to be multiplied by `scale` [out, 1]."""

    scale: Tensor | None

    def forward(self, values: Tensor) -> Tensor:
        kind = values.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else values.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return _Product.apply(values.to(dtype), self.weight, self.scale, bias)


class RoundedEmbedding(nn.Embedding):
    """An nn.Embedding whose weight is held like that of RoundedLinear; rows are float32."""

    scale: Tensor | None

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.weight[ids].float()
        return rows if self.scale is None else rows * self.scale[ids]


class _Product(Function):
    @staticmethod
    def forward(ctx, values: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.held = weight, scale
        ctx.save_for_backward(values if weight.requires_grad else None)
        parts = [linear(values, part) for _, part in _parts(weight, scale, values.dtype)]
        found = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return found if bias is None else found.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor | None]:
        (weight, scale), (values,) = ctx.held, ctx.saved_tensors
        found = [gradient[..., rows] @ part for rows, part in _parts(weight, scale, gradient.dtype)]
        of_values, of_weight, of_bias = sum(found[1:], start=found[0]), None, None
        gradient = gradient.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            of_weight, values = torch.empty_like(weight), values.flatten(0, -2)
            for rows, _ in _parts(weight, None, weight.dtype):  # no copies
                of_weight[rows] = gradient[:, rows].T @ values
        if ctx.needs_input_grad[3]:
            of_bias = gradient.sum(0)
        return of_values, of_weight, None, of_bias


def _parts(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield the weight in float, some rows at a time."""
    for first in range(0, len(weight), ROWS):
        rows = slice(first, first + ROWS)
        part = weight[rows].to(dtype)
        yield rows, part if scale is None else part.mul_(scale[rows].to(dtype))


def hold_rounded(model: nn.Module, precision: str) -> None:
    """Let linear layers and embeddings that were loaded as bf16 compute; those that are not trained may become int8.

    precision: of what is not trained. Layers that share a weight go on sharing it. What stays in float32 leaves the
    file that it was read from, which would stay in memory as a whole.
    """
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.clone()
    scales: dict[nn.Parameter, Tensor | None] = {}
    for module in model.modules():
        if type(module) not in (nn.Linear, nn.Embedding):
            continue
        weight = module.get_parameter("weight")
        if weight.dtype == torch.float32:
            continue
        if weight not in scales:
            scales[weight] = _round(weight) if precision == "int8" and not weight.requires_grad else None
        module.__class__ = RoundedLinear if isinstance(module, nn.Linear) else RoundedEmbedding
        module.register_buffer("scale", scales[weight], persistent=False)  # so that no rank sends it to another


def _round(weight: nn.Parameter) -> Tensor:
    """Make a weight [out, in] int8 where it stands, and return its scales [out, 1]."""
    values = weight.detach().float()
    scale = values.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    weight.data = values.div_(scale).round_().to(torch.int8)
    return scale
