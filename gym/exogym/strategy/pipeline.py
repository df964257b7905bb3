"""The optimizer of each stage of a pipeline: its own, but for the gradient's norm, which is that of all stages."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from exogym.errors import SettingError
from exogym.strategy.optim import inner_optimizer
from exogym.strategy.pipeline_settings import PipelineConfig
from exogym.strategy.strategy import EveryStepStrategy, StepResult


class Sums(NamedTuple):
    """The sums over all stages. square: of the norm of the gradient's sum over `weight` tokens."""

    weight: float
    square: float
    stop: float


class PipelineStrategy(EveryStepStrategy):
    """Each rank steps the weights of its own stage, all in the same step, with one factor of clipping.

    The gradients are there when a step's micro-batches have been through all stages, see exogym/pipeline.py: what is
    exchanged here is three numbers.
    """

    Config = PipelineConfig
    config: PipelineConfig
    divides_model = True
    check_interval = 0
    stages = 0  # set by who divides the model

    def _make_optimizer(self) -> Optimizer:
        if not self.stages:
            raise SettingError("a pipeline needs a model in parts: give them to a PipelineTrainer")
        # torch's optimizers refuse a stage that is frozen.
        return inner_optimizer(self.config, self.parameters.parameters or [nn.Parameter(torch.zeros(1))])

    def local_step(self, weight: float, samples: int) -> StepResult:
        self._weight = weight  # on the first stage; 0 on the others
        return StepResult()

    def exchange(self, stopping: bool) -> Sums:
        grads = [p.grad for p in self.parameters.parameters if p.grad is not None]
        square = torch.nn.utils.get_total_norm(grads).item() ** 2 if grads else 0.0
        told = torch.tensor([self._weight, square, stopping], dtype=torch.float64)
        self.comm.all_reduce_(told)
        return Sums(*told.tolist())

    def apply(self, exchanged: Sums, local: StepResult) -> StepResult:
        weight, square, stop = exchanged
        lr = self.schedule.set(self.steps)
        self.steps += 1
        norm = math.sqrt(square) / weight if weight else None
        if norm is not None and math.isfinite(norm):
            most = self.config.max_norm
            factor = 1 / weight if most is None else min(1.0, most / (norm + 1e-6)) / weight
            if grads := [p.grad for p in self.parameters.parameters if p.grad is not None]:
                torch._foreach_mul_(grads, factor)
            self.optimizer.step()
            self._agreed_buffers = self.parameters.read_buffers()
            skipped = ""
        else:
            self.parameters.write_buffers(self._agreed_buffers)
            skipped = "" if norm is None else f"the gradient is {norm}"
        return StepResult(lr=lr, grad_norm=norm, agreed=True, stop=stop > 0, skipped=skipped)
