"""The settings of a run, with their defaults; those of a strategy are beside it, in strategy/X_settings.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from exogym.comm.comm import DEFAULT_TIMEOUT
from exogym.config import at_least, check_keys, check_types, check_whole, one_of, refuse
from exogym.device import PRECISIONS
from exogym.errors import SettingError
from exogym.strategy.strategy import Strategy
from exogym.strategy.upstream import fit_arguments

VAL_SIZE = 64
AUTOCAST = {True: "bf16", "bf16": "bf16", False: "float32"}  # what `fit(autocast=...)` takes, as a precision


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """The settings of the training loop of a rank; TrainNode takes these.

    num_epochs, max_steps (of the optimizer): whichever ends first.
    val_interval: steps from one validation to the next (an epoch, if None). It takes place once ranks next agree: in
    between each has its own weights. Where the work was just resharded it waits for the agreement after that, since its
    data may be on their way.
    checkpoint_interval: agreements (rounds, or steps of a strategy without rounds) from one checkpoint to the next. 0:
    none but when a rank is given the state of others, and when it is stopped.
    resume: go on from the newest checkpoint that all ranks have, bit for bit as if nothing had happened. If there is
    none, the newest that any has is given to the others, whose inner optimizers start anew; if nobody has one, training
    starts from the beginning. Epochs, ranks and device may be others then; another model, strategy or data set is
    refused.
    log_correlation: agreements from one measurement of how alike the ranks' weights are to the next (rounds/round.py);
    0: never. With a strategy whose ranks have the same weights at every step there is nothing to measure.
    early_stopping: validations in a row without a new lowest loss, after which training ends; 0: never.
    keep_best: at the end the model has the weights of the validation with the lowest loss, not the last ones. Each rank
    keeps them meanwhile, also in its checkpoints.
    auto_shares: share the work in proportion to the ranks' measured speeds where these differ by more than a tenth, and
    anew when they change (shares.py). Faster ranks then have larger batches, and a run cannot be repeated bit for bit.
    """

    num_epochs: int | None = None
    max_steps: int | None = None
    val_interval: int | None = None
    device: str | None = None
    precision: str = "float32"
    checkpoint_interval: int = 0
    resume: bool = False
    auto_shares: bool = False
    log_correlation: int = 0
    early_stopping: int = 0
    keep_best: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.device, torch.device):
            object.__setattr__(self, "device", str(self.device))
        check_types(self)
        one_of("precision", self.precision, PRECISIONS)
        if self.num_epochs is None and self.max_steps is None:
            raise SettingError("give num_epochs or max_steps")
        _check_whole(self, {"val_interval": 1, "checkpoint_interval": 0, "log_correlation": 0})
        _check_whole(self, {"num_epochs": 0, "max_steps": 0, "early_stopping": 0})


@dataclass(frozen=True, kw_only=True)
class FitSettings(LoopSettings):
    """All that `fit` can be told; picklable. `fit` takes `autocast` (True, "bf16" or False) in place of `precision`.

    num_epochs: 1, if max_steps is not given either.
    batch_size: samples of one rank in an optimizer step. minibatch_size: samples in a forward pass.
    gradient_accumulation: forward passes in which a step's batch is computed, another way to say minibatch_size.
    Without both, a rank takes as many samples at once as fit into its memory, which it measures before it trains. The
    passes are weighted, so that their number changes results by rounding only (not so with BatchNorm).
    max_memory_usage: the part (0 to 1) of the memory available that a rank may take, shared with the ranks of the same
    machine or accelerator; 0.8, if None. Beside minibatch_size or gradient_accumulation it takes effect if it is given:
    then passes that do not fit are made smaller, with a "warning" event.
    val_size: samples of a validation set that are used, spread evenly over it (64 if not given; None: all; 0: none).
    Where a factory makes the validation sets, it is for each rank's.
    device: where all ranks train (the best there is, if None). devices: one for each rank, names or numbers of CUDA
    cards; fewer than ranks are used in turn.
    seed: shuffling, and with the rank added, all other randomness, as dropout. timeout: seconds that a rank waits for
    the slowest before it gives it up; a round of DiLoCo must fit in. save_dir: where each rank has files of its own.
    """

    strategy: Strategy
    num_nodes: int = 1
    batch_size: int = 16
    minibatch_size: int | None = None
    gradient_accumulation: int | None = None
    max_memory_usage: float | None = None
    shuffle: bool = True
    val_size: int | None = VAL_SIZE
    devices: Sequence[str | int | torch.device] | None = None
    seed: int = 0
    timeout: float = DEFAULT_TIMEOUT
    save_dir: str | Path | None = None
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        if self.num_epochs is None and self.max_steps is None:
            object.__setattr__(self, "num_epochs", 1)
        super().__post_init__()
        if not isinstance(self.strategy, Strategy):
            raise SettingError(f"strategy must be a Strategy, as DiLoCoStrategy(H=100), not {self.strategy!r}")
        _check_whole(self, {"num_nodes": 1, "keep_checkpoints": 1, "seed": -math.inf})
        at_least("timeout", self.timeout, 0.1)
        self._check_sizes()
        self._check_devices()
        if self.save_dir is None:
            at_work = {"checkpoint_interval": self.checkpoint_interval or None, "resume": self.resume or None}
            refuse("without save_dir", **at_work)

    def _check_sizes(self) -> None:
        _check_whole(self, {"batch_size": 1, "minibatch_size": 1, "gradient_accumulation": 1, "val_size": 0})
        size, passes = self.minibatch_size, self.gradient_accumulation
        for name in ("minibatch_size", "gradient_accumulation"):
            if (getattr(self, name) or 1) > self.batch_size:
                raise SettingError(f"{name} ({getattr(self, name)}) is more than batch_size ({self.batch_size})")
        if size and passes and size != math.ceil(self.batch_size / passes):
            fits = math.ceil(self.batch_size / passes)
            what = f"gradient_accumulation = {passes} of batch_size = {self.batch_size} means minibatch_size = {fits}"
            raise SettingError(f"{what}, not {size}: give one of the two")
        if self.max_memory_usage is not None and not 0 < self.max_memory_usage <= 1:
            raise SettingError(f"max_memory_usage must be above 0 and at most 1, not {self.max_memory_usage}")

    def _check_devices(self) -> None:
        if self.devices is None:
            return
        refuse("devices has one for each rank", device=self.device)
        is_list = isinstance(self.devices, Sequence) and not isinstance(self.devices, str)
        if not is_list or not 1 <= len(self.devices) <= self.num_nodes:
            raise SettingError(f"devices must be a list of 1 to num_nodes ({self.num_nodes}), not {self.devices!r}")
        for device in self.devices:
            try:
                torch.device(f"cuda:{device}" if isinstance(device, int) else device)
            except (RuntimeError, TypeError):
                raise SettingError(f"devices: {device!r} is not a device: write mps, cuda:N, N or cpu") from None

    @property
    def samples_at_once(self) -> int | None:
        """The samples in a forward pass; None if that is to be found."""
        if self.gradient_accumulation:
            return math.ceil(self.batch_size / self.gradient_accumulation)
        return self.minibatch_size

    def device_of(self, rank: int) -> str | torch.device | None:
        if self.devices is None:
            return self.device
        device = self.devices[rank % len(self.devices)]
        return f"cuda:{device}" if isinstance(device, int) else device


def _check_whole(settings: LoopSettings, least: dict[str, float]) -> None:
    """Raise SettingError unless those of these settings that are given are whole numbers, and at least so much."""
    for name, minimum in least.items():
        if (value := getattr(settings, name)) is not None:
            check_whole(name, value, minimum)


def fit_settings(given: dict[str, Any]) -> FitSettings:
    """Return the settings that a caller has given to `fit`. Raises SettingError for a name that there is not."""
    names = [field.name for field in fields(FitSettings) if field.name != "precision"]
    settings = fit_arguments(given)
    check_keys("fit", settings, [*names, "autocast"])
    autocast = settings.pop("autocast", False)
    if not isinstance(autocast, (bool, str)) or autocast not in AUTOCAST:
        raise SettingError(f"autocast must be True, 'bf16' (which is the same) or False, not {autocast!r}")
    return FitSettings(**settings, precision=AUTOCAST[autocast])
