"""Gradients averaged at every step: N ranks train as one process with N times the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exogym.config import AllReduceConfig, Optim, ScheduleSpec
from exogym.flat import digest
from exogym.strategy.optim import clip, scale_grads
from exogym.strategy.strategy import StepResult, Strategy, agree_on_digest, metered


class AllReduceStrategy(Strategy):
    """The mean gradient over all ranks' tokens, clipped, then one step of the same optimizer on every rank.

    One collective a step. A gradient that is None on some ranks counts as zeros there; None on all stays None.
    Holds one CPU flat: the payload [gradients | change of buffers | who has a gradient | weight | stopping].
    """

    config: AllReduceConfig

    def __init__(
        self,
        *,
        inner_optim: Optim = AllReduceConfig.inner_optim,
        lr: float | None = AllReduceConfig.lr,
        weight_decay: float | None = AllReduceConfig.weight_decay,
        max_norm: float | None = AllReduceConfig.max_norm,
        schedule: str | ScheduleSpec = AllReduceConfig.schedule,
        warmup_steps: int | None = AllReduceConfig.warmup_steps,
        min_lr_ratio: float | None = AllReduceConfig.min_lr_ratio,
        check_interval: int = AllReduceConfig.check_interval,
    ):
        config = AllReduceConfig(
            inner_optim=inner_optim,
            lr=lr,
            weight_decay=weight_decay,
            max_norm=max_norm,
            schedule=schedule,
            warmup_steps=warmup_steps,
            min_lr_ratio=min_lr_ratio,
            check_interval=check_interval,
        )
        super().__init__(config)

    def _start(self, flat: Tensor) -> None:
        params = self.parameters
        self._agreed_buffers = flat[params.num_parameters :].clone()
        self._payload = params.empty(extra=len(params.parameters) + 2)
        self._checked = -1

    def step(self, weight: float, samples: int, stopping: bool = False) -> StepResult:
        with metered(self.comm) as spent:
            total, stop = self._average(weight, stopping)
            lr = self.schedule.set(self.steps)
            self.steps += 1
            norm = self._move() if total > 0 else None
            due = self.config.check_interval and self.steps % self.config.check_interval == 0
            compared = self._compare() if due else None
        return StepResult(lr=lr, digest=compared, grad_norm=norm, agreed=True, stop=stop, **spent)

    def finish(self) -> StepResult | None:
        if self._checked == self.steps:
            return None
        with metered(self.comm) as spent:
            compared = self._compare()
        return StepResult(digest=compared, agreed=True, **spent)

    def _average(self, weight: float, stopping: bool) -> tuple[float, bool]:
        """Sums in `.grad` -> mean over all ranks; buffers -> their weighted mean. Returns (total weight, stop)."""
        params = self.parameters
        if self.comm.world_size == 1:
            scale_grads(params.parameters, 1 / weight if weight else 0.0)
            return weight, stopping
        payload, grads, buffers, present, tail = self._fields()
        params.read_grads(payload)
        # Changes, not values: the mean of N equal values is not always that value, that of N zeros is.
        buffers.copy_(params.read_buffers().sub_(self._agreed_buffers).mul_(weight))
        present.copy_(torch.tensor([p.grad is not None for p in params.parameters]))
        tail.copy_(torch.tensor([weight, stopping]))
        self.comm.all_reduce_(payload)
        total, stop = tail.tolist()
        if total > 0:
            params.write_grads(grads.mul_(1 / total))
            params.write_buffers(self._agreed_buffers.add_(buffers, alpha=1 / total))
            for p, count in zip(params.parameters, present.tolist(), strict=True):
                p.grad = p.grad if count else None
        return total, stop > 0

    def _fields(self) -> tuple[Tensor, ...]:
        params = self.parameters
        sizes = [params.num_parameters, params.numel - params.num_parameters, len(params.parameters), 2]
        return self._payload, *self._payload.split(sizes)

    def _move(self) -> float:
        norm = clip(self.parameters.parameters, self.config.max_norm, self._where())
        self.optimizer.step()
        return norm

    def _compare(self) -> int:
        if self.comm.world_size > 1:  # in a step without weight a rank's own buffers may still have changed
            self.parameters.write_buffers(self._agreed_buffers)
        value = digest(self.parameters.read(self._payload[: self.parameters.numel]))
        agree_on_digest(self.comm, value, f"step {self.steps}")
        self._checked = self.steps
        return value

    @property
    def agreements(self) -> int:
        return self.steps

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"weights": self.parameters.read()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.parameters.write(state["weights"])
        self._agreed_buffers = self.parameters.read_buffers()


SimpleReduceStrategy = AllReduceStrategy
