"""Clips one after the other in one sequence, none padded to another's length; each attends to itself only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import gelu, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, WhisperForConditionalGeneration
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from whisper_tuner.data.batch_shapes import Lengths

ATTENTION = "multimac_padding_free"
GAP = 2  # frames of zeros between two clips, so that no convolution reaches across; even, as the encoder halves them


def encode_joined(model: WhisperForConditionalGeneration, log_mel: Tensor, lengths: Lengths) -> Tensor:
    """Encoder states [1, sum of frames / 2, d_model] of log-mels [80|128, sum of frames].

    What `encode` says of each clip alone, but for rounding. SpecAugment and LayerDrop act as the checkpoint's config
    says.
    """
    _use_own_attention(model)
    encoder, positions = model.model.encoder, lengths.positions
    clips = [_masked(model, clip) for clip in log_mel.split(list(lengths.frames), dim=1)]
    gap = log_mel.new_zeros(len(log_mel), GAP)
    spaced = torch.cat([part for clip in clips for part in (clip, gap)], dim=1).unsqueeze(0)  # [1, 80|128, frames]
    is_clip = torch.cat([torch.arange(frames + GAP) < frames for frames in lengths.frames]).to(log_mel.device)
    states = gelu(encoder.conv1(spaced))
    states = gelu(encoder.conv2(states * is_clip.to(states.dtype)))[0].T  # [frames / 2, d_model]
    places = torch.cat([encoder.embed_positions.weight[:count] for count in positions])
    states = (states[is_clip[::2]] + places).unsqueeze(0)
    states = drop(states, p=encoder.dropout, training=encoder.training)
    for layer in encoder.layers:
        if encoder.training and encoder.layerdrop > 0 and torch.rand([]) < encoder.layerdrop:
            continue
        states = layer(states, None, attends=(positions, positions))
    return encoder.layer_norm(states)


def decoder_options(model: WhisperForConditionalGeneration, lengths: Lengths) -> dict[str, object]:
    """Make what the decoder is given beside embeddings [1, tokens, d_model] and the states of `encode_joined`.

    From the positions it sees where clips begin, and makes the mask of its own attention.
    """
    _use_own_attention(model)
    places = torch.cat([torch.arange(count) for count in lengths.tokens])
    return {"position_ids": places.unsqueeze(0), "attends": (lengths.tokens, lengths.positions)}


def _masked(model: WhisperForConditionalGeneration, log_mel: Tensor) -> Tensor:
    """A clip after transformers' SpecAugment, if the checkpoint's config asks for it."""
    masks = model.config.apply_spec_augment and log_mel.shape[1] >= model.config.mask_time_length
    if not (masks and model.model.encoder.training):
        return log_mel
    return model.model._mask_input_features(log_mel.unsqueeze(0).clone())[0]  # it writes in place


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
    **options: object,
) -> tuple[Tensor, None]:
    """transformers' attention, [1, heads, n, width] -> [1, n, heads, width], for each clip alone.

    attends: how many queries and how many keys each clip has. The decoder's own attention has a mask instead: its
    sequences are short, and one product is quicker than many small ones.
    """
    if attends is None or module.is_causal:
        options |= {"dropout": dropout, "scaling": scaling}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    queries, keys = map(list, attends)
    clips = zip(query.split(queries, dim=2), key.split(keys, dim=2), value.split(keys, dim=2), strict=True)
    found = [scaled_dot_product_attention(*clip, dropout_p=dropout, scale=scaling) for clip in clips]
    return torch.cat(found, dim=2).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def _use_own_attention(model: WhisperForConditionalGeneration) -> None:
    """Set our attention for good: activations computed again in the backward pass need it. It is not saved."""
    model.config._attn_implementation = ATTENTION
