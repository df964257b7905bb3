"""Greedy decoding of a batch from which a clip leaves as soon as its text has ended."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutput


def greedy(
    model: WhisperForConditionalGeneration,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **inputs: Any,  # `generate` leaves here only what is no parameter of this function
) -> Tensor:
    """For `generate(custom_generate=greedy)`: token ids [B, tokens], padded, of prompts [B, p].

    transformers' own loop, which `generate` runs otherwise, computes every clip until the last one has ended: one that
    repeats itself up to the longest text allowed then makes all others of its batch as slow as itself. Here the batch
    is halved once half of it has ended: not earlier, because each size of a batch has its price on Apple's GPU.
    """
    states, cache = inputs["encoder_outputs"].last_hidden_state, None  # [B, frames / 2, d_model]
    ids = new = input_ids
    logits_processor = [_quick(process, model) for process in logits_processor]
    rows, ended = list(range(len(ids))), {}  # rows of the result: those in the batch, and the ids of those that ended
    while len(ended) < len(input_ids):
        output = model(
            encoder_outputs=BaseModelOutput(states), decoder_input_ids=new, past_key_values=cache, use_cache=True
        )
        cache = output.past_key_values
        scores = output.logits[:, -1].to(copy=True, dtype=torch.float32)
        for process in logits_processor:
            scores = process(ids, scores)
        new = scores.argmax(-1, keepdim=True)
        ids = torch.cat([ids, new], dim=-1)
        for row, text, stop in zip(rows, ids, stopping_criteria(ids, None).tolist(), strict=True):
            if stop:
                ended.setdefault(row, text)
        going_first = sorted(range(len(rows)), key=lambda place: rows[place] in ended)
        half = len(rows) // 2
        if half and rows[going_first[half]] in ended:
            rows = [rows[place] for place in going_first[:half]]
            kept = torch.tensor(going_first[:half], device=ids.device)
            ids, new, states = ids[kept], new[kept], states[kept]
            cache.batch_select_indices(kept)
    texts = [ended[row] for row in range(len(input_ids))]
    return pad_sequence(texts, batch_first=True, padding_value=generation_config.pad_token_id)


def _quick(process: LogitsProcessor, model: WhisperForConditionalGeneration) -> Callable[[Tensor, Tensor], Tensor]:
    """The same, but what suppresses tokens does not look for them in the whole vocabulary at each step."""
    if isinstance(process, SuppressTokensAtBeginLogitsProcessor):
        return lambda ids, scores: process(ids, scores) if ids.shape[-1] == process.begin_index else scores
    if isinstance(process, SuppressTokensLogitsProcessor):
        suppressed = torch.isin(torch.arange(model.config.vocab_size), process.suppress_tokens.cpu()).to(model.device)
        return lambda _, scores: scores.masked_fill_(suppressed, -math.inf)
    return process
