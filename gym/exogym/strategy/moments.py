"""Adam's second moments, brought together by ranks that step alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exogym.comm.comm import Comm
from exogym.flat import gather, is_finite
from exogym.strategy.wire import WireSum

MOMENT = "exp_avg_sq"
EVERY = 16  # exchanges; in one of so many moments travel, and more often among the first ones


def is_due(exchanges: int) -> bool:
    """After so many exchanges: 0, 1, 2, 4, 8, 16, 32, 48 ... Moments come to change slowly, with torch's betas over a
    thousand steps.
    """
    return exchanges % EVERY == 0 or exchanges in (1, 2, 4, 8)


@dataclass(frozen=True)
class Moments:
    """values: of all parameters [n], corrected for bias. steps: that Adam had made for each; 0 without a state."""

    values: Tensor
    steps: list[int]


class SharedMoments:
    """The ranks' mean of Adam's second moments, in 8 bits a value, becomes that of each.

    Adam divides each weight's step by the root of its moment. A rank whose clips lack a word has a tiny moment for the
    word's weights, and moves them at full speed wherever small gradients push them, in each round anew, since a host
    keeps its clips. One batch of all clips would have had the large moment. With it, local steps are nearer to those of
    that batch.
    """

    def __init__(self, comm: Comm, optimizer: Optimizer, parameters: list[nn.Parameter]):
        self._optimizer, self._parameters = optimizer, parameters
        self._sum = WireSum(comm, "float8")

    def read(self) -> Moments:
        """Zeros where the optimizer has none yet."""
        steps = [int(state["step"]) if state else 0 for _, state, _ in self._states()]
        values = torch.empty(sum(p.numel() for p in self._parameters))
        corrected = (
            state[MOMENT] / (1 - beta**step) if step else torch.zeros_like(p)
            for (p, state, beta), step in zip(self._states(), steps, strict=True)
        )  # fmt: skip
        gather(corrected, values)
        return Moments(values, steps)

    def exchange(self, own: Moments, samples: int) -> Tensor | None:
        """Their mean [n], weighted by samples; None if no rank has any, or there is one rank. Changes nothing."""
        if self._sum.comm.world_size == 1:
            return None
        numel = own.values.numel()
        weight = float(samples) if any(own.steps) and is_finite(own.values) else 0.0
        flat = self._sum.flat(numel)
        if weight:
            torch.mul(own.values, weight, out=flat)
        total, header = self._sum.sum(torch.tensor([weight, 0.0]))
        return total.mul_(1 / header[0].item()) if header[0] > 0 else None

    @torch.no_grad()
    def apply(self, mean: Tensor, own: Moments) -> None:
        """As if `mean` had taken the place of `own` when that was read; steps may have been made since."""
        at = 0
        for (p, state, beta), step in zip(self._states(), own.steps, strict=True):
            part = slice(at, at + p.numel())
            at = part.stop
            if not step:
                continue
            moment, since = state[MOMENT], int(state["step"]) - step
            theirs = mean[part].view(p.shape).to(moment.device) * (1 - beta**step)
            if since:
                mine = own.values[part].view(p.shape).to(moment.device) * (1 - beta**step)
                theirs = (moment + (theirs - mine) * beta**since).clamp_(min=0)
            moment.copy_(theirs)

    def _states(self) -> Iterator[tuple[nn.Parameter, dict, float]]:
        beta = {p: group["betas"][1] for group in self._optimizer.param_groups for p in group["params"]}
        for p in self._parameters:
            state = self._optimizer.state.get(p, {})
            yield p, state if MOMENT in state else {}, beta[p]
