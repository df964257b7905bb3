"""Settings of optimizers, schedules and strategies. Imports no torch, so that a command line can show them at once."""

# ruff: noqa: RUF009  (setting() returns a dataclass field)

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from numbers import Integral
from typing import Any

from exogym.errors import SettingError, UnknownSetting

OPTIMIZERS = ("adamw", "adam", "sgd")
SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class OptimSpec:
    """One optimizer and all its numbers; `betas` and `eps` are Adam's, `momentum` and `nesterov` SGD's.

    name: adamw, adam or sgd, or torch's class of that name. For any other optimizer give a strategy the class itself,
    or a functools.partial of it with its numbers.
    """

    name: str = "adamw"
    _: KW_ONLY
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.name, type):
            object.__setattr__(self, "name", _name_of(self.name))
        one_of("optimizer", self.name, OPTIMIZERS)
        at_least("lr", self.lr, 0)
        at_least("weight_decay", self.weight_decay, 0)
        at_least("eps", self.eps, 0)
        for value in (*self.betas, self.momentum):
            if not 0 <= value < 1:
                raise SettingError(f"betas and momentum must be in [0, 1), not {value}")
        if self.nesterov and not self.momentum:
            raise SettingError("nesterov = true needs a momentum above 0")


def _name_of(optimizer: type) -> str:
    name = optimizer.__name__.lower()
    if name not in OPTIMIZERS or not optimizer.__module__.startswith("torch.optim"):
        remedy = f"give the strategy functools.partial({optimizer.__name__}, lr=...) in place of an OptimSpec"
        raise SettingError(f"an OptimSpec knows {', '.join(OPTIMIZERS)}, not {optimizer.__name__}: {remedy}")
    return name


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """Learning rate over the run: linear warm-up, then `name` down to `min_ratio` times the peak."""

    name: str = "constant"
    warmup_steps: int = 0
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        one_of("schedule", self.name, SCHEDULES)
        at_least("warmup_steps", self.warmup_steps, 0)
        if not 0 <= self.min_ratio <= 1:
            raise SettingError(f"min_ratio must be in [0, 1], not {self.min_ratio}")

    def factor(self, step: float, total_steps: float) -> float:
        """Multiplier of the peak rate for optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return min(1.0, (step + 1) / self.warmup_steps)  # a stretched run has fractions of steps
        if self.name == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps))
        decay = 1 - progress if self.name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_ratio + (1 - self.min_ratio) * decay


# Other names that a strategy's constructor takes.
ALIASES = {"inner_lr": "lr", "lr_scheduler": "schedule"}


def without_aliases(settings: Mapping[str, Any]) -> dict[str, Any]:
    for alias, name in ALIASES.items():
        if alias in settings and name in settings:
            raise SettingError(f"{alias} is another name of {name}: give one of them")
    return {ALIASES.get(key, key): value for key, value in settings.items()}


# An optimizer class, or any callable that takes parameters and returns a torch optimizer.
OptimFactory = Callable[..., Any]
Optim = str | OptimSpec | OptimFactory


def setting(default: Any, kind: type, help: str) -> Any:
    """A dataclass field that also says how to read it from text, and what it is for."""
    return field(default=default, metadata={"kind": kind, "help": help})


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """What every strategy has: the optimizer that each rank runs on its own device."""

    inner_optim: Optim = setting("adamw", str, "optimizer of each step: adamw, adam or sgd (demo has its own)")
    lr: float | None = setting(None, float, "peak learning rate (the optimizer's own default if not given)")
    weight_decay: float | None = setting(None, float, "weight decay (0 if not given), none for biases and norms")
    max_norm: float | None = setting(None, float, "clip the gradient to this norm (never, if not given)")
    schedule: str | ScheduleSpec = setting("constant", str, "learning rate over the run: constant, linear or cosine")
    warmup_steps: int | None = setting(None, int, "optimizer steps of linear warm-up (0 if not given)")
    min_lr_ratio: float | None = setting(None, float, "the schedule ends at this fraction of lr (0 if not given)")

    def __post_init__(self) -> None:
        self._check_whole_numbers()
        self._check_inner_optim()
        if self.max_norm is not None and not self.max_norm > 0:
            raise SettingError(f"max_norm must be above 0, not {self.max_norm}")
        self.schedule_spec()

    def _check_whole_numbers(self) -> None:
        for each in fields(self):
            if each.metadata.get("kind") is int and (value := getattr(self, each.name)) is not None:
                check_whole(each.name, value)

    def _check_inner_optim(self) -> None:
        check_optim("inner_optim", self.inner_optim, lr=self.lr, weight_decay=self.weight_decay)

    def schedule_spec(self) -> ScheduleSpec:
        given = {"warmup_steps": self.warmup_steps, "min_ratio": self.min_lr_ratio}
        given = {key: value for key, value in given.items() if value is not None}
        if isinstance(self.schedule, str):
            return ScheduleSpec(name=self.schedule, **given)
        if given:
            raise SettingError("schedule is a ScheduleSpec: set warmup_steps and min_ratio in it, not beside it")
        return self.schedule

    @property
    def steps_in_round(self) -> int:
        """Optimizer steps between two agreements."""
        return 1


@dataclass(frozen=True, kw_only=True)
class AllReduceConfig(StrategyConfig):
    """Gradients are averaged at every step."""

    check_interval: int = setting(100, int, "compare the ranks' weights every so many steps (0: only at the end)")
    overlap: bool = setting(True, bool, "send gradients while the backward pass still computes others")
    bucket_mb: float | None = setting(
        None, float, "MB of gradients that travel together (a sixteenth of all, 1 to 25, if not given)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("check_interval", self.check_interval, 0)
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise SettingError(f"bucket_mb must be above 0, not {self.bucket_mb}")


WIRES = ("float32", "bf16", "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class DiLoCoConfig(StrategyConfig):
    """Ranks train alone for H steps, then an outer optimizer steps along the average change (2311.08105).

    By default the ranks take the average itself: outer `sgd`, lr 1, no momentum. The paper's outer step, for
    pre-training from scratch over many rounds, is `outer_momentum=0.9`: lr is then 0.7 if not given, and the momentum
    Nesterov's. In fine-tuning it overshot at every length that was tried. Other outer optimizers need `outer_lr`.
    """

    H: int = setting(100, int, "optimizer steps in a round")
    outer_optim: Optim = setting("sgd", str, "optimizer of each round: sgd, adam or adamw")
    outer_lr: float | None = setting(None, float, "learning rate of the outer optimizer (sgd: 1, with momentum 0.7)")
    outer_momentum: float | None = setting(
        None, float, "momentum of the outer sgd (0: plain averaging); 0.9 for pre-training over many rounds"
    )
    nesterov: bool | None = setting(None, bool, "Nesterov momentum in the outer sgd (true where there is momentum)")
    wire: str = setting("float32", str, "how changes travel: float32, bf16, int8 or int4 (parameter_server: float32)")
    overlap_steps: int = setting(
        0, int, "inner steps that are made while a round's exchange travels (0: ranks wait for it); diloco only"
    )
    share_moments: bool = setting(
        False,
        bool,
        "average Adam's second moments too, in 8 bits: a quarter in each of 16 rounds, later a 16th",
    )
    scale_lr: bool = setting(
        False, bool, "multiply a rank's learning rate by the fourth root of (samples of all ranks / its own) in a step"
    )
    weigh_steps: bool = setting(
        False, bool, "a rank's step counts by its target tokens, as its clips would in one batch of all"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("H", self.H, 1)
        one_of("wire", self.wire, WIRES)
        self._check_overlap()
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

    def _check_overlap(self) -> None:
        at_least("overlap_steps", self.overlap_steps, 0)
        if self.overlap_steps >= self.H:
            what = f"overlap_steps = {self.overlap_steps} must be below the steps of a round, which are {self.H}"
            raise SettingError(f"{what}: make it smaller, or the round longer")
        if self.overlap_steps and not isinstance(self.outer_optim, (str, OptimSpec)):
            what = f"overlap_steps = {self.overlap_steps} needs an outer_optim that is given by name or as an OptimSpec"
            raise SettingError(f"{what}: with others ranks compare their weights after each round, and wait for that")

    @property
    def steps_in_round(self) -> int:
        return self.H

    def outer_spec(self) -> OptimSpec:
        """The outer optimizer where it is given by name."""
        if self.outer_optim != "sgd":
            return OptimSpec(name=self.outer_optim, lr=self.outer_lr)
        momentum = self.outer_momentum or 0.0
        nesterov = momentum > 0 if self.nesterov is None else self.nesterov
        lr = (0.7 if momentum else 1.0) if self.outer_lr is None else self.outer_lr
        return OptimSpec(name="sgd", lr=lr, momentum=momentum, nesterov=nesterov)


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


@dataclass(frozen=True, kw_only=True)
class FedAvgConfig(StrategyConfig):
    """Ranks train alone for H steps, then take the mean of their weights (1602.05629), all or in islands."""

    H: int = setting(100, int, "optimizer steps in a round")
    island_size: int | None = setting(None, int, "ranks that average with each other (all, if not given)")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("H", self.H, 1)
        if self.island_size is not None:
            at_least("island_size", self.island_size, 1)

    @property
    def steps_in_round(self) -> int:
        return self.H


COMPRESSION_METHODS = ("random", "sequential", "partitioned", "topk")
QUANTIZATION_BITS = (4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class SPARTAConfig(StrategyConfig):
    """Ranks average a small part of their weights, another one each time (SPARTA, Beton et al. 2025)."""

    p_sparta: float = setting(0.005, float, "part of the weights that is averaged at a time")
    sparta_interval: int = setting(1, int, "optimizer steps from one such average to the next")
    compression_method: str = setting("random", str, "which weights: random, sequential, partitioned or topk")
    quantization_bits: int | None = setting(None, int, "bits of a weight that is sent: 4, 8 or 16 (32 if not given)")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sparse(self.p_sparta, self.compression_method, self.quantization_bits, "p_sparta")
        at_least("sparta_interval", self.sparta_interval, 1)

    @property
    def steps_in_round(self) -> int:
        return self.sparta_interval


@dataclass(frozen=True, kw_only=True)
class SPARTADiLoCoConfig(SPARTAConfig, DiLoCoConfig):
    """SPARTA inside the rounds of DiLoCo."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_overlap("sparta_diloco", self.overlap_steps)

    @property
    def steps_in_round(self) -> int:
        return min(self.sparta_interval, self.H)


def refuse_overlap(who: str, steps: int) -> None:
    if steps:
        what = f"overlap_steps = {steps}: with {who} ranks wait for the end of each exchange"
        raise SettingError(f"{what}. Remove it, or take diloco")


def check_sparse(rate: float, method: str, bits: int | None, name: str) -> None:
    if not 0 < rate <= 1:
        raise SettingError(f"{name} must be above 0 and at most 1, not {rate}")
    one_of("compression_method", method, COMPRESSION_METHODS)
    if bits is not None and bits not in QUANTIZATION_BITS:
        raise SettingError(f"quantization_bits must be 4, 8 or 16, not {bits}")


@dataclass(frozen=True, kw_only=True)
class DeMoConfig(StrategyConfig):
    """Each rank sends the largest frequencies of its own momentum, and all step along the sign of the mean."""

    inner_optim: str | None = setting(None, str, "may not be given: demo takes steps of sign-SGD")
    compression_decay: float = setting(0.999, float, "momentum: the part of what was not sent that a step keeps")
    compression_topk: int = setting(32, int, "coefficients that a step sends of a chunk (of smaller ones fewer)")
    compression_chunk: int = setting(64, int, "edge of the chunks that are transformed, at most")
    check_interval: int = setting(100, int, "compare the ranks' weights every so many steps (0: only at the end)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.compression_decay < 1:
            raise SettingError(f"compression_decay must be in [0, 1), not {self.compression_decay}")
        at_least("compression_topk", self.compression_topk, 1)
        at_least("compression_chunk", self.compression_chunk, 1)
        at_least("check_interval", self.check_interval, 0)

    def _check_inner_optim(self) -> None:
        if self.inner_optim is not None:
            raise SettingError("inner_optim would not be used: demo takes steps of sign-SGD. Remove it")
        for name in ("lr", "weight_decay"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 0)


# name -> its settings and where the strategy is; the strategy is imported only when it is built
STRATEGIES: dict[str, tuple[type[StrategyConfig], str]] = {
    "allreduce": (AllReduceConfig, "exogym.strategy.all_reduce:AllReduceStrategy"),
    "diloco": (DiLoCoConfig, "exogym.strategy.diloco:DiLoCoStrategy"),
    "parameter_server": (ParameterServerConfig, "exogym.strategy.parameter_server:ParameterServerStrategy"),
    "fedavg": (FedAvgConfig, "exogym.strategy.federated_averaging:FedAvgStrategy"),
    "sparta": (SPARTAConfig, "exogym.strategy.sparta:SPARTAStrategy"),
    "sparta_diloco": (SPARTADiLoCoConfig, "exogym.strategy.sparta_diloco:SPARTADiLoCoStrategy"),
    "demo": (DeMoConfig, "exogym.strategy.demo:DeMoStrategy"),
}


def strategy_config(name: str, settings: Mapping[str, Any]) -> StrategyConfig:
    """The validated settings of strategy `name`; values may be text, as an INI file has them. Raises SettingError."""
    config_class, _ = STRATEGIES[one_of("strategy", name, STRATEGIES)]
    known = {f.name: f for f in fields(config_class)}
    check_keys(f"strategy {name}", settings, known)
    values = {key: read_text(known[key], v) if isinstance(v, str) else v for key, v in settings.items()}
    return config_class(**values)


def build_strategy(name: str, settings: Mapping[str, Any]) -> Any:
    """A strategy, ready for `setup`, from its name and its keys. Imports torch."""
    return strategy_of(strategy_config(name, settings))


def strategy_of(config: StrategyConfig) -> Any:
    """The strategy that these are the settings of, ready for `setup`. Imports torch."""
    module, class_name = next(place for kind, place in STRATEGIES.values() if kind is type(config)).split(":")
    settings = {f.name: getattr(config, f.name) for f in fields(config)}
    return getattr(importlib.import_module(module), class_name)(**settings)


def read_text(setting_field: Field, text: str) -> Any:
    kind = setting_field.metadata["kind"]
    text = text.strip()
    if kind is str:
        return text
    if text.lower() in ("", "none") and setting_field.default is None:
        return None
    try:
        return {"true": True, "yes": True, "false": False, "no": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise SettingError(f"{setting_field.name} = {text!r} is not {_KIND_NAMES[kind]}") from None


_KIND_NAMES = {bool: "true or false", int: "a whole number", float: "a number"}


def check_optim(key: str, optim: Optim, **beside: Any) -> None:
    """Refuse an unknown optimizer, and numbers beside a spec that already has them."""
    if isinstance(optim, str):
        one_of(key, optim, OPTIMIZERS)
    elif isinstance(optim, OptimSpec):
        refuse(f"{key} is an OptimSpec with settings of its own", **beside)
    elif not callable(optim):
        raise SettingError(f"{key} must be a name, an OptimSpec or an optimizer class, not {optim!r}")
    for name, value in beside.items():
        if isinstance(value, (int, float)):
            at_least(name, value, 0)


def _is_adam(optim: Optim) -> bool:
    """By name, or a class of torch's own or made from it."""
    if isinstance(optim, type):
        return any(kind.__module__.startswith("torch.optim") and kind.__name__ == "Adam" for kind in optim.__mro__)
    return (optim.name if isinstance(optim, OptimSpec) else optim) in ("adam", "adamw")


def refuse(reason: str, **given: Any) -> None:
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise SettingError(f"{reason}: {', '.join(names)} would not be used")


def one_of(what: str, value: str, known: Iterable[str]) -> str:
    if value not in known:
        raise SettingError(f"unknown {what} {value!r}{nearest(value, known)} (known: {', '.join(known)})")
    return value


def check_keys(what: str, keys: Iterable[str], known: Iterable[str], also: Iterable[str] = ()) -> None:
    """Raises UnknownSetting. also: names that are proposed for a misspelt one."""
    for key in keys:
        if key not in known:
            raise UnknownSetting(f"{what} has no setting {key!r}{nearest(key, [*known, *also])}")


def at_least(name: str, value: float, minimum: float) -> None:
    if not minimum <= value < math.inf:
        raise SettingError(f"{name} must be at least {minimum}, not {value}")


def check_whole(name: str, value: float, minimum: float = -math.inf) -> None:
    if not isinstance(value, Integral):
        raise SettingError(f"{name} must be a whole number, not {value!r}")
    at_least(name, value, minimum)


def nearest(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` or nothing."""
    by_lower_case = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(str(word).lower(), by_lower_case, n=1)
    return f"; did you mean {by_lower_case[matches[0]]!r}?" if matches else ""
