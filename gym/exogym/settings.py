"""What a run can be told. Every default stands here, or in config.py with the strategy that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from exogym.comm.process_group import DEFAULT_TIMEOUT
from exogym.config import at_least, one_of
from exogym.device import PRECISIONS
from exogym.errors import SettingError
from exogym.strategy.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """What the training loop of a rank needs to know; TrainNode takes these.

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
    auto_shares: share the work in proportion to the ranks' measured speeds, anew at every epoch. Faster ranks then have
    larger batches, and a run cannot be repeated bit for bit.
    """

    num_epochs: int | None = None
    max_steps: int | None = None
    val_interval: int | None = None
    device: str | None = None
    precision: str = "float32"
    checkpoint_interval: int = 0
    resume: bool = False
    auto_shares: bool = False

    def __post_init__(self) -> None:
        one_of("precision", self.precision, PRECISIONS)
        if self.num_epochs is None and self.max_steps is None:
            raise SettingError("give num_epochs or max_steps")


@dataclass(frozen=True, kw_only=True)
class FitSettings(LoopSettings):
    """All that `fit` can be told; picklable.

    batch_size: samples of one rank in an optimizer step; minibatch_size: samples in a forward pass (all, if None).
    seed: shuffling, and with the rank added, dropout. timeout: seconds that a rank waits for the slowest before it
    gives it up; a round of DiLoCo must fit in. checkpoint_dir: where each rank has files of its own.
    """

    strategy: Strategy
    num_nodes: int = 1
    batch_size: int = 16
    minibatch_size: int | None = None
    shuffle: bool = True
    seed: int = 0
    timeout: float = DEFAULT_TIMEOUT
    checkpoint_dir: str | None = None
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("num_nodes", self.num_nodes, 1)
        at_least("timeout", self.timeout, 0.1)
        at_least("keep_checkpoints", self.keep_checkpoints, 1)
