"""A Whisper model in two stages: the encoder on the first rank, the decoder with the loss on the second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exogym.comm.comm import Comm
from exogym.samplers.elastic import SharedSampler
from exogym.state.state_sync import receive_state, send_state
from whisper_tuner.config import Profile
from whisper_tuner.data.batch_shapes import BatchLayout
from whisper_tuner.data.batches import ShardBatches
from whisper_tuner.errors import RunError
from whisper_tuner.export.final import save_final
from whisper_tuner.model.base_model import skeleton, whisper_of
from whisper_tuner.model.memory import ENCODER, PARTS

from .whisper_wrapper import WhisperModelWrapper

ADAPTER = "lora_"


class EncoderStage(WhisperModelWrapper):
    """Gives the encoder's states: float32 [B, frames / 2, d_model], or [frames / 2, d_model] of clips in one row."""

    def forward(self, batch: Mapping[str, Any]) -> Tensor:  # type: ignore[override]
        lengths = batch.get("lengths")
        states = self._encoded(batch, lengths)
        return states[0] if lengths else states

    def alone(self, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        """Return a loss that takes the memory of this stage, which is one micro-batch ahead of its gradients."""
        return self(batch).float().square().mean() + self(batch).float().square().mean(), 1


class DecoderStage(WhisperModelWrapper):
    """Gives the loss as WhisperModelWrapper does, of the states that the encoder has sent."""

    def forward(self, states: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, int]:  # type: ignore[override]
        return super().forward({**batch, "encoder_states": states})

    def alone(self, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        features = batch["input_features"]
        clips = [] if batch.get("lengths") else [len(features)]
        shape = [*clips, features.shape[-1] // 2, self._whisper.config.d_model]
        return self(torch.zeros(shape, device=self.device, requires_grad=True), batch)


STAGES = dict(zip(PARTS, (EncoderStage, DecoderStage), strict=True))


class StagedSampler(SharedSampler):
    """A SharedSampler of ranks that read the same micro-batches: as small as the rank needs that has least memory."""

    samples: ShardBatches
    validation: StagedSampler | None = None  # which is read alike

    def agree_on_length(self, comm: Comm) -> bool:
        self.samples.layout = agreed_layout(comm, self.samples.layout)
        return bool(self.validation and self.validation.agree_on_length(comm))


def agreed_layout(comm: Comm, layout: BatchLayout) -> BatchLayout:
    """Return the layout that suits all ranks, whose devices may differ."""
    told = comm.all_gather(torch.tensor([int(value) for value in astuple(layout)]))
    padded, few, grid, cost, most, full = zip(*(values.tolist() for values in told), strict=True)
    return BatchLayout(
        is_padded=any(padded),
        few_lengths=any(few),
        label_grid=max(grid),
        fixed_cost=min(cost),
        most_positions=min(most),
        pads_in_full=all(full),
    )


class WholeModel:
    """Brings together on the first rank what both have trained; until then it has nothing of the second's."""

    def __init__(self, trained: nn.Module, profile: Profile):
        self._trained, self._profile = trained, profile
        self._received: dict[str, Tensor] | None = None

    def gather(self, comm: Comm) -> None:
        if comm.rank == 0:
            self._received = receive_state(comm, 1)
        else:
            send_state(comm, self._own(PARTS[comm.rank]), 0)

    def save(self, final: Path, processor: Any) -> None:
        """Write it as any other run does. Raises RunError on a rank that does not have it."""
        if self._received is None:
            remedy = "Go on from its checkpoints with --resume."
            raise RunError("the first host of the pipeline, which has the whole model, is gone", remedy=remedy)
        whole = skeleton(self._trained, self._profile)
        whole.load_state_dict(self._own(ENCODER) | self._received, strict=False, assign=True)
        whisper_of(whole).tie_weights()
        save_final(whole, processor, final, self._profile.base_model, blend=self._profile.blend)

    def _own(self, part: str) -> dict[str, Tensor]:
        """Return what there is to save of a part by its names in the whole: its adapters, or all of it, in float32."""
        is_lora = self._profile.method == "lora"
        return {
            name: value.detach().float().cpu()
            for name, value in self._trained.state_dict().items()
            if ("model.encoder." in name) == (part == ENCODER) and (ADAPTER in name or not is_lora)
        }
