"""Gradients averaged at every step: N ranks train as one process with N times the batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from exogym.config import AllReduceConfig
from exogym.flat import is_finite
from exogym.strategy.optim import clip, scale_grads
from exogym.strategy.strategy import StepResult, Strategy

NOT_FINITE = "the gradient is not finite"


class AllReduceStrategy(Strategy):
    """The mean gradient over all ranks' tokens, clipped, then one step of the same optimizer on every rank.

    One collective a step. A gradient that is None on some ranks counts as zeros there; None on all stays None.
    Every rank makes the step on its own device, and devices of another make round differently. So ranks compare their
    weights every `check_interval` steps, before checkpoints and at the end, and take on rank 0's where they differ.
    Holds one CPU flat: the payload [gradients | change of buffers | who has a gradient | weight | stopping].
    """

    Config = AllReduceConfig
    config: AllReduceConfig
    drifts = ("optimizer",)

    def _start(self, flat: Tensor) -> None:
        params = self.parameters
        self._agreed_buffers = flat[params.num_parameters :].clone()
        self._weight, self._stopping, self._skipped = 0.0, False, ""

    def local_step(self, weight: float, samples: int) -> StepResult:
        self._weight = weight
        return StepResult()

    @property
    def is_round_due(self) -> bool:
        return True

    @property
    def has_open_round(self) -> bool:
        return False

    def exchange(self, stopping: bool) -> tuple[Tensor, ...] | None:
        """Sums in `.grad` -> sums over all ranks, in the payload; the model stays as it is. None without others."""
        self._stopping, self._skipped = stopping, ""
        return None if self.comm.world_size == 1 else self._sum(self._weight)

    def about(self, exchanged: tuple[Tensor, ...] | None) -> dict[str, Any]:
        return {"round": self.steps + 1, "cut_short": False}

    def apply(self, exchanged: tuple[Tensor, ...] | None, local: StepResult) -> StepResult:
        self.steps += 1
        total, stop = self._divide(*exchanged) if exchanged else self._alone()
        lr = self.schedule.set(self.steps - 1)
        norm = self._move() if total > 0 else None
        if norm is None or not math.isfinite(norm):
            self.parameters.write_buffers(self._agreed_buffers)  # a forward pass that does not count changed them
        elif not exchanged:
            self._agreed_buffers = self.parameters.read_buffers()
        return StepResult(lr=lr, grad_norm=norm, agreed=True, stop=stop, skipped=self._skipped)

    def is_drift_check_due(self, *, at_least: bool) -> bool:
        interval = self.config.check_interval
        return at_least or bool(interval and self.steps % interval == 0)

    def load_weights(self, flat: Tensor) -> None:
        self.parameters.write(flat)
        self._agreed_buffers = self.parameters.read_buffers()

    def _sum(self, weight: float) -> tuple[Tensor, ...]:
        params = self.parameters
        payload, grads, buffers, present, tail = self._fields()
        params.read_grads(payload)
        # Changes, not values: the mean of N equal values is not always that value, that of N zeros is.
        buffers.copy_(params.read_buffers().sub_(self._agreed_buffers).mul_(weight))
        present.copy_(torch.tensor([p.grad is not None for p in params.parameters]))
        if not is_finite(payload[: params.numel]):
            self._skipped, weight = NOT_FINITE, 0.0
            payload.zero_()
        tail.copy_(torch.tensor([weight, self._stopping]))
        self.comm.all_reduce_(payload)
        return grads, buffers, present, tail

    def _divide(self, grads: Tensor, buffers: Tensor, present: Tensor, tail: Tensor) -> tuple[float, bool]:
        """Sums over all ranks -> means in `.grad` and in the buffers. Returns (total weight, stop)."""
        params = self.parameters
        total, stop = tail.tolist()
        if total > 0:
            params.write_grads(grads.mul_(1 / total))
            params.write_buffers(self._agreed_buffers.add_(buffers.mul_(1 / total)))
            for p, count in zip(params.parameters, present.tolist(), strict=True):
                p.grad = p.grad if count else None
        return total, stop > 0

    def _alone(self) -> tuple[float, bool]:
        """As _divide, without a copy on the CPU."""
        scale_grads(self.parameters.parameters, 1 / self._weight if self._weight else 0.0)
        return self._weight, self._stopping

    def _fields(self) -> tuple[Tensor, ...]:
        params = self.parameters
        sizes = [params.num_parameters, params.numel - params.num_parameters, len(params.parameters), 2]
        payload = self._payload(extra=len(params.parameters) + 2)
        return payload, *payload.split(sizes)

    def _move(self) -> float:
        norm = clip(self.parameters.parameters, self.config.max_norm)
        if math.isfinite(norm):
            self.optimizer.step()
        else:
            self._skipped = NOT_FINITE
        return norm

    @property
    def agreements(self) -> int:
        return self.steps

    def agreed_state(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "schedule": self.schedule.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "weights": self.agreed_weights(),
        }

    def load_agreed_state(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.schedule.load_state_dict(state["schedule"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.parameters.write(state["weights"])
        self._agreed_buffers = self.parameters.read_buffers()

    def agreed_weights(self) -> Tensor:
        """The buffers as agreed: a forward pass that has not counted yet may have changed the model's."""
        flat = self.parameters.read()
        flat[self.parameters.num_parameters :].copy_(self._agreed_buffers)
        return flat


SimpleReduceStrategy = AllReduceStrategy
