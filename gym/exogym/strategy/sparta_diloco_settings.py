"""Settings of SPARTA inside the rounds of DiLoCo; they import no torch."""

from __future__ import annotations

from dataclasses import dataclass

from exogym.strategy.diloco_settings import DiLoCoConfig, refuse_overlap
from exogym.strategy.sparta_settings import SPARTAConfig
from exogym.strategy.strategy_settings import register


@register("sparta_diloco", "exogym.strategy.sparta_diloco:SPARTADiLoCoStrategy")
@dataclass(frozen=True, kw_only=True)
class SPARTADiLoCoConfig(SPARTAConfig, DiLoCoConfig):
    """SPARTA inside the rounds of DiLoCo."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_overlap("sparta_diloco", self.overlap_steps)

    @property
    def steps_in_round(self) -> int:
        return min(self.sparta_interval, self.H)
