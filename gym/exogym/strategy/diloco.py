"""DiLoCo: ranks train alone for H steps, then step together along the average change (Douillard et al., 2311.08105)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exogym.comm.comm import Comm
from exogym.config import check_keys
from exogym.flat import CHUNK, PIECE, FlatParameters, digest, is_finite
from exogym.strategy.communication_module import NOT_FINITE, CommunicationModule, Draft, Exchanged
from exogym.strategy.diloco_settings import DiLoCoConfig
from exogym.strategy.in_flight import OverlappingStrategy
from exogym.strategy.in_pieces import InPieces
from exogym.strategy.low_memory import LowMemory
from exogym.strategy.moments import Moments, SharedMoments, due
from exogym.strategy.optim import ExactAdam, ExactSGD, exact_from_spec, fading
from exogym.strategy.strategy import StepResult
from exogym.strategy.strategy_settings import OptimSpec
from exogym.strategy.upstream import strategy_settings
from exogym.strategy.wire import FloatSum, WireSum


class Means(NamedTuple):
    """The result of an exchange: means over the ranks, weighted by the samples that each trained.

    change: of the weights' changes in the round [numel], None if nobody has trained. moments: of Adam's second moments
    that were due, if any. weights, digest: the new common weights [numel] and their hash, where the outer optimizer is
    plain (`_is_plain`): `exchange` has taken its step already, and `change` is None.
    """

    change: Tensor | None
    moments: Tensor | None
    weights: Tensor | None = None
    digest: int | None = None


@dataclass(kw_only=True, eq=False, init=False)
class DiLoCoCommunicator(CommunicationModule):
    """An outer optimizer on the CPU, the same on all ranks.

    The pseudo-gradient is the mean of the ranks' changes, weighted by the samples that each trained in the round. A
    rank whose share has no clip in some steps makes fewer, larger ones; its change is multiplied as if it had made as
    many, because Adam's steps are equally long whatever the batch. Buffers take the mean itself. The outer optimizer
    sees the common weights as pieces of 64 MB, not as the model's tensors. One that is given by name takes the same
    steps on every CPU (ExactSGD, ExactAdam). With one of another kind ranks compare their weights after each round, and
    take on rank 0's where they differ.
    """

    config: DiLoCoConfig

    SETTINGS = ("outer_optim", "outer_lr", "outer_momentum", "nesterov", "wire", "share_moments")
    agrees = True
    Config = DiLoCoConfig

    def __init__(self, config: DiLoCoConfig | None = None, *, interval: int = 100, **settings: Any):
        """Take a strategy's `config`; in a composition, `interval` (or H) and those of SETTINGS that differ."""
        interval = settings.pop("H", interval)
        settings = strategy_settings(type(self).__name__, settings, self.SETTINGS)
        check_keys(type(self).__name__, settings, () if config else self.SETTINGS)
        super().__init__(interval=config.H if config else interval)
        self.config = config or self.Config(**self.Config.usual(settings) | settings, H=interval)

    def settings(self) -> dict[str, Any]:
        return {"interval": self.interval, **{name: getattr(self.config, name) for name in self.SETTINGS}}

    def setup(self, comm: Comm, parameters: FlatParameters, common: Tensor, *, keeps_common: bool) -> None:
        super().setup(comm, parameters, common, keeps_common=keeps_common)
        self.outer = self._outer_of(common)
        self.is_exact = isinstance(self.outer, (ExactSGD, ExactAdam))
        wire = self.config.wire
        self._sum = FloatSum(comm) if wire == "float32" else WireSum(comm, wire)
        self._moments: SharedMoments | None = None
        if self.config.share_moments:
            assert self.optimizer is not None
            self._moments = SharedMoments(comm, self.optimizer, parameters.parameters)
        self._own_moments: Moments | None = None  # as they were when the exchange began
        self._exchanges = 0

    def begin(self) -> None:
        self._own_moments, part = None, due(self._exchanges, self.parameters.num_parameters)
        if self._moments and part.start < part.stop and not self.is_last:
            self._own_moments = self._moments.read(part)

    def exchange(self, draft: Draft, samples: int, stopping: bool) -> Exchanged:
        """Sum the ranks' changes; the result is of the type Means."""
        change, skipped = self._sum.flat(self.parameters.numel), ""
        if samples and not self._read_change(draft, change, samples):
            samples, skipped = 0, NOT_FINITE
        if not samples:
            change.zero_()
        change, tail = self._sum.sum(torch.tensor([float(samples), float(stopping)]), last=self.is_last)
        total, stop = tail.tolist()
        moments = None
        # After a stop a rank resumes from its optimizer's state as it is now: the moments stay each rank's own.
        if self._moments and self._own_moments and not stop:
            moments = self._moments.exchange(self._own_moments, samples)
        if total > 0 and self._is_plain:
            weights = self._plain_step(change, 1 / total)
            return Exchanged(Means(None, moments, weights, digest(weights)), stop > 0, skipped)
        return Exchanged(Means(change.mul_(1 / total) if total > 0 else None, moments), stop > 0, skipped)

    def apply(self, result: Means, draft: Draft) -> None:
        self.common_digest = result.digest
        if result.weights is not None:
            self.common.copy_(result.weights)
        elif result.change is not None:
            self._outer_step(self.common, self.outer, result.change)
        if result.weights is not None or result.change is not None:
            self._sum.accept()
        if result.moments is not None:
            assert self._moments and self._own_moments
            self._moments.apply(result.moments, self._own_moments)
        self._own_moments, self._exchanges = None, self._exchanges + 1
        draft.set(self.common)

    def _read_change(self, draft: Draft, change: Tensor, samples: int) -> bool:
        """Write samples * (own weights - common weights) into `change` [numel]; return whether all of it is finite.

        Ranks send changes, not values: the mean of N equal values is not always that value, that of N zeros is.
        """
        n, finite = self.parameters.num_parameters, True
        stretch = self.stretch if self.comm.world_size > 1 else 1
        own_weights = draft.look(change)
        for part, dtype in self.parameters.parts():
            begun = self.common[part].to(dtype)  # what the model began the round with: weights in bf16 were rounded
            piece = torch.sub(own_weights[part], begun, out=change[part]).mul_(samples)
            if stretch != 1 and part.start < n:
                piece.mul_(stretch)
            finite = finite and is_finite(piece)
        return finite

    def _outer_of(self, flat: Tensor) -> torch.optim.Optimizer:
        """Return an outer optimizer of the parameters in `flat` [numel]."""
        pieces = flat[: self.parameters.num_parameters].split(CHUNK)
        return outer_optimizer(self.config, [nn.Parameter(piece) for piece in pieces])

    @torch.no_grad()
    def _outer_step(self, flat: Tensor, outer: torch.optim.Optimizer, change: Tensor) -> None:
        """Make one step of `outer`, which is over `flat` [numel], along the mean change, which is used up."""
        n = self.parameters.num_parameters
        flat[n:].add_(change[n:])
        pieces = [p for group in outer.param_groups for p in group["params"]]
        for piece, grad in zip(pieces, change.neg_()[:n].split(CHUNK), strict=True):
            piece.grad = grad
        outer.step()
        outer.zero_grad()  # they are views of what was sent, whose memory is not kept

    @property
    def _is_plain(self) -> bool:
        """Tell whether the outer optimizer keeps no state; its step is then made with the exchange, beside training."""
        group = self.outer.param_groups[0]
        return isinstance(self.outer, ExactSGD) and not (group["momentum"] or group["weight_decay"])

    def _plain_step(self, change: Tensor, scale: float) -> Tensor:
        """Return common + lr * scale * change [numel], in the memory of `change`; buffers have no lr."""
        lr, n = self.outer.param_groups[0]["lr"], self.parameters.num_parameters
        for part, rate in ((slice(0, n), lr), (slice(n, None), 1.0)):  # parameters, buffers
            for piece, common in zip(change[part].split(PIECE), self.common[part].split(PIECE), strict=True):
                piece.mul_(scale)
                if rate != 1:
                    piece.mul_(rate)
                piece.add_(common)
        return change

    def own_state(self) -> dict[str, Any]:
        return {"residual": self._sum.residual} if isinstance(self._sum, WireSum) else {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        if isinstance(self._sum, WireSum):
            self._sum.residual = state["residual"]

    def state_dict(self) -> dict[str, Any]:
        return {"outer": self.outer.state_dict()} | ({"exchanges": self._exchanges} if self._moments else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.outer.load_state_dict(state["outer"])
        self._exchanges, self._own_moments = state.get("exchanges", 0), None


class DiLoCoStrategy(OverlappingStrategy):
    """An inner optimizer on each rank's device, an outer one on the CPU, the same on all ranks.

    Rounds end after optimizer steps H, 2H, ...; the last one may be shorter. Each rank sends its weights' change once a
    round, 4 bytes a trained parameter with `wire = float32`, 2 to 1/2 with the others. Holds on the CPU: the common
    weights, the payload, and the outer optimizer's own (none, unless it has momentum). Where the payload is rounded,
    also what rounding has left unsent, and a buffer for the sum of the next exchange.
    """

    Config = DiLoCoConfig
    config: DiLoCoConfig
    Module = DiLoCoCommunicator

    def _modules(self) -> list[CommunicationModule]:
        if self._holds_copies:
            return [InPieces(interval=self.config.H, config=self.config)]
        return [self.Module(self.config)]

    @property
    def _holds_copies(self) -> bool:
        """Tell whether common weights are in bf16 where the model is, with an optimizer that rounds by chance as well.

        Strategies that are made from this one, and an outer optimizer with a state, need flats.
        """
        kinds = {p.dtype for p in self.parameters.parameters}
        rounds = isinstance(self.optimizer, LowMemory) and torch.bfloat16 in kinds <= {torch.bfloat16, torch.float32}
        is_usual = self.Module is DiLoCoCommunicator and type(self.config) is DiLoCoConfig
        return rounds and is_usual and self.config.is_plain

    def _read(self, room: Any = None, *, buffers: Tensor | None = None) -> Any:
        read = self.parameters.copies if self._holds_copies else self.parameters.read
        return read(room, buffers=buffers)

    def _start(self, flat: Tensor) -> None:
        super()._start(flat)
        self.tokens_seen, self.samples_seen = 0.0, 0  # of this rank's steps with work; tokens: the weights of the loss
        self.steps_since_work = 0

    @property
    def overlap_steps(self) -> int:
        return self.config.overlap_steps

    # What makes a step count by how much of the work of all ranks it is.

    def local_step(self, weight: float, samples: int) -> StepResult:
        self.steps_since_work += 1
        return super().local_step(weight, samples)

    def _batch_over_own(self, samples: int) -> float:
        """Return B / b for `samples`, b, of this rank in a step of B on all ranks; 1 where that is not known."""
        return max(1.0, self.samples_in_step / samples) if samples and self.comm.world_size > 1 else 1.0

    def _rate_factor(self, samples: int) -> float:
        """Return the factor of the learning rate in a step of b samples: (B / b) ** 0.25 with `scale_lr`.

        Adam's steps are equally long however noisy the gradient is. Where it is all noise, the mean of B / b steps of b
        samples goes sqrt(b / B) as far as one step of B samples (Malladi et al., 2205.10287): the rate would have to be
        (B / b) ** 0.5 times as large. Where there is no noise it goes as far. This is between the two.
        """
        if not self.config.scale_lr:
            return 1.0
        return math.sqrt(math.sqrt(self._batch_over_own(samples)))  # x ** 0.25 may differ in the last bit elsewhere

    def _step_weight(self, weight: float, samples: int) -> float:
        """Return the tokens of a sample in this step by those of this rank's average one, with `weigh_steps`.

        In one batch of all ranks' samples each would count for its tokens. In steps of its own a rank's short clips
        would count for as much as long ones. It is at most B / b, so that one step counts for no more than all ranks'.
        """
        if not self.config.weigh_steps or (most := self._batch_over_own(samples)) == 1:
            return 1.0
        self.tokens_seen, self.samples_seen = self.tokens_seen + weight, self.samples_seen + samples
        return min(weight / samples * self.samples_seen / self.tokens_seen, most)

    def _inner_step(self, weight: float, counts_for: float) -> float:
        """Make a step of the inner optimizer; its momentum fades by as many steps as the other ranks made meanwhile."""
        steps, self.steps_since_work = self.steps_since_work, 0
        with fading(self.optimizer, steps if self._is_stretched else 1):
            return super()._inner_step(weight, counts_for)

    def own_state(self) -> dict[str, Any]:
        seen = (self.tokens_seen, self.samples_seen)
        return super().own_state() | {"seen": seen, "since_work": self.steps_since_work}

    def load_own_state(self, state: dict[str, Any], *, inside: bool) -> None:
        super().load_own_state(state, inside=inside)
        if "seen" in state:  # not in a run of an earlier version
            self.tokens_seen, self.samples_seen = state["seen"]
        self.steps_since_work = state.get("since_work", self.steps_since_work)


def outer_optimizer(config: DiLoCoConfig, parameters: Sequence[Tensor]) -> Optimizer:
    """Return each round's optimizer. A callable gets `lr`, `momentum` and `nesterov` only where they are given."""
    optim = config.outer_optim
    if isinstance(optim, str):
        optim = config.outer_spec()
    if isinstance(optim, OptimSpec):
        return exact_from_spec(optim, parameters)
    given = {"lr": config.outer_lr, "momentum": config.outer_momentum, "nesterov": config.nesterov}
    optimizer: Optimizer = optim(parameters, **{key: value for key, value in given.items() if value is not None})
    return optimizer
