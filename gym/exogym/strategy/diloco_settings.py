"""Settings of DiLoCo; they import no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exogym.config import refuse, setting
from exogym.errors import SettingError
from exogym.strategy.strategy_settings import OPTIMIZERS, Optim, OptimSpec, StrategyConfig, check_optim, register

WIRES = ("float32", "bf16", "int8", "int4")


@register("diloco", "exogym.strategy.diloco:DiLoCoStrategy")
@dataclass(frozen=True, kw_only=True)
class DiLoCoConfig(StrategyConfig):
    """Ranks train alone for H steps, then an outer optimizer steps along the average change (2311.08105).

    The paper's outer step, for pre-training from scratch over many rounds, is `outer_momentum=0.9`: lr is then 0.7 if
    not given, and the momentum Nesterov's. A DiLoCoStrategy has it by default. In fine-tuning it overshot at every
    length that was tried: so in a profile, and with `outer_momentum=0`, ranks take the average itself: outer `sgd`, lr
    1. Other outer optimizers need `outer_lr`; by name they have no weight decay.
    """

    H: int = setting(100, "optimizer steps in a round", low=1, example="20")
    outer_optim: Optim = setting("sgd", "optimizer of each round", choices=OPTIMIZERS, example="sgd")
    outer_lr: float | None = setting(
        None, "learning rate of the outer optimizer (sgd: 1, with momentum 0.7)", low=0, example="0.7"
    )
    outer_momentum: float | None = setting(
        None,
        "momentum of the outer sgd (0: plain averaging); 0.9 for pre-training over many rounds",
        low=0,
        example="0.9",
    )
    nesterov: bool | None = setting(
        None, "Nesterov momentum in the outer sgd (true where there is momentum)", example="true"
    )
    wire: str = setting("float32", "how changes travel (parameter_server: float32)", choices=WIRES, example="int8")
    overlap_steps: int = setting(
        0,
        "inner steps that are made while a round's exchange travels (0: ranks wait for it); diloco only",
        low=0,
        example="10",
    )
    share_moments: bool = setting(
        False,
        "average Adam's second moments too, in 8 bits: a quarter in each of 16 rounds, later a 16th",
        example="true",
    )
    scale_lr: bool = setting(
        False,
        "multiply a rank's learning rate by the fourth root of (samples of all ranks / its own) in a step",
        example="true",
    )
    weigh_steps: bool = setting(
        False, "a rank's step counts by its target tokens, as its clips would in one batch of all", example="true"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap_steps >= self.H:
            what = f"overlap_steps = {self.overlap_steps} must be below the steps of a round, which are {self.H}"
            raise SettingError(f"{what}: make it smaller, or the round longer")
        if self.overlap_steps and not isinstance(self.outer_optim, (str, OptimSpec)):
            what = f"overlap_steps = {self.overlap_steps} needs an outer_optim that is given by name or as an OptimSpec"
            raise SettingError(f"{what}: with others ranks compare their weights after each round, and wait for that")
        for name in ("share_moments", "scale_lr"):
            if getattr(self, name) and not _is_adam(self.inner_optim):
                raise SettingError(f"{name} needs inner_optim adam or adamw, or a class made from torch's")
        momentum = {"outer_momentum": self.outer_momentum, "nesterov": self.nesterov}
        check_optim("outer_optim", self.outer_optim, outer_lr=self.outer_lr, **momentum)
        if self.outer_optim in ("adam", "adamw"):
            if self.outer_lr is None:
                raise SettingError(f"outer_optim = {self.outer_optim} needs outer_lr")
            refuse("outer_optim = " + self.outer_optim, **momentum)
        if isinstance(self.outer_optim, str):
            self.outer_spec()

    @classmethod
    def usual(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        return super().usual(given) | ({"outer_momentum": 0.9} if given.get("outer_optim", "sgd") == "sgd" else {})

    @property
    def is_plain(self) -> bool:
        """Tell whether the outer optimizer keeps no state: ranks then take the average, or go a part of the way."""
        outer = self.outer_spec() if isinstance(self.outer_optim, str) else self.outer_optim
        return isinstance(outer, OptimSpec) and outer.name == "sgd" and not (outer.momentum or outer.weight_decay)

    def outer_spec(self) -> OptimSpec:
        """Return the outer optimizer with its numbers, where it is given by name."""
        if self.outer_optim != "sgd":
            assert isinstance(self.outer_optim, str) and self.outer_lr is not None, "as __post_init__ has seen to it"
            return OptimSpec(name=self.outer_optim, lr=self.outer_lr, weight_decay=0.0)
        momentum = self.outer_momentum or 0.0
        nesterov = momentum > 0 if self.nesterov is None else self.nesterov
        lr = (0.7 if momentum else 1.0) if self.outer_lr is None else self.outer_lr
        return OptimSpec(name="sgd", lr=lr, momentum=momentum, nesterov=nesterov)


def _is_adam(optim: Optim) -> bool:
    """Tell whether an optimizer is Adam by its name, or by a class that is torch's own or made from it."""
    if isinstance(optim, type):
        return any(kind.__module__.startswith("torch.optim") and kind.__name__ == "Adam" for kind in optim.__mro__)
    return (optim.name if isinstance(optim, OptimSpec) else optim) in ("adam", "adamw")


def refuse_overlap(who: str, steps: int) -> None:
    """Raise SettingError for `overlap_steps` of a strategy whose ranks always wait."""
    if steps:
        what = f"overlap_steps = {steps}: with {who} ranks wait for the end of each exchange"
        raise SettingError(f"{what}. Remove it, or take diloco")
