"""Settings that all strategies have: optimizer, learning rate, clipping; and the table of strategies by name.

Files named X_settings.py beside a strategy's X.py import no torch, so that a command line can show settings at once.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, Field, dataclass, fields
from functools import partial
from types import NoneType
from typing import Any, TypeVar, get_args

from exogym.config import at_least, check_keys, check_type, check_types, from_text, hints_of, one_of, refuse, setting
from exogym.errors import SettingError

OPTIMIZERS = ("adamw", "adam", "sgd")
INNER_OPTIMIZERS = (*OPTIMIZERS, "low_memory")
BY_NAME = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "rmsprop": "RMSprop", "adagrad": "Adagrad"}  # in torch.optim
SCHEDULES = ("constant", "linear", "cosine")
COSINE_END = 0.1  # of the peak, as in exo-explore/gym


@dataclass(frozen=True)
class OptimSpec:
    """One optimizer and all its numbers; `betas` and `eps` are Adam's, `momentum` and `nesterov` SGD's.

    What is not given is as in torch: also weight_decay, 0.01 for adamw and 0 for the others.
    name: adamw, adam or sgd, or torch's class of that name. With rmsprop, adagrad, any other class, or other numbers
    than these, as `dampening`, it becomes a functools.partial of the class, which a strategy takes, too.
    """

    def __new__(cls, name: Any = "adamw", **numbers: Any) -> Any:
        is_torchs = inspect.isclass(name) and name.__module__.startswith("torch.optim")
        known = name.__name__.lower() if is_torchs else name
        if known in OPTIMIZERS and numbers.keys() <= cls.__dataclass_fields__.keys():
            return super().__new__(cls)
        if isinstance(name, str):
            name = getattr(importlib.import_module("torch.optim"), BY_NAME[one_of("optimizer", name, BY_NAME)])
        if not callable(name):
            raise SettingError(f"an OptimSpec is of a name or of an optimizer's class, not of {name!r}")
        return partial(name, **numbers)

    @classmethod
    def from_string(cls, name: str, **numbers: Any) -> Any:
        return cls(name.lower(), **numbers)

    name: str = "adamw"
    _: KW_ONLY
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = None  # type: ignore[assignment]  # by the name, if not given
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.name, type):
            object.__setattr__(self, "name", self.name.__name__.lower())
        if self.weight_decay is None:
            object.__setattr__(self, "weight_decay", 0.01 if self.name == "adamw" else 0.0)
        check_types(self)
        at_least("lr", self.lr, 0)
        at_least("weight_decay", self.weight_decay, 0)
        at_least("eps", self.eps, 0)
        betas = self.betas if isinstance(self.betas, (tuple, list)) else [self.betas]
        for value in (*betas, self.momentum):
            check_type("each of betas", float, value)
            if not 0 <= value < 1:
                raise SettingError(f"betas and momentum must be in [0, 1), not {value}")
        if self.nesterov and not self.momentum:
            raise SettingError("nesterov = true needs a momentum above 0")


# A name, numbers too, or an optimizer class: any callable that takes parameters and returns a torch optimizer.
Optim = str | OptimSpec | Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """Learning rate over the run: linear warm-up, then `name` down to `min_ratio` times the peak.

    min_ratio: 0.1 with cosine and 0 with linear, if not given.
    """

    name: str = "constant"
    warmup_steps: int = 0
    min_ratio: float = None  # type: ignore[assignment]  # by the name, if not given

    def __post_init__(self) -> None:
        one_of("schedule", self.name, SCHEDULES)
        if self.min_ratio is None:
            object.__setattr__(self, "min_ratio", COSINE_END if self.name == "cosine" else 0.0)
        check_types(self)
        at_least("warmup_steps", self.warmup_steps, 0)
        if not 0 <= self.min_ratio <= 1:
            raise SettingError(f"min_ratio must be in [0, 1], not {self.min_ratio}")

    def factor(self, step: float, total_steps: float) -> float:
        """Return the multiplier of the peak rate for optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return min(1.0, (step + 1) / self.warmup_steps)  # a stretched run has fractions of steps
        if self.name == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps))
        decay = 1 - progress if self.name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_ratio + (1 - self.min_ratio) * decay


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """The settings of every strategy: the optimizer that each rank runs on its own device, and its learning rate.

    A subclass adds fields made by `setting`. Types, choices, and the least value of a number are checked here.
    A field's default is a profile's, whose runs fine-tune; `usual` has what a strategy's constructor takes instead.
    """

    inner_optim: Optim = setting(
        "adamw", "optimizer of each step (demo has its own)", choices=INNER_OPTIMIZERS, example="adamw"
    )
    lr: float | None = setting(None, "peak learning rate (the optimizer's own default if not given)", low=0)
    weight_decay: float | None = setting(
        None, "weight decay (the optimizer's own default if not given), none for biases and norms", low=0
    )
    max_norm: float | None = setting(None, "clip the gradient to this norm (never, if not given)")
    schedule: str | ScheduleSpec = setting("constant", "learning rate over the run: constant, linear or cosine")
    warmup_steps: int | None = setting(None, "optimizer steps of linear warm-up (0 if not given)")
    min_lr_ratio: float | None = setting(
        None, "the schedule ends at this fraction of lr (0 if not given)", example="0.1"
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            if "low" in each.metadata:  # made by `setting`
                self._check(each)
        self._check_inner_optim()
        if self.max_norm is not None and not self.max_norm > 0:
            raise SettingError(f"max_norm must be above 0, not {self.max_norm}")
        self.schedule_spec()

    def _check(self, field: Field[Any]) -> None:
        """Raise SettingError if the value of a field made by `setting` is not what the field says."""
        value, metadata = getattr(self, field.name), field.metadata
        owner = next(kind for kind in type(self).__mro__ if field.name in inspect.get_annotations(kind))
        hint = hints_of(owner)[field.name]
        if value is None and (field.default is None or NoneType in get_args(hint)):
            return
        check_type(field.name, hint, value)
        if metadata["low"] is not None:
            at_least(field.name, value, metadata["low"])
        if metadata["choices"] and (isinstance(value, str) or hint is str):
            one_of(field.name, value, metadata["choices"])

    def _check_inner_optim(self) -> None:
        check_optim("inner_optim", self.inner_optim, lr=self.lr, weight_decay=self.weight_decay)

    @classmethod
    def usual(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the papers' and upstream's values of settings that are not `given` to a strategy's constructor."""
        return {"min_lr_ratio": COSINE_END} if given.get("schedule") == "cosine" else {}

    def schedule_spec(self) -> ScheduleSpec:
        """Return the schedule with its numbers. Raises SettingError if they are given twice."""
        warmup, end = self.warmup_steps, self.min_lr_ratio
        if isinstance(self.schedule, str):
            return ScheduleSpec(name=self.schedule, warmup_steps=warmup or 0, min_ratio=end or 0.0)
        if not isinstance(self.schedule, ScheduleSpec):
            what = f"schedule must be {', '.join(SCHEDULES)} or a ScheduleSpec, not {self.schedule!r}"
            raise SettingError(f"{what}: others cannot be laid out anew where hosts come and go")
        if warmup is not None or end is not None:
            raise SettingError("schedule is a ScheduleSpec: set warmup_steps and min_ratio in it, not beside it")
        return self.schedule

    @property
    def steps_in_round(self) -> int:
        """Optimizer steps between two agreements: H, where a strategy has such a setting."""
        return getattr(self, "H", 1)


def check_optim(key: str, optim: Optim, **beside: Any) -> None:
    """Refuse what is no optimizer, and numbers beside a spec that already has them."""
    if isinstance(optim, OptimSpec):
        refuse(f"{key} is an OptimSpec with settings of its own", **beside)
    elif isinstance(optim, partial) and inspect.isclass(optim.func):
        try:
            inspect.signature(optim.func).bind_partial(**optim.keywords)
        except TypeError as error:
            raise SettingError(f"{key}: {optim.func.__name__} {error}") from None
    elif not isinstance(optim, str) and not callable(optim):
        raise SettingError(f"{key} must be a name, an OptimSpec or an optimizer class, not {optim!r}")


# Strategies by name, for profiles and command lines.

# name -> its settings and where the strategy is, as "module:class"; the strategy is imported only when it is built
STRATEGIES: dict[str, tuple[type[StrategyConfig], str]] = {}
Settings = TypeVar("Settings", bound=type[StrategyConfig])


def register(name: str, strategy: str) -> Callable[[Settings], Settings]:
    """Return a decorator for the settings of a strategy that can be chosen by `name`. strategy: "module:class"."""

    def add(config: Settings) -> Settings:
        STRATEGIES[name] = config, strategy
        return config

    return add


def strategy_config(name: str, settings: Mapping[str, Any]) -> StrategyConfig:
    """Return the checked settings of strategy `name`; values may be text, as an INI file has them.

    Raises SettingError.
    """
    config_class, _ = STRATEGIES[one_of("strategy", name, STRATEGIES)]
    check_keys(f"strategy {name}", settings, [each.name for each in fields(config_class)])
    hints = hints_of(config_class)  # type: ignore[arg-type]  # a class is hashable: mypy takes it for its instances
    values: dict[str, Any] = dict(settings)
    for name, text in settings.items():
        if isinstance(text, str):
            try:
                values[name] = from_text(hints[name], text)
            except SettingError as error:
                kind = str(error).removeprefix("expected ")
                raise SettingError(f"{name} = {text.strip()!r} is not {kind}") from None
    return config_class(**values)


def build_strategy(name: str, settings: Mapping[str, Any]) -> Any:
    """Return a strategy, ready for `setup`, from its name and its keys, as its constructor does. Imports torch."""
    usual = STRATEGIES[one_of("strategy", name, STRATEGIES)][0].usual(settings)
    return strategy_of(strategy_config(name, usual | dict(settings)))


def strategy_of(config: StrategyConfig) -> Any:
    """Return the strategy that these are the settings of, ready for `setup`. Imports torch."""
    module, class_name = next(place for kind, place in STRATEGIES.values() if kind is type(config)).split(":")
    return getattr(importlib.import_module(module), class_name)(**vars(config))
