"""Adam's second moments, brought together by ranks that step alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exogym.comm.comm import Comm
from exogym.flat import gather, is_finite
from exogym.strategy.wire import WireSum

MOMENT = "exp_avg_sq"
OFTEN, EVERY = 4, 16  # exchanges in which each moment travels once: of the first EVERY, and later
FEW = 2**20  # moments, of which so many travel at once in the first EVERY exchanges


def due(exchanges: int, count: int) -> slice:
    """Return which of `count` moments are sent after so many exchanges: a quarter of them or FEW, later a sixteenth.

    Each part has its turn, so that no round takes much longer than another. Moments come to change slowly, with torch's
    betas over a thousand steps.
    """
    parts = min(OFTEN, max(1, -(-count // FEW))) if exchanges < EVERY else EVERY
    turn = exchanges % parts
    return slice(count * turn // parts, count * (turn + 1) // parts)


@dataclass(frozen=True)
class Moments:
    """The second moments of a part of all parameters, and how old they are.

    values: flat[part], corrected for bias. steps: of Adam for each parameter that the part has some of; 0 without a
    state.
    """

    values: Tensor
    part: slice
    steps: list[int]


class Place(NamedTuple):
    """The piece of one parameter that lies in a part of the flat. inside: that piece, as a slice of the parameter."""

    parameter: nn.Parameter
    state: dict[str, Any]  # of the optimizer; {} if it has none yet
    beta: float
    inside: slice
    size: int


class SharedMoments:
    """Ranks take the mean of Adam's second moments, sent in 8 bits a value, of a part of them at a time.

    Adam divides each weight's step by the root of its moment. A rank whose clips lack a word has a tiny moment for the
    word's weights, and moves them at full speed wherever small gradients push them, in each round anew, since a host
    keeps its clips. One batch of all clips would have had the large moment. With it, local steps are nearer to those of
    that batch.
    """

    def __init__(self, comm: Comm, optimizer: Optimizer, parameters: list[nn.Parameter]):
        self._optimizer, self._parameters = optimizer, parameters
        self._sum = WireSum(comm, "float8", feeds_back=False)

    def read(self, part: slice) -> Moments:
        """Return the moments of `part` as they are now; zeros where the optimizer has none yet."""
        places = list(self._places(part))
        steps = [int(place.state["step"]) if place.state else 0 for place in places]
        values = torch.empty(part.stop - part.start)
        corrected = (
            place.state[MOMENT].reshape(-1)[place.inside] / (1 - place.beta**step)
            if step
            else torch.zeros(place.size, device=place.parameter.device)
            for place, step in zip(places, steps, strict=True)
        )
        gather(corrected, values)
        return Moments(values, part, steps)

    def exchange(self, own: Moments, samples: int) -> Tensor | None:
        """Return the ranks' mean of `own.values`, weighted by samples; None for a rank alone, or if none has any.

        Nothing changes yet.
        """
        if self._sum.comm.world_size == 1:
            return None
        numel = own.values.numel()
        weight = float(samples) if any(own.steps) and is_finite(own.values) else 0.0
        flat = self._sum.flat(numel)
        if weight:
            torch.mul(own.values, weight, out=flat)
        else:
            flat.zero_()
        total, header = self._sum.sum(torch.tensor([weight, 0.0]))
        return total.mul_(1 / header[0].item()) if header[0] > 0 else None

    @torch.no_grad()
    def apply(self, mean: Tensor, own: Moments) -> None:
        """Put `mean` in the place of `own`, as if it had been there when that was read; steps may have been made since.

        `mean` is used up.
        """
        at = 0
        for place, step in zip(self._places(own.part), own.steps, strict=True):
            here = slice(at, at + place.size)
            at = here.stop
            if not step:
                continue
            moment = place.state[MOMENT]
            flat, since = moment.reshape(-1), int(place.state["step"]) - step  # a copy where it is not contiguous
            inside, biased = flat[place.inside], 1 - place.beta**step  # the optimizer keeps biased * moment
            if since:
                change = torch.sub(mean[here], own.values[here], out=mean[here]).to(moment.device)
                inside.add_(change, alpha=biased * place.beta**since).clamp_(min=0)
            else:
                inside.copy_(mean[here].mul_(biased))
            if flat.data_ptr() != moment.data_ptr():
                moment.copy_(flat.view(moment.shape))
        self._sum.accept()

    def _places(self, part: slice) -> Iterator[Place]:
        beta = {p: group["betas"][1] for group in self._optimizer.param_groups for p in group["params"]}
        first = 0
        for p in self._parameters:
            start, stop = max(part.start - first, 0), min(part.stop - first, p.numel())
            first += p.numel()
            if start < stop:
                state = self._optimizer.state.get(p, {})
                yield Place(p, state if MOMENT in state else {}, beta[p], slice(start, stop), stop - start)
