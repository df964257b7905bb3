"""Settings of SPARTA, alone and inside the rounds of DiLoCo; they import no torch."""

from __future__ import annotations

from dataclasses import dataclass

from exogym.config import at_least, one_of, setting
from exogym.errors import SettingError
from exogym.strategy.diloco_settings import DiLoCoConfig, refuse_overlap
from exogym.strategy.strategy_settings import StrategyConfig, register

COMPRESSION_METHODS = ("random", "sequential", "partitioned", "topk")
QUANTIZATION_BITS = (4, 8, 16)


@register("sparta", "exogym.strategy.sparta:SPARTAStrategy")
@dataclass(frozen=True, kw_only=True)
class SPARTAConfig(StrategyConfig):
    """Ranks average a small part of their weights, another one each time (SPARTA, Beton et al. 2025)."""

    p_sparta: float = setting(0.005, "part of the weights that is averaged at a time", example="0.01")
    sparta_interval: int = setting(1, "optimizer steps from one such average to the next", low=1, example="5")
    compression_method: str = setting(
        "random", "which weights are averaged", choices=COMPRESSION_METHODS, example="topk"
    )
    quantization_bits: int | None = setting(
        None, "bits of a weight that is sent: 4, 8 or 16 (32 if not given)", example="8"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sparse(self.p_sparta, self.compression_method, self.quantization_bits, "p_sparta")

    @property
    def steps_in_round(self) -> int:
        return self.sparta_interval


@register("sparta_diloco", "exogym.strategy.sparta:SPARTADiLoCoStrategy")
@dataclass(frozen=True, kw_only=True)
class SPARTADiLoCoConfig(SPARTAConfig, DiLoCoConfig):
    """SPARTA inside the rounds of DiLoCo."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_overlap("sparta_diloco", self.overlap_steps)

    @property
    def steps_in_round(self) -> int:
        return min(self.sparta_interval, self.H)


def check_sparse(rate: float, method: str, bits: int | None, name: str) -> None:
    """Raise SettingError if these settings of a sparse average make no sense. name: that of the rate."""
    at_least(name, rate, 0)
    if not 0 < rate <= 1:
        raise SettingError(f"{name} must be above 0 and at most 1, not {rate}")
    one_of("compression_method", method, COMPRESSION_METHODS)
    if bits is not None and bits not in QUANTIZATION_BITS:
        raise SettingError(f"quantization_bits must be 4, 8 or 16, not {bits}")
