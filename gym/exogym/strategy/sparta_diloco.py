"""SPARTA inside the rounds of DiLoCo: sparse averages keep ranks close, so that rounds may be longer."""

from __future__ import annotations

from exogym.strategy.communicate_optimize import CommunicationModule
from exogym.strategy.diloco import DiLoCoStrategy
from exogym.strategy.sparta import sparse_module
from exogym.strategy.sparta_diloco_settings import SPARTADiLoCoConfig


class SPARTADiLoCoStrategy(DiLoCoStrategy):
    """Ranks make a sparse average every `sparta_interval` steps and an outer step every H steps.

    Where both are due only the outer step is made: it brings all to the same weights. SPARTAStrategy and DiLoCoStrategy
    say more of each.
    """

    Config = SPARTADiLoCoConfig
    config: SPARTADiLoCoConfig

    def _modules(self) -> list[CommunicationModule]:
        return [sparse_module(self.config), *super()._modules()]
