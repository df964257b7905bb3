"""Second moments that ranks share: the mean of all, in 8 bits, as if it had been there from the beginning."""

import itertools
from itertools import pairwise

import pytest
import torch
from exogym_toys import OtherArithmetic, run_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from exogym import DiLoCoStrategy
from exogym.comm.comm import ThreadComm
from exogym.errors import SettingError
from exogym.strategy import DiLoCoConfig, OptimSpec, ParameterServerConfig
from exogym.strategy.moments import EVERY, FEW, MOMENT, Moments, SharedMoments, due
from exogym.strategy.wire import BLOCK, _get, _put

ALL = slice(0, 8)


def adam_after(gradients, size=8, beta=0.5):
    """A parameter, and an Adam that has made a step with each gradient."""
    p = nn.Parameter(torch.zeros(size))
    optimizer = torch.optim.Adam([p], betas=(0.9, beta))
    for gradient in gradients:
        p.grad = torch.full((size,), gradient)
        optimizer.step()
    return p, optimizer


def test_the_mean_of_two_ranks_by_hand():
    """beta 0.5, gradients 2 and 4, or 8 and 0: moments 9 and 16 of 1 - 1/4, corrected 12 and 21.33; 3 to 1 samples."""

    def rank_main(comm):
        p, optimizer = adam_after([[2.0, 4.0], [8.0, 0.0]][comm.rank])
        shared = SharedMoments(comm, optimizer, [p])
        own = shared.read(ALL)
        mean = shared.exchange(own, [3, 1][comm.rank])
        shared.apply(mean, own)
        return own.values[0].item(), optimizer.state[p][MOMENT][0].item()

    (first, new0), (second, new1) = run_threads(2, rank_main)
    assert (first, second) == (pytest.approx(12), pytest.approx(16 / 0.75))
    assert new0 == new1 == pytest.approx((3 * 12 + 16 / 0.75) / 4 * 0.75, rel=0.2)  # two bits of fraction, twice


def test_steps_made_while_it_travelled_count():
    """What has become of the own moment since is replaced, what later gradients have added stays."""
    p, optimizer = adam_after([2.0, 4.0])
    shared = SharedMoments(ThreadComm.group(1)[0], optimizer, [p])
    own = shared.read(ALL)
    p.grad = torch.full_like(p, 6.0)
    optimizer.step()
    shared.apply(torch.full((8,), 20.0), own)
    expected = 0.5 * (20 * 0.75) + 0.5 * 36
    assert optimizer.state[p][MOMENT].tolist() == pytest.approx([expected] * 8)


def test_a_rank_without_steps_takes_no_part_and_none_at_all_is_nothing():
    def rank_main(comm, gradients):
        p, optimizer = adam_after(gradients[comm.rank])
        shared = SharedMoments(comm, optimizer, [p])
        own = shared.read(ALL)
        mean = shared.exchange(own, 1)
        if mean is None:
            return None
        first = mean[0].item()
        shared.apply(mean, own)
        return first

    assert run_threads(2, lambda comm: rank_main(comm, [[2.0], []])) == [pytest.approx(4.0, rel=0.2)] * 2
    assert run_threads(2, lambda comm: rank_main(comm, [[], []])) == [None, None]


def test_alone_nothing_is_rounded():
    p, optimizer = adam_after([2.0])
    shared = SharedMoments(ThreadComm.group(1)[0], optimizer, [p])
    assert shared.exchange(shared.read(ALL), 1) is None


def test_moments_that_are_not_finite_do_not_count():
    def rank_main(comm):
        p, optimizer = adam_after([2.0])
        shared = SharedMoments(comm, optimizer, [p])
        values = shared.read(ALL).values
        own = Moments(values.fill_(float("nan")) if comm.rank else values, ALL, [1])
        return shared.exchange(own, 5)[0].item()

    assert run_threads(2, rank_main) == [pytest.approx(4.0, rel=0.2)] * 2


def through_float8(values):
    sent, arrived = (
        torch.empty(4 * values.numel() // BLOCK + values.numel(), dtype=torch.uint8),
        torch.empty(values.shape),
    )
    _put(values, sent, "float8", arrived, feeds_back=False)
    _get(sent, arrived, "float8")
    return arrived


@settings(deadline=None)
@given(blocks=st.integers(1, 4), exponent=st.integers(-30, 8), seed=st.integers(0, 99))
def test_floats_of_eight_bits_keep_their_size_and_none_becomes_zero(blocks, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    spread = 10 ** (torch.rand(blocks * BLOCK, generator=generator) * -8)
    values = spread * 10.0**exponent
    arrived = through_float8(values)
    assert (arrived > 0).all()
    assert ((arrived / values - 1).abs() <= 0.126).all()
    assert torch.equal(through_float8(values * 0), values * 0)


def test_small_values_beside_large_ones_are_no_zeros():
    values = torch.full((BLOCK,), 1e-30)
    values[0], values[1] = 1.0, 0.0
    arrived = through_float8(values)
    assert arrived[0] == 1.0 and (arrived[1:] == 2.0**-31).all()


def test_a_part_of_them_takes_the_mean_and_the_others_stay():
    """Three parameters of 8, 4 and 6, the second without a step, the third not contiguous; 6 to 14 of the 18."""

    def rank_main(comm):
        first, second = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(4))
        third = nn.Parameter(torch.zeros(3, 2).t())
        optimizer = torch.optim.Adam([first, second, third], betas=(0.9, 0.5))
        for p in (first, third):
            p.grad = torch.full_like(p, [2.0, 4.0][comm.rank])
        optimizer.step()
        shared = SharedMoments(comm, optimizer, [first, second, third])
        own = shared.read(slice(6, 14))
        shared.apply(shared.exchange(own, 1), own)
        assert not optimizer.state[second]
        return own.values.tolist(), *(optimizer.state[p][MOMENT].reshape(-1).tolist() for p in (first, third))

    for (values, first, third), g in zip(run_threads(2, rank_main), (2.0, 4.0), strict=True):
        assert values == [g * g] * 2 + [0] * 4 + [g * g] * 2
        mean, own = pytest.approx(5.0, rel=0.2), g * g / 2  # of 2 and 8, both as they are kept
        assert first == [own] * 6 + [mean] * 2 and third == [mean] * 2 + [own] * 4


@given(count=st.integers(0, 9 * FEW), begun=st.integers(0, 3 * EVERY))
def test_each_travels_once_in_so_many_rounds(count, begun):
    parts = EVERY if begun >= EVERY else 1 if count <= FEW else 2 if count <= 2 * FEW else 3 if count <= 3 * FEW else 4
    begun -= begun % parts
    if begun < EVERY < begun + parts:
        begun -= parts
    turns = [due(begun + n, count) for n in range(parts)]
    assert turns[0].start == 0 and turns[-1].stop == count
    assert all(one.stop == other.start for one, other in pairwise(turns))
    assert max(part.stop - part.start for part in turns) <= -(-count // parts)


def test_it_needs_adam_as_scale_lr_does():
    for inner in (OptimSpec("adam"), torch.optim.AdamW, OtherArithmetic):
        DiLoCoConfig(share_moments=True, scale_lr=True, inner_optim=inner)
    for inner, name in itertools.product(("sgd", torch.optim.RMSprop), ("share_moments", "scale_lr")):
        with pytest.raises(SettingError, match=f"{name} needs inner_optim adam or adamw"):
            DiLoCoConfig(**{name: True}, inner_optim=inner)
    with pytest.raises(SettingError, match="share_moments"):
        ParameterServerConfig(share_moments=True)
    assert DiLoCoStrategy(share_moments=True).config.share_moments
