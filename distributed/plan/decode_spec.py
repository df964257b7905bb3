"""DecodeSpec: what a host is told that transcribes a part of the clips."""

from __future__ import annotations

import dataclasses

from whisper_tuner.errors import ConfigError
from whisper_tuner.json_text import parse_json

from .json_fields import build, json_of

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
