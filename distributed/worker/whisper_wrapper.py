"""A Whisper model as the trainer sees it: batch in, mean loss and its weight out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import WhisperForConditionalGeneration, WhisperProcessor
from transformers.models.whisper.modeling_whisper import shift_tokens_right

from exogym.device import give_back_freed_memory, same_draws
from whisper_tuner.data.batch_shapes import Lengths
from whisper_tuner.data.encoder_store import EncoderStore
from whisper_tuner.data.labels import IGNORED
from whisper_tuner.model.base_model import encode, whisper_of
from whisper_tuner.model.layers import TiedWeights, decoder_options, encode_joined

LOGITS_AT_ONCE = 512  # of 51,865 tokens each: 106 MB in float32, and as much for the gradient


class WhisperModelWrapper(nn.Module):
    """Token-weighted loss of a Whisper model, plain or wrapped by peft.

    Trainable are the parameters that `whisper_model` leaves trainable; the wrapper has none of its own.
    label_smoothing: in training, as in torch's cross_entropy. encoder_store: of an encoder that is not trained.
    """

    def __init__(
        self,
        whisper_model: nn.Module,
        processor: WhisperProcessor,
        device: str | torch.device,
        *,
        label_smoothing: float = 0.0,
        encoder_store: EncoderStore | None = None,
    ):
        super().__init__()
        self.label_smoothing, self.encoder_store = label_smoothing, encoder_store
        self.model = whisper_model.to(device)
        self.processor = processor

    @property
    def device(self) -> torch.device:
        return self._whisper.device

    def forward(self, batch: Mapping[str, Any] | Sequence[Tensor]) -> tuple[Tensor, int]:
        """Return (mean loss per target token, float32 scalar; number of target tokens).

        `batch` is a dict with `input_features` and `labels`, or a pair `(audio_features, labels)`. Features are
        log-mel, float32 [B, 80|128, frames], at most the model's full length; labels are int64 [B, L], -100 = no
        target. `decoder_input_ids` int64 [B, L] are what the decoder is given, by default the labels shifted right.
        `encoder_states` float32 [B, frames / 2, d_model] may stand for the features; `encoder_keys`: to keep them by.
        With `lengths` (see Lengths) clips stand one after the other: [80|128, frames], [L] and [frames / 2, d_model];
        then `decoder_input_ids` must be given.
        """
        batch = batch if isinstance(batch, Mapping) else dict(zip(("input_features", "labels"), batch, strict=True))
        labels, inputs, lengths = batch["labels"], batch.get("decoder_input_ids"), batch.get("lengths")
        is_target = (labels != IGNORED).flatten().cpu()  # [B * L]; before the copy: later it would wait for the queue
        labels = labels.to(self.device)
        config, decoder = self._whisper.config, self._whisper.model.decoder
        if inputs is None:
            if config.pad_token_id is None or config.decoder_start_token_id is None:
                raise ValueError("the model's config names no pad_token_id or no decoder_start_token_id")
            inputs = shift_tokens_right(labels, config.pad_token_id, config.decoder_start_token_id)
        if lengths:
            inputs = inputs.unsqueeze(0)
        tied = TiedWeights.of(self._whisper) if torch.is_grad_enabled() else None
        embed, logits = (tied.embed, tied.logits) if tied else (decoder.embed_tokens, self._whisper.proj_out)
        states = decoder(
            inputs_embeds=embed(inputs.to(self.device)),
            encoder_hidden_states=self._encoded(batch, lengths),
            use_cache=False,
            **(decoder_options(self._whisper, lengths) if lengths else {}),
        ).last_hidden_state  # [B, L, d_model]
        places = is_target.nonzero().squeeze(1).to(self.device)
        total = self._loss(states.flatten(0, 1)[places], labels.flatten()[places], logits)
        return total / max(len(places), 1), len(places)

    def alone(self, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        """Return a loss that takes as much memory as training does, with no other rank."""
        return self(batch)

    def checkpoint_gradients(self) -> bool:
        """Compute activations again in the backward pass instead of keeping them. False if that is so already."""
        if self._whisper.model.encoder.gradient_checkpointing:
            return False
        give_back_freed_memory()
        self._whisper.gradient_checkpointing_enable(gradient_checkpointing_kwargs=self._again)
        return True

    @property
    def _again(self) -> dict[str, Any]:
        """The arguments of torch's checkpoint, with the same dropout."""
        return {"use_reentrant": False, "preserve_rng_state": False, "context_fn": self._same_draws}

    def _same_draws(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return same_draws(self.device)  # a method, no lambda: a copy of the model asks for its own device

    def train(self, mode: bool = True) -> WhisperModelWrapper:
        """Switch the mode. An encoder that is not trained has no dropout: it says the same of a clip each time."""
        super().train(mode)
        encoder = self._whisper.model.encoder
        if not any(parameter.requires_grad for parameter in encoder.parameters()):
            encoder.eval()
        return self

    def _encoded(self, batch: Mapping[str, Any], lengths: Lengths | None) -> Tensor:
        """Encode: float32 [B, frames / 2, d_model], or [1, ...] of clips that stand one after the other."""
        if "encoder_states" in batch:
            states = batch["encoder_states"].to(self.device)
            return states.unsqueeze(0) if lengths else states
        features = batch["input_features"].to(self.device)
        if lengths:
            states = encode_joined(self._whisper, features, lengths)
        else:
            states = encode(self._whisper, features).last_hidden_state
        if not (self.encoder_store and "encoder_keys" in batch):
            return states
        kept = self.encoder_store.put(batch["encoder_keys"], states[0].split(lengths.positions) if lengths else states)
        return torch.cat(kept).unsqueeze(0) if lengths else torch.stack(kept)

    def _loss(self, states: Tensor, targets: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
        """Sum the cross entropy of targets [n] for the decoder's states [n, d_model].

        The logits of all would be the largest array of a step: they are made for some at a time, and made again for the
        gradient. torch's own linear_cross_entropy knows no output layer that is split or has an adapter.
        """
        smoothing = self.label_smoothing if self.training else 0.0

        def part_loss(states: Tensor, targets: Tensor) -> Tensor:
            # float() even under autocast: bf16 has too few digits for a sum over 51,865 exponentials.
            return cross_entropy(logits(states).float(), targets, reduction="sum", label_smoothing=smoothing)

        parts = [*zip(states.split(LOGITS_AT_ONCE), targets.split(LOGITS_AT_ONCE), strict=True)]
        if len(parts) == 1:
            return part_loss(*parts[0])
        # Dropout may be in an adapter of the output layer.
        return sum(checkpoint(part_loss, *part, **self._again) for part in parts)

    @property
    def _whisper(self) -> WhisperForConditionalGeneration:
        return whisper_of(self.model)
