"""A Whisper model as the trainer sees it: batch in, mean loss and its weight out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import WhisperForConditionalGeneration, WhisperProcessor
from transformers.models.whisper.modeling_whisper import shift_tokens_right

from whisper_tuner.data.labels import IGNORED
from whisper_tuner.model.base_model import encode, whisper_of


class WhisperModelWrapper(nn.Module):
    """Token-weighted loss of a Whisper model, plain or wrapped by peft.

    Trainable are the parameters that `whisper_model` leaves trainable; the wrapper has none of its own.
    """

    def __init__(self, whisper_model: nn.Module, processor: WhisperProcessor, device: str | torch.device):
        super().__init__()
        self.model = whisper_model.to(device)
        self.processor = processor

    @property
    def device(self) -> torch.device:
        return self._whisper.device

    def forward(self, batch: Mapping[str, Tensor] | Sequence[Tensor]) -> tuple[Tensor, int]:
        """(mean loss per target token, float32 scalar; number of target tokens).

        `batch` is a dict with `input_features` and `labels`, or a pair `(audio_features, labels)`. Features are
        log-mel, float32 [B, 80|128, frames], at most the model's full length; labels are int64 [B, L], -100 = padding.
        """
        features, labels = _unpack(batch)
        tokens = int((labels != IGNORED).sum())  # before the copy: on an accelerator it would wait for the queue
        features, labels = features.to(self.device), labels.to(self.device)
        config = self._whisper.config
        logits = self.model(
            encoder_outputs=encode(self._whisper, features),
            decoder_input_ids=shift_tokens_right(labels, config.pad_token_id, config.decoder_start_token_id),
            use_cache=False,
        ).logits  # [B, L, vocabulary]
        # float() even under autocast: bf16 has too few digits for a sum over 51,865 exponentials.
        total = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / max(tokens, 1), tokens

    @property
    def _whisper(self) -> WhisperForConditionalGeneration:
        return whisper_of(self.model)


def _unpack(batch: Mapping[str, Tensor] | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Mapping):
        return batch["input_features"], batch["labels"]
    features, labels = batch
    return features, labels
