"""What a training loop sees of any way to combine the work of several ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from exogym.comm.comm import Comm
from exogym.config import StrategyConfig, check_keys
from exogym.errors import SettingError
from exogym.flat import FlatParameters
from exogym.strategy.optim import Schedule, inner_optimizer, named


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step, or the end of a round, did. `bytes` and `seconds_communicating` are its own.

    agreed: all ranks hold the same weights now and have made the same calls: a point to validate or save at.
    stop: some rank asked to stop and all know it.
    digest: hash of the agreed weights, where ranks are to compare it.
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

    Its settings are the fields of `Config`, and no others. Picklable until `setup`. Every rank calls `local_step` once
    for each optimizer step, also one without work (weight 0). When `is_round_due`, at the end of the work and when a
    rank wants to stop, all ranks end their round: they run `exchange` as one joint action (Comm.commit_together), and
    once it counts `apply` what it gave.

    drifts: the parts of agreed_state that each rank computes by itself with arithmetic that may differ from machine to
    machine, in the last bit. They are handed to newcomers, and are not compared.
    """

    Config: type[StrategyConfig]
    drifts: tuple[str, ...] = ()

    def __init__(self, **settings: Any):
        known = [f.name for f in fields(self.Config)]
        check_keys(type(self).__name__, settings, known)
        self.config = self.Config(**{key: named(value) for key, value in settings.items()})
        self.steps = 0

    def setup(self, model: nn.Module, comm: Comm, total_steps: int) -> None:
        """Take on the model, already on its device. That ranks start alike is the caller's affair: state_sync.py."""
        self.comm = comm
        self.parameters = FlatParameters(model)
        if not self.parameters.num_parameters:
            raise SettingError("the model has no trainable parameters")
        self.optimizer = inner_optimizer(self.config, self.parameters.parameters)
        self.schedule = Schedule(self.config.schedule_spec(), self.optimizer, total_steps)
        self._flat: Tensor | None = None
        self._flat_of: int | None = None
        self._start(self.parameters.read())

    def _payload(self, extra: int) -> Tensor:
        """What travels, [numel + extra]: zeros, or what was sent last.

        A fresh one for each generation, since a peer of an older one may still write into its own.
        """
        if self._flat is None or self._flat_of != self.comm.generation:
            self._flat, self._flat_of = self.parameters.empty(extra), self.comm.generation
        return self._flat

    @abstractmethod
    def _start(self, flat: Tensor) -> None:
        """Keep what the strategy needs of the common first weights; `flat` is the strategy's own."""

    @abstractmethod
    def local_step(self, weight: float, samples: int) -> StepResult:
        """What a rank does by itself in an optimizer step. `.grad` holds the sum of weight * d(loss) of its batches.

        weight: what those weights add up to (target tokens, as a rule), samples: how many there were, 0 without work.
        Gradients that are not finite are left out, see StepResult.skipped.
        """

    @property
    @abstractmethod
    def is_round_due(self) -> bool:
        """Whether the step just made is the last one of a round."""

    @property
    @abstractmethod
    def has_open_round(self) -> bool:
        """Whether steps were made since the last round's end."""

    @abstractmethod
    def exchange(self, stopping: bool) -> Any:
        """The collectives of a round's end. It changes nothing that it needs again: other ranks may have to repeat it.

        stopping: this rank wants to stop; see StepResult.stop for when all do. Raises PeerLost.
        """

    @abstractmethod
    def about(self, exchanged: Any) -> dict[str, Any]:
        """What goes with this rank's vote: the number of the `round`, and whether it is `cut_short` by a stop."""

    @abstractmethod
    def apply(self, exchanged: Any, local: StepResult) -> StepResult:
        """Take on what the ranks have agreed on. local: of the step that ended the round."""

    def is_drift_check_due(self, *, at_least: bool) -> bool:
        """Right after an agreement: whether ranks should compare their weights now. at_least: they are needed now."""
        return False

    @abstractmethod
    def load_weights(self, flat: Tensor) -> None:
        """Take on the agreed weights of another rank, [numel] on the CPU, after an agreement; all else stays."""

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
        """After `setup`. Leaves what is this rank's own, but for the round that it was in: that is void."""

    def own_state(self) -> dict[str, Any]:
        """What this rank needs besides, at the same moment, to go on bit for bit."""
        return {}

    def load_own_state(self, state: dict[str, Any], *, inside: bool) -> None:  # noqa: B027
        """After load_agreed_state, on the same rank. inside: also the part of a round that it had made."""

    @abstractmethod
    def agreed_weights(self) -> Tensor:
        """Flat [numel] on the CPU, not to be changed."""
