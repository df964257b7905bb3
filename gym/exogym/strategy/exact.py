"""Optimizers whose steps have the same bits on every CPU.

IEEE 754 rounds each single addition, multiplication, division and square root in one way only. What differs between
machines is what compilers and vector units join (a * b + c rounded once) and the order of sums. So these use one
operation at a time, sum nothing, and call no function of the C library.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from exogym.flat import PIECE


class ExactSGD(Optimizer):
    """torch.optim.SGD without dampening, one operation at a time."""

    def __init__(self, params, *, lr: float, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    direction = self._direction(p, group).view(-1)
                    for piece, change in zip(p.view(-1).split(PIECE), direction.split(PIECE), strict=True):
                        piece.sub_(change if group["lr"] == 1 else change.mul(group["lr"]))

    def _direction(self, p: Tensor, group: dict) -> Tensor:
        grad, momentum = p.grad, group["momentum"]
        if group["weight_decay"]:
            grad = grad.add(p.mul(group["weight_decay"]))
        if not momentum:
            return grad
        state = self.state[p]
        if "momentum_buffer" in state:
            state["momentum_buffer"].mul_(momentum).add_(grad)
        else:
            state["momentum_buffer"] = grad.clone()
        return grad.add(state["momentum_buffer"].mul(momentum)) if group["nesterov"] else state["momentum_buffer"]


class ExactAdam(Optimizer):
    """torch.optim.Adam, or AdamW if the weight decay is decoupled, one operation at a time."""

    def __init__(
        self, params, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group)

    def _step(self, p: Tensor, group: dict) -> None:
        lr, (beta1, beta2), grad, state = group["lr"], group["betas"], p.grad, self.state[p]
        if group["weight_decay"] and group["decoupled"]:
            p.mul_(1 - lr * group["weight_decay"])
        elif group["weight_decay"]:
            grad = grad.add(p.mul(group["weight_decay"]))
        if not state:
            state.update(mean=torch.zeros_like(p), square=torch.zeros_like(p), powers=(1.0, 1.0))
        # Not beta ** step: pow() of the C library may differ in the last bit.
        power1, power2 = state["powers"] = (state["powers"][0] * beta1, state["powers"][1] * beta2)
        state["mean"].mul_(beta1).add_(grad.mul(1 - beta1))
        state["square"].mul_(beta2).add_(grad.mul(grad).mul_(1 - beta2))
        scale = state["square"].sqrt().div_(math.sqrt(1 - power2)).add_(group["eps"])
        p.sub_(state["mean"].div(scale).mul_(lr / (1 - power1)))
