"""Settings of the pipeline; they import no torch."""

from __future__ import annotations

from dataclasses import dataclass

from exogym.config import setting
from exogym.strategy.strategy_settings import StrategyConfig, register


@register("pipeline", "exogym.strategy.pipeline:PipelineStrategy")
@dataclass(frozen=True, kw_only=True)
class PipelineConfig(StrategyConfig):
    """Each rank has a part of the model, which as a whole may fit none of them."""

    wire: str = setting(
        "bf16",
        "how activations and their gradients travel: bf16, or float32, with which ranks equal one",
        choices=("bf16", "float32"),
        example="float32",
    )
