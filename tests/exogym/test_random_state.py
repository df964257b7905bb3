from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from exogym.device import same_draws


def test_on_mps_a_second_pass_draws_what_the_first_drew(monkeypatch):
    """With a generator that stands in for Apple's: torch's checkpoint keeps that of mps nowhere (pytorch 127676)."""
    generator = torch.Generator().manual_seed(1)
    monkeypatch.setattr(torch.mps, "get_rng_state", generator.get_state)
    monkeypatch.setattr(torch.mps, "set_rng_state", generator.set_state)
    weight, drawn = torch.ones(100, requires_grad=True), []

    def loss(weight: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(100, generator=generator))
        return (weight * drawn[-1]).square().sum()

    total = checkpoint(loss, weight, use_reentrant=False, context_fn=partial(same_draws, torch.device("mps")))
    total.backward(retain_graph=True)
    total.backward()
    first, second, third = drawn
    assert torch.equal(first, second) and torch.equal(first, third)
    assert torch.equal(weight.grad, 4 * first.square())
    following = torch.rand(100, generator=generator)  # as if nothing had been computed twice
    assert torch.equal(torch.stack([first, following]), torch.rand(2, 100, generator=generator.manual_seed(1)))
