"""Settings of AllReduce; they import no torch."""

from __future__ import annotations

from dataclasses import dataclass

from exogym.config import setting
from exogym.errors import SettingError
from exogym.strategy.strategy_settings import OPTIMIZERS, OptimSpec, StrategyConfig, register


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
    shard_optimizer: bool = setting(
        False, "divide the moments of adamw, adam or sgd among the ranks (ZeRO-1): less memory", example="true"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise SettingError(f"bucket_mb must be above 0, not {self.bucket_mb}")
        name = self.inner_optim.name if isinstance(self.inner_optim, OptimSpec) else self.inner_optim
        if self.shard_optimizer and name not in OPTIMIZERS:
            what = f"shard_optimizer = true needs an optimizer that treats each weight by itself, not {name}"
            raise SettingError(f"{what}: set one of {', '.join(OPTIMIZERS)}, or shard_optimizer = false")
