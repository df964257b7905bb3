"""What a training loop sees of any way to combine the work of several ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Self

from torch import Tensor, nn

from exogym.comm.comm import Comm
from exogym.config import StrategyConfig
from exogym.errors import SettingError
from exogym.flat import FlatParameters
from exogym.strategy.optim import Schedule, inner_optimizer


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one call of `step` or `finish` did. `bytes` and `seconds_communicating` are this call's own.

    agreed: all ranks hold the same weights now and have made the same calls: a point to validate or save at.
    stop: some rank asked to stop and all know it.
    digest: hash of the agreed weights, where ranks compared it.
    skipped: why nothing of this rank's counted in this step (a gradient that is not finite), or nothing.
    """

    lr: float = 0.0
    round: int | None = None
    digest: int | None = None
    bytes: int = 0
    seconds_communicating: float = 0.0
    grad_norm: float | None = None
    agreed: bool = False
    stop: bool = False
    skipped: str = ""


class Strategy(ABC):
    """Turns the gradients in a model's `.grad` into the next weights, together with the other ranks.

    Picklable until `setup`. Every rank calls `step` once for each optimizer step, also one without work (weight 0),
    until it has made `total_steps` of them or a result says stop; then `finish`.

    drifts: the parts of agreed_state that each rank computes by itself with arithmetic that may differ from machine to
    machine, in the last bit. They are handed to newcomers, and are not compared.
    """

    drifts: tuple[str, ...] = ()

    def __init__(self, config: StrategyConfig):
        self.config = config
        self.steps = 0

    @classmethod
    def from_config(cls, config: StrategyConfig) -> Self:
        return cls(**{f.name: getattr(config, f.name) for f in fields(config)})

    def setup(self, model: nn.Module, comm: Comm, total_steps: int) -> None:
        """Take on the model, already on its device. That ranks start alike is the caller's affair: state_sync.py."""
        self.comm = comm
        self.parameters = FlatParameters(model)
        if not self.parameters.num_parameters:
            raise SettingError("the model has no trainable parameters")
        self.optimizer = inner_optimizer(self.config, self.parameters.parameters)
        self.schedule = Schedule(self.config.schedule_spec(), self.optimizer, total_steps)
        self._start(self.parameters.read())

    @abstractmethod
    def _start(self, flat: Tensor) -> None:
        """Keep what the strategy needs of the common first weights; `flat` is the strategy's own."""

    @abstractmethod
    def step(self, weight: float, samples: int, stopping: bool = False) -> StepResult:
        """One optimizer step. `.grad` holds the sum of weight * d(loss) over this rank's micro-batches.

        weight: what those weights add up to (target tokens, as a rule), samples: how many there were, 0 without work.
        stopping: this rank wants to stop; see StepResult.stop for when all do.
        Gradients that are not finite are left out, see StepResult.skipped. Raises PeerLost, RanksDiverged.
        """

    @abstractmethod
    def finish(self) -> StepResult | None:
        """Make the ranks agree after the last step, if they do not yet. None if there was nothing to do."""

    def is_sync_due(self, *, at_least: bool) -> bool:
        """Right after an agreement: whether ranks should compare their weights now. at_least: they are needed now."""
        return False

    def load_weights(self, flat: Tensor) -> None:
        """Take on the agreed weights of another rank, [numel] on the CPU, after an agreement; all else stays."""
        raise NotImplementedError

    @property
    @abstractmethod
    def agreements(self) -> int:
        """How often the ranks had agreed by state_dict(): rounds, or steps for a strategy without rounds."""

    @property
    def cut_short(self) -> bool:
        """Whether state_dict() lies inside a round, since a stop made the ranks agree before its end."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """agreed_state and own_state. With them another process goes on bit for bit.

        After a stop it is the state before the ranks were made to agree ahead of time: see `cut_short`.
        """
        return {"agreed": self.agreed_state(), "own": self.own_state()}

    @abstractmethod
    def agreed_state(self) -> dict[str, Any]:
        """What all ranks had in common when they last agreed, not copied: enough for a new rank to join."""

    @abstractmethod
    def load_agreed_state(self, state: dict[str, Any]) -> None:
        """After `setup`. Leaves what is this rank's own, but for a round that it was amid: that is void."""

    def own_state(self) -> dict[str, Any]:
        """What this rank needs besides, at the same moment, to go on bit for bit."""
        return {}

    def load_own_state(self, state: dict[str, Any], *, inside: bool) -> None:  # noqa: B027
        """After load_agreed_state, on the same rank. inside: also the part of a round that it had made."""

    @abstractmethod
    def agreed_weights(self) -> Tensor:
        """Flat [numel] on the CPU, not to be changed."""

    def catch_up(self) -> StepResult | None:
        """After load_own_state: end a round that was complete on this rank when it was cut short."""
        return None


@contextmanager
def metered(comm: Comm) -> Iterator[dict[str, Any]]:
    """Fills a dict with the `bytes` and `seconds_communicating` of what happens inside."""
    spent: dict[str, Any] = {}
    bytes_before, seconds_before = comm.bytes_sent, comm.seconds
    yield spent
    spent["bytes"] = comm.bytes_sent - bytes_before
    spent["seconds_communicating"] = comm.seconds - seconds_before
