"""Outputs of an encoder that is not trained: computed in the first epoch, read from disk in the others."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whisper_tuner.data.kept_values import KeptValues
from whisper_tuner.errors import RunError
from whisper_tuner.files import hash_of
from whisper_tuner.text import size

FORMAT = 2  # raise it when the same weights and log-mels come to be encoded, or kept, otherwise
STORED = np.dtype("<f2")
REMEDY = "Make room, raise encoder_cache_gb, or set it to 0: then the encoder is computed anew in each epoch."


class EncoderStore:
    """Keeps encoder states [frames / 2, d_model] under the hash of the weights and of the padded log-mel, as fp16.

    No clip is padded to another's length: that changes what an encoder says of it. Other models' outputs are in folders
    beside this one. warn: told once, if nothing can be written; the encoder is then computed each time.
    """

    def __init__(
        self,
        directory: str | Path,
        encoder: nn.Module,
        *,
        precision: str,
        warn: Callable[[str], None] = lambda what: None,
    ):
        config: Any = encoder.config
        self.d_model: int = config.d_model
        weights = f"{FORMAT} {precision} {torch.__version__}".encode()
        for name, value in sorted(encoder.state_dict().items()):
            weights = hash_of(weights + name.encode() + value.detach().float().cpu().contiguous().numpy().tobytes())
        self.directory = Path(directory) / weights.hex()
        what = f"the encoder's outputs cannot be kept in {self.directory}"
        slower = "they are computed in each epoch, which is slower"
        self._kept = KeptValues(self.directory, lambda reason: warn(f"{what}: {reason}; {slower}"))

    def bytes_of(self, lengths: Sequence[int]) -> int:
        """Return how many bytes clips of so many mel frames take."""
        return sum(frames // 2 * self.d_model * STORED.itemsize for frames in lengths)

    def make_room(self, needed: int, budget: int) -> None:
        """Make room for so many bytes: other models' outputs go, the least recently used first. Raises RunError."""
        if needed > budget:
            what = f"the encoder's outputs take {size(needed)}, but encoder_cache_gb allows {size(budget)}"
            raise RunError(what, remedy=REMEDY)
        self.directory.mkdir(parents=True, exist_ok=True)
        os.utime(self.directory)  # used now, also if nothing is added
        held = _bytes_in(self.directory)
        others = [folder for folder in self.directory.parent.iterdir() if folder.is_dir() and folder != self.directory]
        for folder in sorted(others, key=lambda folder: folder.stat().st_mtime):
            if sum(map(_bytes_in, self.directory.parent.iterdir())) + needed - held <= budget:
                break
            shutil.rmtree(folder, ignore_errors=True)
        free = shutil.disk_usage(self.directory).free
        if needed - held > free:
            what = f"the encoder's outputs take {size(needed)}, but {self.directory} has {size(free)} free"
            raise RunError(what, remedy=REMEDY)

    def key(self, log_mel: np.ndarray) -> bytes:
        """Hash a padded log-mel, float32 [80|128, frames]."""
        return hash_of(f"{log_mel.shape}".encode() + log_mel.tobytes())

    def get(self, keys: Sequence[bytes]) -> list[Tensor] | None:
        """Return the states of each clip, float32 [frames / 2, d_model]; None if one of them is not stored."""
        found = []
        for value in [self._kept.get(key) for key in keys]:  # all: what is damaged is to be stored again
            if value is None:
                return None
            states = torch.from_numpy(np.frombuffer(value, STORED).astype(np.float32))
            found.append(states.unflatten(0, (-1, self.d_model)))
        return found

    def put(self, keys: Sequence[bytes], states: Sequence[Tensor]) -> list[Tensor]:
        """Keep the states of each clip, [frames / 2, d_model], on any device. Return what `get` will give.

        Kept or not: so a run has the same bits, interrupted or not. What is too large for fp16 stays as it is.
        """
        rounded = [state.detach().half().float() for state in states]
        fits = [bool(one.isfinite().all()) for one in rounded]
        for key, one, is_whole in zip(keys, rounded, fits, strict=True):
            if self._kept.is_writable and is_whole:
                self._kept.put(key, one.cpu().numpy().astype(STORED).tobytes())
        return [one if is_whole else state for one, is_whole, state in zip(rounded, fits, states, strict=True)]


def _bytes_in(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # another process may be renaming it
                total += Path(path, name).stat().st_size
    return total
