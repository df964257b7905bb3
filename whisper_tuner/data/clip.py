"""What a batch is made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whisper_tuner.data.labels import Label


@dataclass(frozen=True, eq=False)
class Clip:
    """`ids` of the samples in it, log_mel float32 [80|128, frames], and their label."""

    ids: tuple[str, ...]
    log_mel: np.ndarray
    label: Label

    @property
    def frames(self) -> int:
        return self.log_mel.shape[1]
