"""Settings of the parameter server; they import no torch."""

from __future__ import annotations

from dataclasses import dataclass

from exogym.errors import SettingError
from exogym.strategy.diloco_settings import DiLoCoConfig, refuse_overlap
from exogym.strategy.strategy_settings import register


@register("parameter_server", "exogym.strategy.parameter_server:ParameterServerStrategy")
@dataclass(frozen=True, kw_only=True)
class ParameterServerConfig(DiLoCoConfig):
    """DiLoCo with a server: rank 0 alone holds the outer optimizer, and sends the new weights to the others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wire != "float32":
            raise SettingError(f"wire = {self.wire}: a parameter server sends float32 only. Remove it, or take diloco")
        refuse_overlap("a parameter server", self.overlap_steps)
        if self.share_moments:
            raise SettingError("share_moments: a parameter server keeps no moments. Remove it, or take diloco")
