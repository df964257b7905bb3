"""How long clips take to train, beside one another: the same on all ranks, whatever their devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import WhisperConfig

    from whisper_tuner.model.memory import ModelShape

# Its products alone would make attention half of it: softmax takes time as well. Of tiny.en on one thread of a CPU the
# measured times of clips up to 30 s are then met within a tenth. Not measured on a GPU.
ATTENTION = 2.0


@dataclass(frozen=True)
class Cost:
    """Costs in units of a mel frame of a short clip. token: of a label. square: of a frame for each other one."""

    token: float = 0.0
    square: float = 0.0

    @classmethod
    def of_model(cls, config: WhisperConfig | ModelShape, *, encoder_is_stored: bool = False) -> Cost:
        """Count a model's multiplications. encoder_is_stored: its outputs for all clips are, so it is not computed."""
        d, encoder, decoder = config.d_model, config.encoder_layers, config.decoder_layers
        keys = decoder * 2 * d * d  # and values, of an encoder's position
        token = decoder * (6 * d * d + 2 * d * config.decoder_ffn_dim) + config.vocab_size * d
        if encoder_is_stored:
            return cls(token=2 * token / keys)
        position = keys + encoder * (4 * d * d + 2 * d * config.encoder_ffn_dim)
        return cls(token=2 * token / position, square=ATTENTION * encoder * 2 * d / position / 2)

    def of(self, frames: int, tokens: float) -> float:
        return frames + self.square * frames * frames + self.token * tokens


MEL_FRAMES = Cost()
