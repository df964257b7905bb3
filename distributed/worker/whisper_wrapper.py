"""A Whisper model as the trainer sees it: batch in, mean loss and its weight out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import WhisperForConditionalGeneration, WhisperProcessor
from transformers.models.whisper.modeling_whisper import shift_tokens_right

from whisper_tuner.data.labels import IGNORED
from whisper_tuner.model.base_model import encode, whisper_of

LOGITS_AT_ONCE = 512  # of 51,865 tokens each: 106 MB in float32, and as much for the gradient


class WhisperModelWrapper(nn.Module):
    """Token-weighted loss of a Whisper model, plain or wrapped by peft.

    Trainable are the parameters that `whisper_model` leaves trainable; the wrapper has none of its own.
    label_smoothing: in training, as in torch's cross_entropy.
    """

    def __init__(
        self,
        whisper_model: nn.Module,
        processor: WhisperProcessor,
        device: str | torch.device,
        *,
        label_smoothing: float = 0.0,
    ):
        super().__init__()
        self.label_smoothing = label_smoothing
        self.model = whisper_model.to(device)
        self.processor = processor

    @property
    def device(self) -> torch.device:
        return self._whisper.device

    def forward(self, batch: Mapping[str, Tensor] | Sequence[Tensor]) -> tuple[Tensor, int]:
        """(mean loss per target token, float32 scalar; number of target tokens).

        `batch` is a dict with `input_features` and `labels`, or a pair `(audio_features, labels)`. Features are
        log-mel, float32 [B, 80|128, frames], at most the model's full length; labels are int64 [B, L], -100 = no
        target. `decoder_input_ids` int64 [B, L] are what the decoder is given, by default the labels shifted right.
        """
        features, labels, inputs = _unpack(batch)
        is_target = (labels != IGNORED).flatten().cpu()  # [B * L]; before the copy: later it would wait for the queue
        features, labels = features.to(self.device), labels.to(self.device)
        config, decoder = self._whisper.config, self._whisper.model.decoder
        if inputs is None:
            inputs = shift_tokens_right(labels, config.pad_token_id, config.decoder_start_token_id)
        states = decoder(
            input_ids=inputs.to(self.device),
            encoder_hidden_states=encode(self._whisper, features).last_hidden_state,
            use_cache=False,
        ).last_hidden_state  # [B, L, d_model]
        places = is_target.nonzero().squeeze(1).to(self.device)
        total = self._loss(states.flatten(0, 1)[places], labels.flatten()[places])
        return total / max(len(places), 1), len(places)

    def _loss(self, states: Tensor, targets: Tensor) -> Tensor:
        """Summed cross entropy of targets [n] for the decoder's states [n, d_model].

        The logits of all would be the largest array of a step: they are made for some at a time, and made again for the
        gradient. torch's own linear_cross_entropy knows no output layer that is split or has an adapter.
        """
        parts = [*zip(states.split(LOGITS_AT_ONCE), targets.split(LOGITS_AT_ONCE), strict=True)]
        if len(parts) == 1:
            return self._part_loss(*parts[0])
        return sum(checkpoint(self._part_loss, *part, use_reentrant=False) for part in parts)

    def _part_loss(self, states: Tensor, targets: Tensor) -> Tensor:
        logits = self._whisper.proj_out(states)  # [n, vocabulary]
        # float() even under autocast: bf16 has too few digits for a sum over 51,865 exponentials.
        smoothing = self.label_smoothing if self.training else 0.0
        return cross_entropy(logits.float(), targets, reduction="sum", label_smoothing=smoothing)

    @property
    def _whisper(self) -> WhisperForConditionalGeneration:
        return whisper_of(self.model)


def _unpack(batch: Mapping[str, Tensor] | Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    if isinstance(batch, Mapping):
        return batch["input_features"], batch["labels"], batch.get("decoder_input_ids")
    features, labels = batch
    return features, labels, None
