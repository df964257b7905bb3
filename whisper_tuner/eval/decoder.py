"""Decoding of a batch from which a clip leaves as soon as its text has ended, and what of it is to be doubted."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

# OpenAI's thresholds (whisper/transcribe.py), by which text is decoded again at the next temperature.
MOST_COMPRESSED = 2.4  # bytes of a text by bytes of it compressed: more is a loop
LEAST_PROBABLE = -1.0  # mean log-probability of its tokens
NO_SPEECH = 0.6  # probability of silence, from which improbable text counts as heard in silence


@dataclass(frozen=True)
class Certainty:
    """logprob: the mean of a text's tokens, with its end. no_speech: the probability of silence, 0 if not known."""

    logprob: float
    no_speech: float

    def is_silence(self) -> bool:
        return self.no_speech > NO_SPEECH and self.logprob < LEAST_PROBABLE

    def is_doubtful(self, text: str) -> bool:
        return not self.is_silence() and (compression(text) > MOST_COMPRESSED or self.logprob < LEAST_PROBABLE)


def compression(text: str) -> float:
    data = text.encode()
    return len(data) / len(zlib.compress(data))


class Decoder:
    """Decodes for `generate(custom_generate=Decoder())`: token ids [B, tokens], padded, of prompts [B, p].

    transformers' own loop, which `generate` runs otherwise, computes every clip until the last one has ended: one that
    repeats itself up to the longest text allowed then makes all others of its batch as slow as itself. Here the batch
    is halved once half of it has ended: not earlier, because each size of a batch has its price on Apple's GPU.

    temperature: 0 takes the most probable token, more draws one, by the same random numbers in each row: so what is
    drawn for it does not depend on the other rows. no_speech: the token for silence. words: tokens of words that were
    added to Whisper's vocabulary, behind its timestamps.
    certainties: of each text, after the call.
    """

    def __init__(self, temperature: float = 0, seed: int = 0, no_speech: int | None = None, words: Sequence[int] = ()):
        self._temperature, self._no_speech, self._words = temperature, no_speech, list(words)
        self._draws = torch.Generator().manual_seed(seed)
        self.certainties: list[Certainty] = []

    def __call__(
        self,
        model: WhisperForConditionalGeneration,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **inputs: Any,  # `generate` leaves here only what is no parameter of this function
    ) -> Tensor:
        states, cache = inputs["encoder_outputs"].last_hidden_state, None  # [B, frames / 2, d_model]
        ids = new = input_ids
        settings: Any = generation_config  # has what its file has
        processors = [_quick(process, model) for process in logits_processor]
        first_time = None if settings.return_timestamps else getattr(settings, "no_timestamps_token_id", None)
        if first_time is not None:  # one that chance may draw would make `generate` go on from there
            suppressed = torch.arange(model.config.vocab_size, device=ids.device) >= first_time
            suppressed[self._words] = False
            processors.append(lambda _, scores: scores.masked_fill_(suppressed, -math.inf))
        rows = list(range(len(ids)))  # of the result, those in the batch
        ended: dict[int, Tensor] = {}  # their ids
        summed, silence = torch.zeros(len(ids), device=ids.device), [0.0] * len(ids)
        logprobs: dict[int, float] = {}
        while len(ended) < len(input_ids):
            output = model(
                encoder_outputs=BaseModelOutput(states), decoder_input_ids=new, past_key_values=cache, use_cache=True
            )
            if cache is None and self._no_speech is not None:
                silence = output.logits[:, 0].float().softmax(-1)[:, self._no_speech].tolist()
            cache = output.past_key_values
            scores = output.logits[:, -1].to(copy=True, dtype=torch.float32)
            for process in processors:
                scores = process(ids, scores)
            new = self._next(scores)
            summed += scores.log_softmax(-1).gather(1, new)[:, 0]
            ids = torch.cat([ids, new], dim=-1)
            sums = summed.tolist()
            for place, stop in enumerate(stopping_criteria(ids, None).tolist()):
                if stop and rows[place] not in ended:
                    ended[rows[place]] = ids[place]
                    logprobs[rows[place]] = sums[place]
            going_first = sorted(range(len(rows)), key=lambda place: rows[place] in ended)
            half = len(rows) // 2
            if half and rows[going_first[half]] in ended:
                rows = [rows[place] for place in going_first[:half]]
                kept = torch.tensor(going_first[:half], device=ids.device)
                ids, new, states, summed = ids[kept], new[kept], states[kept], summed[kept]
                cache.batch_select_indices(kept)
        texts = [ended[row] for row in range(len(input_ids))]
        ends = settings.eos_token_id
        for row, text in enumerate(texts):
            has_end = int(text[-1]) in (ends if isinstance(ends, list) else [ends])
            tokens = len(text) - input_ids.shape[1] - has_end
            self.certainties.append(Certainty(logprobs[row] / (tokens + 1), silence[row]))
        return pad_sequence(texts, batch_first=True, padding_value=generation_config.pad_token_id)

    def _next(self, scores: Tensor) -> Tensor:
        """Choose a token for each row [B, 1]."""
        if not self._temperature:
            return scores.argmax(-1, keepdim=True)
        # The least of exponential variables with these rates, which the last bit of a score hardly ever changes: so a
        # text is nearly always the same in other batches and on other machines. With sums of probabilities it is not.
        waits = torch.empty(scores.shape[-1]).exponential_(generator=self._draws)
        return (scores / self._temperature - waits.log().to(scores.device)).argmax(-1, keepdim=True)


def _quick(process: LogitsProcessor, model: WhisperForConditionalGeneration) -> Callable[[Tensor, Tensor], Tensor]:
    """Speed a processor up that suppresses tokens: it need not look for them in the whole vocabulary at each step."""
    if isinstance(process, SuppressTokensAtBeginLogitsProcessor):
        return lambda ids, scores: process(ids, scores) if ids.shape[-1] == process.begin_index else scores
    if isinstance(process, SuppressTokensLogitsProcessor):
        suppressed = torch.isin(torch.arange(model.config.vocab_size), process.suppress_tokens.cpu()).to(model.device)
        return lambda _, scores: scores.masked_fill_(suppressed, -math.inf)
    return process
