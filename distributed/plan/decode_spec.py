"""DecodeSpec: how clips are transcribed, here and by each host that does a part of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from whisper_tuner.errors import ConfigError
from whisper_tuner.json_text import parse_json

from .json_fields import build, json_of

if TYPE_CHECKING:  # a host watches its stdin before it loads torch
    from torch import nn
    from transformers import WhisperProcessor

    from whisper_tuner.data.feature_store import FeatureStore
    from whisper_tuner.eval.evaluation import Transcript

BEFORE, AFTER = "before", "after"  # training: the two models of an evaluation


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSpec:
    """Paths start at the host's project folder. A model is there before the first clips that it is to transcribe.

    after: an adapter is added to `before`. greedy: no text is decoded again. cache_dir: where log-mels are kept,
    as fp16; "" if they are computed each time.
    """

    before: str
    after: str = ""
    cache_dir: str = ""
    device: str | None = None
    language: str | None = None
    task: str | None = None
    greedy: bool = False
    batch_size: int = 8
    num_threads: int = 0

    def transcribe(
        self,
        model: nn.Module,
        processor: WhisperProcessor,
        clips: Sequence[Path],
        *,
        features: FeatureStore | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Transcript]:
        """Return what a loaded model writes for each audio file, in order."""
        from whisper_tuner.eval import evaluation

        return evaluation.transcribe(
            model,
            processor,
            clips,
            language=self.language,
            task=self.task,
            temperatures=evaluation.GREEDY if self.greedy else evaluation.FALLBACK,
            batch_size=self.batch_size,
            features=features,
            progress=progress,
        )

    def to_json(self) -> str:
        return json_of(self)

    @classmethod
    def from_json(cls, text: str) -> DecodeSpec:
        """Raises ConfigError."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"decode spec: not JSON: {error}") from None
        return build(cls, data, "decode spec")
