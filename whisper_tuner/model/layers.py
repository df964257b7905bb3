"""Layers that are computed in other ways than transformers': of clips in one sequence, tied, and wide ones.

The values stay the same, but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, gelu, linear, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, WhisperForConditionalGeneration
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from whisper_tuner.data.batch_shapes import Lengths
from whisper_tuner.model.base_model import masked, through_layers

ATTENTION = "multimac_padding_free"
GAP = 2  # frames of zeros between two clips, so that no convolution reaches across; even, as the encoder halves them


def encode_joined(model: WhisperForConditionalGeneration, log_mel: Tensor, lengths: Lengths) -> Tensor:
    """Compute encoder states [1, sum of frames / 2, d_model] of log-mels [80|128, sum of frames], clip after clip.

    None is padded to another's length, and each attends to itself only: this is what `encode` says of each clip alone.
    SpecAugment and LayerDrop act as the checkpoint's config says.
    """
    model.config._attn_implementation = ATTENTION  # for good: the backward pass may compute activations again
    encoder, positions = model.model.encoder, lengths.positions
    clips = [masked(model, clip.unsqueeze(0))[0] for clip in log_mel.split(list(lengths.frames), dim=1)]
    gap = log_mel.new_zeros(len(log_mel), GAP)
    spaced = torch.cat([part for clip in clips for part in (clip, gap)], dim=1).unsqueeze(0)  # [1, 80|128, frames]
    is_clip = torch.cat([torch.arange(frames + GAP) < frames for frames in lengths.frames]).to(log_mel.device)
    states = gelu(encoder.conv1(spaced))
    states = gelu(encoder.conv2(states * is_clip.to(states.dtype)))[0].T  # [frames / 2, d_model]
    places = torch.cat([encoder.embed_positions.weight[:count] for count in positions])
    states = (states[is_clip[::2]] + places).unsqueeze(0)
    return through_layers(encoder, states, attends=(positions, positions))


def decoder_options(model: WhisperForConditionalGeneration, lengths: Lengths) -> dict[str, object]:
    """Make what the decoder is given beside embeddings [1, tokens, d_model] and the states of `encode_joined`.

    From the positions it sees where clips begin, and makes the mask of its own attention.
    """
    model.config._attn_implementation = ATTENTION
    places = torch.cat([torch.arange(count) for count in lengths.tokens])
    return {"position_ids": places.unsqueeze(0), "attends": (lengths.tokens, lengths.positions)}


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attends: tuple[Sequence[int], Sequence[int]] | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Do transformers' attention, [1, heads, n, width] -> [1, n, heads, width], for each clip alone.

    attends: how many queries and how many keys each clip has. The decoder's own attention has a mask instead: its
    sequences are short, and one product is quicker than many small ones.
    """
    if attends is None or module.is_causal:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    queries, keys = map(list, attends)
    clips = zip(query.split(queries, dim=2), key.split(keys, dim=2), value.split(keys, dim=2), strict=True)
    found = [scaled_dot_product_attention(*clip, dropout_p=dropout, scale=scaling) for clip in clips]
    return torch.cat(found, dim=2).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


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
        """Return None if they are not trained, not tied, or computed in another way, as by an adapter; or not on a CPU.

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


class SplitLinear(nn.Linear):
    """An nn.Linear that is computed in parts of `most` outputs: the gradient of its inputs sums over each part alone.

    Whisper's output layer has 51,865 outputs or so, more than M1 and M2 sum rightly (see exogym.device.MPS_TERMS).
    """

    most: int

    def forward(self, values: Tensor) -> Tensor:
        size = math.ceil(self.out_features / math.ceil(self.out_features / self.most))
        weights = self.weight.split(size)
        biases = [None] * len(weights) if self.bias is None else self.bias.split(size)
        parts = [linear(values, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return torch.cat(parts, dim=-1)


def split_wide_layers(model: nn.Module, most: int) -> None:
    """Make a SplitLinear of each linear layer of more outputs than `most`, where it stands: ties and hooks stay."""
    for module in model.modules():
        if type(module) is nn.Linear and module.out_features > most:
            module.__class__ = SplitLinear
            assert isinstance(module, SplitLinear)
            module.most = most
