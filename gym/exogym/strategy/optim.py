"""From a name, a spec or a class to an optimizer; learning rate schedules; gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from exogym.flat import PIECE
from exogym.strategy.low_memory import LowMemory
from exogym.strategy.strategy_settings import Optim, OptimSpec, ScheduleSpec, StrategyConfig
from exogym.strategy.upstream import ensure_optim_spec as ensure_optim_spec

# The plain classes mean what their names mean, defaults included.
_NAME_OF_CLASS = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd"}


def named(optim: Optim) -> Optim:
    """Return the name of a plain class of torch's, and anything else as it is."""
    return _NAME_OF_CLASS.get(optim, optim) if isinstance(optim, type) else optim


def inner_optimizer(config: StrategyConfig, parameters: Sequence[Tensor]) -> Optimizer:
    """Return the optimizer of each step. A callable gets `lr` and `weight_decay` only where they were given.

    Where there is weight decay it gets the groups of `decay_groups`, else the plain list.
    """
    numbers = {"lr": config.lr, "weight_decay": config.weight_decay}
    given: dict[str, Any] = {key: value for key, value in numbers.items() if value is not None}
    optim = config.inner_optim
    if optim == "low_memory":
        return LowMemory(decay_groups(parameters, given.pop("weight_decay", 0.01)), **given)
    if isinstance(optim, str):
        optim = replace(OptimSpec(name=optim), **given)
    if isinstance(optim, OptimSpec):
        return from_spec(optim, decay_groups(parameters, optim.weight_decay))
    groups = decay_groups(parameters, config.weight_decay) if config.weight_decay else parameters
    optimizer: Optimizer = optim(groups, **given)
    return optimizer


def from_spec(spec: OptimSpec, groups: list[dict[str, Any]]) -> Optimizer:
    """Return one of torch's optimizers with these numbers; Adam in one kernel for all weights, where there is one.

    That was 9 to 10 times faster on mps (pytorch 127242), and 5 times on a CPU (38 million parameters).
    """
    lr, decay = spec.lr, spec.weight_decay
    if spec.name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=spec.momentum, nesterov=spec.nesterov, weight_decay=decay)
    kind = torch.optim.AdamW if spec.name == "adamw" else torch.optim.Adam
    kinds_of_device = {p.device.type for group in groups for p in group["params"]}
    fused = True if kinds_of_device <= {"mps", "cuda", "cpu"} else None  # None: torch decides
    return kind(groups, lr=lr, betas=spec.betas, eps=spec.eps, weight_decay=decay, fused=fused)


def decay_groups(parameters: Sequence[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Return groups with decay for matrices and kernels, and none for tensors of fewer than 2 dimensions, as biases."""
    if not weight_decay:
        return [{"params": parameters}]
    decaying = {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay}
    others = {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}
    return [group for group in (decaying, others) if group["params"]]


def exact_from_spec(spec: OptimSpec, parameters: Sequence[Tensor]) -> Optimizer:
    """Return an optimizer that takes the same steps, to the bit, on every kind of CPU."""
    lr, decay = spec.lr, spec.weight_decay
    if spec.name == "sgd":
        return ExactSGD(parameters, lr=lr, momentum=spec.momentum, nesterov=spec.nesterov, weight_decay=decay)
    is_decoupled = spec.name == "adamw"
    return ExactAdam(parameters, lr=lr, betas=spec.betas, eps=spec.eps, weight_decay=decay, decoupled=is_decoupled)


class Schedule:
    """Sets the learning rate of an optimizer's groups; knows the peak rate of each.

    A position on the curve is counted in steps of the run as it was planned, and is kept with the agreed state. Where
    other hosts make the run longer or shorter, what is left of the curve is stretched over the steps that are left.
    """

    def __init__(self, spec: ScheduleSpec, optimizer: Optimizer, total_steps: int):
        self._spec, self._optimizer = spec, optimizer
        self._peaks: list[float] = [group["lr"] for group in optimizer.param_groups]
        self.plan(total_steps)

    def plan(self, total_steps: int) -> None:
        """Lay the whole curve over so many steps, from its beginning."""
        self._total_steps: float = total_steps
        self._since, self._here, self._pace = 0, 0.0, 1.0  # from this step on: the position, and what a step adds

    def stretch(self, step: int, remaining: int) -> None:
        """Lay the rest of the curve over the `remaining` steps from `step` on, which do the work that was left."""
        here = self._planned(step)
        if remaining:
            self._since, self._here, self._pace = step, here, max(0.0, self._total_steps - here) / remaining

    def extend(self, step: int, before: int, remaining: int, pace: float) -> None:
        """Plan for `remaining` steps from `step` on, not `before`, with more or less work, as if from the beginning.

        pace: how far on the curve a step goes that comes on top.
        """
        here = self._planned(step)
        left = max(0.0, self._total_steps - here)
        left = left + (remaining - before) * pace if remaining >= before else left * remaining / before
        self._total_steps = here + left
        self._since, self._here, self._pace = step, here, left / remaining if remaining else pace

    @property
    def planned_steps(self) -> float:
        return self._total_steps

    @property
    def end(self) -> int:
        """The number of steps at the end of the work, as it is planned now."""
        return self._since + (round((self._total_steps - self._here) / self._pace) if self._pace else 0)

    def set(self, step: int) -> float:
        """Set the rate for optimizer step `step`, counted from 0, and return the first group's."""
        # Not beyond the last step that was planned: work that was lost and is done again would have no rate at all.
        planned = min(self._planned(step), max(0.0, self._total_steps - 1))
        factor = self._spec.factor(planned, self._total_steps)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        return self._peaks[0] * factor

    def state_dict(self) -> dict[str, Any]:
        return {"total_steps": self._total_steps, "since": self._since, "here": self._here, "pace": self._pace}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._total_steps, self._since = state["total_steps"], state["since"]
        self._here, self._pace = state["here"], state["pace"]

    def _planned(self, step: int) -> float:
        return self._here + (step - self._since) * self._pace


@contextmanager
def fading(optimizer: Optimizer, steps: int) -> Iterator[None]:
    """Let the momentum fade in a step of Adam as in so many steps: beta1 ** steps. Others stay as they are."""
    if steps == 1 or not isinstance(optimizer, torch.optim.Adam):
        yield
        return
    kept = [group["betas"] for group in optimizer.param_groups]
    try:
        for group, (beta1, beta2) in zip(optimizer.param_groups, kept, strict=True):
            group["betas"] = beta1**steps, beta2
        yield
    finally:
        for group, betas in zip(optimizer.param_groups, kept, strict=True):
            group["betas"] = betas


def clip(parameters: Iterable[Tensor], max_norm: float | None, *, scale: float = 1.0) -> float:
    """Multiply gradients by `scale`, then clip them to `max_norm`, in one pass over them.

    Returns the norm before clipping. If that is not finite they stay as they are.
    """
    return clip_gradients([p.grad for p in parameters if p.grad is not None], max_norm, scale=scale)


def clip_gradients(grads: list[Tensor], max_norm: float | None, *, scale: float = 1.0) -> float:
    """Do the same with these gradients."""
    if any(grad.dtype == torch.float16 for grad in grads):  # the norm of a sum over many tokens would be infinite
        torch._foreach_mul_(grads, scale)
        scale = 1.0
    norm = torch.nn.utils.get_total_norm(grads).item() * scale
    factor = scale if max_norm is None else scale * min(1.0, max_norm / (norm + 1e-6))  # as clip_grad_norm_ does
    if grads and math.isfinite(norm) and factor != 1.0:
        torch._foreach_mul_(grads, factor)
    return norm


# Optimizers whose steps have the same bits on every CPU. IEEE 754 rounds each single addition, multiplication, division
# and square root in one way only. What differs between machines is what compilers and vector units join (a * b + c
# rounded once) and the order of sums. So these use one operation at a time, sum nothing, and call no function of the C
# library.


class ExactSGD(Optimizer):
    """torch.optim.SGD without dampening, one operation at a time."""

    def __init__(self, params: Sequence[Tensor], *, lr: float, momentum: float, nesterov: bool, weight_decay: float):
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p, grad, group in _with_gradients(self):
            lr, momentum, direction = group["lr"], group["momentum"], grad
            if group["weight_decay"]:
                direction = direction.add(p.mul(group["weight_decay"]))
            if momentum:
                state = self.state[p]
                if "momentum_buffer" in state:
                    state["momentum_buffer"].mul_(momentum).add_(direction)
                else:
                    state["momentum_buffer"] = direction.clone()
                buffer = state["momentum_buffer"]
                direction = direction.add(buffer.mul(momentum)) if group["nesterov"] else buffer
            for piece, change in zip(p.view(-1).split(PIECE), direction.view(-1).split(PIECE), strict=True):
                piece.sub_(change if lr == 1 else change.mul(lr))


class ExactAdam(Optimizer):
    """torch.optim.Adam, or AdamW if the weight decay is decoupled, one operation at a time."""

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled: bool,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p, grad, group in _with_gradients(self):
            lr, (beta1, beta2), state = group["lr"], group["betas"], self.state[p]
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


def _with_gradients(optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
    """Yield each parameter that has a gradient, that, and its group."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                yield p, p.grad, group
