"""One array for both gradients of the weights that are Whisper's embedding and its output layer at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, linear
from transformers import WhisperForConditionalGeneration


class TiedWeights:
    """Embedding and output layer of one backward pass after another, whose gradient is added up where it stays.

    Autograd would make a gradient as large as the weights [vocabulary, d_model] for each of the two, for each part of
    the output layer and for each micro-batch, and add them up: with whisper-tiny a tenth of a step of short clips. So
    the output layer, whose backward pass comes first, adds to `weight.grad` itself; the embedding, whose comes last,
    adds its rows and hands that over as the gradient: so hooks are called once, as always.
    """

    def __init__(self, weight: nn.Parameter, padding: int | None):
        self._weight, self._padding = weight, padding

    @classmethod
    def of(cls, model: WhisperForConditionalGeneration) -> TiedWeights | None:
        """None if they are not trained, not tied, or computed in another way, as by an adapter; and on accelerators.

        On CUDA index_add_ adds in another order each time, and Apple's GPU has its output layer split.
        """
        embed, output = model.model.decoder.embed_tokens, model.proj_out
        plain = type(embed) is nn.Embedding and type(output) is nn.Linear and output.bias is None
        if not (plain and embed.weight is output.weight and embed.weight.requires_grad):
            return None
        if embed.weight.device.type != "cpu" or embed.max_norm is not None or embed.scale_grad_by_freq or embed.sparse:
            return None
        return cls(output.weight, embed.padding_idx)

    def embed(self, ids: Tensor) -> Tensor:
        """[...] int64 -> [..., d_model]"""
        return _Embedding.apply(ids, self._weight, self._padding)

    def logits(self, states: Tensor) -> Tensor:
        """[n, d_model] of what came of `embed` -> [n, vocabulary], under autocast in its type"""
        return _Output.apply(states, self._weight)


class _Embedding(Function):
    @staticmethod
    def forward(ctx, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor, None]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        whole, weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad, None
        rows = gradient.flatten(0, -2).to(whole.dtype)
        if ctx.padding is not None:  # as in torch: its row gets nothing from here
            rows = rows.masked_fill((ids == ctx.padding).flatten().unsqueeze(1), 0.0)
        return None, whole.index_add_(0, ids.flatten(), rows), None


class _Output(Function):
    @staticmethod
    def forward(ctx, states: Tensor, weight: Tensor) -> Tensor:
        kind = states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
        states, used = states.to(dtype), weight.detach().to(dtype)
        ctx.save_for_backward(states, used)
        ctx.weight = weight
        return linear(states, used)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (states, used), weight = ctx.saved_tensors, ctx.weight
        if weight.grad is None:
            weight.grad = (gradient.T @ states).to(weight.dtype)
        elif gradient.dtype == weight.dtype:
            weight.grad.addmm_(gradient.T, states)
        else:
            weight.grad.add_(gradient.T @ states)
        return gradient @ used, None
