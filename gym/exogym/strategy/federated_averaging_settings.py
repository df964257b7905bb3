"""Settings of federated averaging; they import no torch."""

from __future__ import annotations

from dataclasses import dataclass

from exogym.config import setting
from exogym.strategy.strategy_settings import StrategyConfig, register


@register("fedavg", "exogym.strategy.federated_averaging:FedAvgStrategy")
@dataclass(frozen=True, kw_only=True)
class FedAvgConfig(StrategyConfig):
    """Ranks train alone for H steps, then take the mean of their weights (1602.05629), all or in islands."""

    H: int = setting(1, "optimizer steps in a round", low=1, example="20")
    island_size: int | None = setting(
        None, "ranks that average with each other (all, if not given)", low=1, example="2"
    )

    @property
    def steps_in_round(self) -> int:
        return self.H
