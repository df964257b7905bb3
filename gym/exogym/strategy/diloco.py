"""DiLoCo: ranks train alone for H steps, then step together along the average change (Douillard et al., 2311.08105)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from exogym.comm.comm import Comm
from exogym.flat import CHUNK, PIECE, FlatParameters, digest, is_finite
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, CommunicationModule, Exchanged
from exogym.strategy.diloco_settings import DiLoCoConfig
from exogym.strategy.draft import Draft, Payload
from exogym.strategy.exact import ExactAdam, ExactSGD
from exogym.strategy.moments import Moments, SharedMoments, due
from exogym.strategy.optim import fading, outer_optimizer
from exogym.strategy.strategy import StepResult
from exogym.strategy.strategy_settings import Optim
from exogym.strategy.wire import WireSum

NOT_FINITE = "the weights were not finite at the end of the round"


class Means(NamedTuple):
    """Over the ranks: of their changes [numel], None if nobody has trained; and of Adam's moments that were due.

    weights: what the change makes of the common weights, and their digest, where that needs no state; `change` is None.
    """

    change: Tensor | None
    moments: Tensor | None
    weights: Tensor | None = None
    digest: int | None = None


@dataclass(kw_only=True, eq=False)
class DiLoCoCommunicator(CommunicationModule):
    """An outer optimizer on the CPU, the same on all ranks; its settings are those of DiLoCoConfig.

    The pseudo-gradient is the mean of the ranks' changes, weighted by the samples that each trained in the round. One
    that trained its share in fewer, larger steps is taken as if it had made as many as the others: Adam's steps are as
    long whatever the batch. Buffers take the mean itself. The outer optimizer sees the common weights as pieces of
    64 MB, not as the model's tensors. One that is given by name takes the same steps on every CPU (exact.py). With one
    of another kind ranks compare their weights after each round, and take on rank 0's where they differ.
    """

    interval: int = 100
    outer_optim: Optim = "sgd"
    outer_lr: float | None = None
    outer_momentum: float | None = None
    nesterov: bool | None = None
    wire: str = "float32"
    share_moments: bool = False

    agrees = True
    Config = DiLoCoConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        self.config = self.Config(
            H=self.interval,
            outer_optim=self.outer_optim,
            outer_lr=self.outer_lr,
            outer_momentum=self.outer_momentum,
            nesterov=self.nesterov,
            wire=self.wire,
            share_moments=self.share_moments,
        )

    def setup(self, comm: Comm, parameters: FlatParameters, common: Tensor, *, keeps_common: bool) -> None:
        super().setup(comm, parameters, common, keeps_common=keeps_common)
        self.outer = self._outer_of(common)
        self.is_exact = isinstance(self.outer, (ExactSGD, ExactAdam))
        self._sent = Payload(comm)
        self._wire = WireSum(comm, self.wire) if self.wire != "float32" else None
        self._moments = SharedMoments(comm, self.optimizer, parameters.parameters) if self.share_moments else None
        self._own: Moments | None = None  # when the exchange began
        self._exchanges = 0

    def begin(self) -> None:
        part = due(self._exchanges, self.parameters.num_parameters)
        is_now = self._moments and part.start < part.stop and not self.is_last
        self._own = self._moments.read(part) if is_now else None

    def exchange(self, draft: Draft, samples: int, stopping: bool) -> Exchanged:
        """Its result: Means."""
        numel, skipped = self.parameters.numel, ""
        if self._wire:
            change, tail = self._wire.flat(numel), torch.zeros(2)
        else:
            payload = self._sent.flat(numel + 2)
            change, tail = payload.split([numel, 2])
        if samples and not self._read_change(draft, change, samples):
            samples, skipped = 0, NOT_FINITE
        if not samples:
            change.zero_()
        tail.copy_(torch.tensor([samples, stopping]))
        if self._wire:
            change, tail = self._wire.sum(tail, last=self.is_last)
        else:
            self.comm.all_reduce_(payload)
        total, stop = tail.tolist()
        # What a rank is to resume from after a stop is its optimizer's state as it is now.
        moments = self._moments.exchange(self._own, samples) if self._own and not stop else None
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
        if self._wire and (result.weights is not None or result.change is not None):
            self._wire.accept()
        if result.moments is not None:
            self._moments.apply(result.moments, self._own)
        self._own, self._exchanges = None, self._exchanges + 1
        draft.set(self.common)

    def _read_change(self, draft: Draft, change: Tensor, samples: int) -> bool:
        """Changes, not values: the mean of N equal values is not always that value, that of N zeros is.

        False if this rank's weights are not finite.
        """
        n, at, finite = self.parameters.num_parameters, 0, True
        stretch = self.stretch if self.comm.world_size > 1 else 1
        of_rank = draft.look(change)
        for piece, own, common in zip(*(flat.split(PIECE) for flat in (change, of_rank, self.common)), strict=True):
            torch.sub(own, common, out=piece).mul_(samples)
            if stretch != 1:
                piece[: max(0, n - at)].mul_(stretch)
            finite, at = finite and is_finite(piece), at + PIECE
        return finite

    def _outer_of(self, flat: Tensor) -> torch.optim.Optimizer:
        """An outer optimizer of the parameters in `flat` [numel]."""
        return outer_optimizer(self.config, [nn.Parameter(piece) for piece in self._pieces(flat)])

    def _pieces(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat[: self.parameters.num_parameters].split(CHUNK)

    @torch.no_grad()
    def _outer_step(self, flat: Tensor, outer: torch.optim.Optimizer, change: Tensor) -> None:
        """One step of `outer`, which is over `flat`, along the mean change, which is used up."""
        n = self.parameters.num_parameters
        flat[n:].add_(change[n:])
        pieces = [p for group in outer.param_groups for p in group["params"]]
        for piece, grad in zip(pieces, self._pieces(change.neg_()), strict=True):
            piece.grad = grad
        outer.step()

    @property
    def _is_plain(self) -> bool:
        """Whether the outer optimizer keeps nothing. Then its step is made where the exchange is, beside training."""
        group = self.outer.param_groups[0]
        return isinstance(self.outer, ExactSGD) and not (group["momentum"] or group["weight_decay"])

    def _plain_step(self, change: Tensor, scale: float) -> Tensor:
        """The weights after the outer optimizer's step along `scale * change`, of which they take the place."""
        lr, n = self.outer.param_groups[0]["lr"], self.parameters.num_parameters
        for part, rate in ((slice(0, n), lr), (slice(n, None), 1.0)):  # parameters, buffers
            for piece, common in zip(change[part].split(PIECE), self.common[part].split(PIECE), strict=True):
                piece.mul_(scale)
                if rate != 1:
                    piece.mul_(rate)
                piece.add_(common)
        return change

    def own_state(self) -> dict[str, Any]:
        return {"residual": self._wire.residual} if self._wire else {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        if self._wire:
            self._wire.residual = state["residual"]

    def state_dict(self) -> dict[str, Any]:
        return {"outer": self.outer.state_dict()} | ({"exchanges": self._exchanges} if self._moments else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.outer.load_state_dict(state["outer"])
        self._exchanges, self._own = state.get("exchanges", 0), None


class DiLoCoStrategy(CommunicateOptimizeStrategy):
    """An inner optimizer on each rank's device, an outer one on the CPU, the same on all ranks.

    Rounds end after optimizer steps H, 2H, ...; the last one may be shorter. Each rank sends its weights' change once a
    round, 4 bytes a trained parameter. Holds on the CPU: the common weights, the payload (where it is rounded also what
    was not sent yet, and room for the next sum), and the outer optimizer's own (none, unless it has momentum).
    """

    Config = DiLoCoConfig
    config: DiLoCoConfig
    Module = DiLoCoCommunicator

    def _modules(self) -> list[CommunicationModule]:
        config = self.config
        outer = ("outer_optim", "outer_lr", "outer_momentum", "nesterov", "wire", "share_moments")
        return [self.Module(interval=config.H, **{name: getattr(config, name) for name in outer})]

    def _rate_factor(self, samples: int) -> float:
        """Adam's steps are as long however noisy the gradient. So the mean of N steps of B / N samples goes 1 / sqrt(N)
        as far as one of B samples where noise is all (Malladi et al., 2205.10287), and as far where there is none. This
        is half-way.
        """
        return math.sqrt(math.sqrt(self._parts(samples))) if self.config.scale_lr else 1.0

    def _parts(self, samples: int) -> float:
        """All ranks' samples of a step by this rank's; 1 where that is not known."""
        return max(1.0, self.samples_in_step / samples) if samples and self.comm.world_size > 1 else 1.0

    def _start(self, flat: Tensor) -> None:
        super()._start(flat)
        self._seen = (0.0, 0)  # weight and samples of this rank's steps
        self._since_work = 0  # steps

    def local_step(self, weight: float, samples: int) -> StepResult:
        self._since_work += 1
        return super().local_step(weight, samples)

    def _inner_step(self, weight: float, counts_for: float) -> float:
        """What a rank with work in every other step makes counts twice, and its momentum is as old as the others'."""
        steps, self._since_work = self._since_work, 0
        with fading(self.optimizer, steps if self._is_stretched else 1):
            return super()._inner_step(weight, counts_for)

    def _step_weight(self, weight: float, samples: int) -> float:
        """By the weight that as many of this rank's samples have on average; at most what all ranks' samples have.

        In one batch of all ranks' samples each counts for its tokens. In steps of its own a rank's short clips would
        count for as much as long ones.
        """
        if not self.config.weigh_steps or (parts := self._parts(samples)) == 1:
            return 1.0
        self._seen = (self._seen[0] + weight, self._seen[1] + samples)
        return min(weight / samples * self._seen[1] / self._seen[0], parts)

    def own_state(self) -> dict[str, Any]:
        return super().own_state() | {"seen": self._seen, "since_work": self._since_work}

    def load_own_state(self, state: dict[str, Any], *, inside: bool) -> None:
        super().load_own_state(state, inside=inside)
        self._seen = tuple(state.get("seen", self._seen))  # a run of an earlier version has neither
        self._since_work = state.get("since_work", self._since_work)

    @property
    def overlap_steps(self) -> int:
        return self.config.overlap_steps

    @property
    def outer(self) -> torch.optim.Optimizer:
        return self.modules[-1].outer
