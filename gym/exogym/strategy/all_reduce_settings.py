"""Settings of AllReduce; they import no torch."""

from __future__ import annotations

from dataclasses import dataclass

from exogym.config import setting
from exogym.errors import SettingError
from exogym.strategy.strategy_settings import StrategyConfig, register


@register("allreduce", "exogym.strategy.all_reduce:AllReduceStrategy")
@dataclass(frozen=True, kw_only=True)
class AllReduceConfig(StrategyConfig):
    """Gradients are averaged at every step."""

    check_interval: int = setting(
        100, "compare the ranks' weights every so many steps (0: only at the end)", low=0, example="50"
    )
    overlap: bool = setting(True, "send gradients while the backward pass still computes others", example="false")
    bucket_mb: float | None = setting(
        None, "MB of gradients that travel together (a sixteenth of all, 1 to 25, if not given)", example="25"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise SettingError(f"bucket_mb must be above 0, not {self.bucket_mb}")
