"""Settings of DeMo; they import no torch."""

from __future__ import annotations

from dataclasses import dataclass

from exogym.config import setting
from exogym.errors import SettingError
from exogym.strategy.strategy_settings import StrategyConfig, register


@register("demo", "exogym.strategy.demo:DeMoStrategy")
@dataclass(frozen=True, kw_only=True)
class DeMoConfig(StrategyConfig):
    """Each rank sends the largest frequencies of its own momentum, and all step along the sign of the mean."""

    inner_optim: str | None = setting(  # type: ignore[assignment]  # none may be given
        None, "may not be given: demo takes steps of sign-SGD", example="adamw"
    )
    compression_decay: float = setting(
        0.999, "momentum: the part of what was not sent that a step keeps", example="0.99"
    )
    compression_topk: int = setting(32, "coefficients that a step sends of each chunk", low=1, example="16")
    compression_chunk: int = setting(64, "edge of the chunks that are transformed, at most", low=1, example="32")
    check_interval: int = setting(
        100, "compare the ranks' weights every so many steps (0: only at the end)", low=0, example="50"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.compression_decay < 1:
            raise SettingError(f"compression_decay must be in [0, 1), not {self.compression_decay}")

    def _check_inner_optim(self) -> None:
        if self.inner_optim is not None:
            raise SettingError("inner_optim would not be used: demo takes steps of sign-SGD. Remove it")
