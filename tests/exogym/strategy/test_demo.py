import math
import random
from dataclasses import replace

import numpy as np
import pytest
import test_exogym_faults as faults
import torch
from exogym_toys import (
    Scalar,
    end_round,
    make_step,
    run_threads,
)
from torch import nn

from exogym import (
    DeMoStrategy,
    SingleComm,
    build_strategy,
    strategy_config,
)
from exogym.comm.comm import ThreadComm
from exogym.errors import SettingError
from exogym.strategy import DeMoConfig, strategy_of
from exogym.strategy.demo import _index_type


def dct_basis(size):
    """As the formula has it."""
    k = np.arange(size)
    scale = np.where(k == 0, 1, 2)[:, None] / size
    return np.sqrt(scale) * np.cos(math.pi * np.outer(k, 2 * k + 1) / (2 * size))


class Weights(nn.Module):
    """Parameters of given shapes."""

    def __init__(self, *shapes, seed=0):
        super().__init__()
        chance = torch.Generator().manual_seed(seed)
        self.all = nn.ParameterList(torch.randn(shape, generator=chance) for shape in shapes)


def set_up(comm, model, **settings):
    strategy = DeMoStrategy(**settings)
    strategy.setup(model, comm, 10)
    return strategy


def random_grads(model, seed):
    chance = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=chance)


# by hand


def test_a_step_by_hand():
    """One chunk of 2 x 2, of which one coefficient is sent. The gradient's DCT is [[5, -1], [-2, 0]]."""
    model = Weights((2, 2))
    [w] = model.all
    w.data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    settings = {"compression_chunk": 2, "compression_topk": 1, "compression_decay": 0.5}
    demo = set_up(SingleComm(), model, lr=0.1, weight_decay=0.5, **settings)
    w.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    result = make_step(demo, 1.0, 1)
    # 5 is sent: 2.5 everywhere, whose sign is 1. Weights decay by 0.1 * 0.5 first.
    torch.testing.assert_close(w.data, torch.tensor([[0.85, 1.8], [2.75, 3.7]]))
    torch.testing.assert_close(demo._residuals[0], 0.1 * torch.tensor([[0.0, -1.0, -2.0, 0.0]]))
    assert (result.lr, result.grad_norm, result.agreed) == (0.1, pytest.approx(math.sqrt(30)), True)
    # No new gradient: half of what is left, of which -2 is the largest now. It goes down the columns: -1, -1, +1, +1.
    w.grad = torch.zeros(2, 2)
    make_step(demo, 1.0, 1)
    expected = torch.tensor([[0.85, 1.8], [2.75, 3.7]]) * 0.95 - 0.1 * torch.tensor([[-1.0, -1.0], [1.0, 1.0]])
    torch.testing.assert_close(w.data, expected)
    torch.testing.assert_close(demo._residuals[0], torch.tensor([[0.0, -0.05, 0.0, 0.0]]))


def as_in_the_paper(weights, grads_of_ranks, shares, deltas, *, lr, decay, topk, wd, chunk):
    """One step in numpy on a matrix whose edges are multiples of `chunk`."""
    basis, sent = dct_basis(chunk), np.zeros_like(weights)
    for grad, share, delta in zip(grads_of_ranks, shares, deltas, strict=True):
        delta *= decay
        delta += lr * grad
        for r in range(0, weights.shape[0], chunk):
            for c in range(0, weights.shape[1], chunk):
                block = np.s_[r : r + chunk, c : c + chunk]
                frequencies = basis @ delta[block] @ basis.T
                smallest = np.sort(np.abs(frequencies), axis=None)[-topk]
                chosen = basis.T @ np.where(np.abs(frequencies) >= smallest, frequencies, 0) @ basis
                delta[block] -= chosen
                sent[block] += share * chosen
    return weights * (1 - lr * wd) - lr * np.sign(sent)


@pytest.mark.parametrize("size", [1, 3])
def test_steps_are_those_of_the_paper(size):
    """Unequal weights, a schedule, several chunks: against numpy in the tensor's own domain, not the frequencies'."""
    weights, steps = [3.0, 1.0, 4.0][:size], 6
    settings = {"compression_chunk": 4, "compression_topk": 3, "compression_decay": 0.9, "weight_decay": 0.3}

    def rank_main(comm):
        model = Weights((8, 12))
        demo = set_up(comm, model, lr=0.05, schedule="cosine", warmup_steps=2, **settings)
        for step in range(steps):
            random_grads(model, seed=100 * step + comm.rank)
            model.all[0].grad *= weights[comm.rank]
            make_step(demo, weights[comm.rank], 1)
        return model.all[0].detach()

    found = run_threads(size, rank_main)
    expected, deltas = Weights((8, 12)).all[0].detach().numpy().astype(float), [np.zeros((8, 12)) for _ in range(size)]
    model, schedule = Weights((8, 12)), DeMoConfig(schedule="cosine", warmup_steps=2, min_lr_ratio=0.1).schedule_spec()
    for step in range(steps):
        grads = []
        for rank in range(size):
            random_grads(model, seed=100 * step + rank)
            grads.append(model.all[0].grad.numpy())
        shares = [weight / sum(weights) for weight in weights]
        rate = {"lr": 0.05 * schedule.factor(step, 10), "decay": 0.9, "topk": 3, "wd": 0.3, "chunk": 4}
        expected = as_in_the_paper(expected, grads, shares, deltas, **rate)
    for weights_of_rank in found:
        assert torch.equal(weights_of_rank, found[0])
        np.testing.assert_allclose(weights_of_rank, expected, atol=1e-6)


SHAPES = [(), (1,), (7,), (64,), (97,), (67, 71), (1, 97), (5, 3, 3), (1, 1, 40, 9), (24, 10, 3), (8, 3, 5, 5), (0, 4)]


@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_with_all_coefficients_and_no_memory_it_is_sign_sgd_on_the_mean_gradient(chunk):
    tokens = [5.0, 1.0, 2.0]
    settings = {"compression_topk": chunk * chunk, "compression_chunk": chunk, "compression_decay": 0.0}

    def rank_main(comm):
        model = Weights(*SHAPES)
        demo = set_up(comm, model, lr=0.01, **settings)
        for step in range(2):
            random_grads(model, seed=10 * step + comm.rank)
            torch._foreach_mul_([p.grad for p in model.parameters()], tokens[comm.rank])
            make_step(demo, tokens[comm.rank], 1)
        return [p.detach() for p in model.parameters()]

    ranks = run_threads(3, rank_main)
    expected = Weights(*SHAPES)
    for step in range(2):
        grads = []
        for rank in range(3):
            random_grads(expected, seed=10 * step + rank)
            grads.append([p.grad * tokens[rank] / sum(tokens) for p in expected.parameters()])
        for p, *of_ranks in zip(expected.parameters(), *grads, strict=True):
            p.data -= 0.01 * sum(of_ranks).sign()
    for found in ranks:
        for p, want in zip(found, expected.parameters(), strict=True):
            torch.testing.assert_close(p, want.detach())


# what travels


def message_of(shapes, **settings):
    model = Weights(*shapes)
    demo = set_up(SingleComm(), model, **settings)
    random_grads(model, 0)
    demo.local_step(1.0, 1)
    demo.exchange(False)
    return demo._message


LAYERS = {
    "full chunks": [(64, 64)],
    "large primes": [(509, 127), (127,)],
    "whisper's stem": [(384, 80, 3), (384,), (384, 384, 3), (384,)],
    "norms": [(768, 768), *[(768,)] * 5],
    "one edge": [(1, 1, 100, 384), (4096,)],
}


@pytest.mark.parametrize("shapes", LAYERS.values(), ids=LAYERS)
def test_it_sends_thirty_times_less_than_all_reduce(shapes):
    """In a ring of four each rank passes on three messages; of an all_reduce's payload it sends 2 * 3 / 4."""
    numel = sum(math.prod(shape) for shape in shapes)
    assert 2 * 3 / 4 * 4 * numel / (3 * message_of(shapes).packed().numel()) >= 30


def test_bytes_of_a_message_by_the_formula():
    """Weight and stopping, who has a gradient, then coefficients of float32 beside the smallest integers that do."""
    assert message_of([(64, 128)]).packed().numel() == 16 + 1 + 2 * 32 * (4 + 2)
    assert message_of([(16, 16)], compression_chunk=16).packed().numel() == 16 + 1 + 32 * (4 + 1)
    assert message_of([(256, 256)], compression_chunk=256).packed().numel() == 16 + 1 + 32 * (4 + 4)
    sizes = [(256, torch.uint8), (257, torch.int16), (32768, torch.int16), (32769, torch.int32)]
    assert [(count, _index_type(count)) for count, _ in sizes] == sizes


def test_one_collective_a_step_of_the_same_size_with_and_without_work():
    calls = []

    def rank_main(comm):
        gather = comm.all_gather
        comm.all_gather = lambda flat: (calls.append((flat.dtype, flat.numel())), gather(flat))[1]
        model = Weights((3, 200), (5,))
        demo = set_up(comm, model)
        for step in range(3):
            random_grads(model, step)
            make_step(demo, float(comm.rank == step), comm.rank == step)

    run_threads(2, rank_main)
    assert len(calls) == 6 and len(set(calls)) == 1 and calls[0][0] == torch.uint8


# ranks


def test_a_gradient_missing_on_one_rank_and_on_all():
    """One that a rank lacks takes nothing from its residual; one that all lack does not even decay."""

    def rank_main(comm):
        model = Weights((2, 2), (2, 2), (2, 2))
        demo = set_up(comm, model, lr=1.0, weight_decay=0.5, compression_chunk=2, compression_topk=1)
        random_grads(model, comm.rank)
        make_step(demo, 1.0, 1)
        before, kept = [p.detach().clone() for p in model.all], [r.clone() for r in demo._residuals]
        random_grads(model, 5)
        model.all[2].grad = None
        if comm.rank:
            model.all[1].grad = None
        make_step(demo, 1.0, 1)
        signs = (before[1] * 0.5 - model.all[1].detach()).round().tolist()
        return torch.equal(before[2], model.all[2]), signs, torch.equal(kept[0][1], demo._residuals[0][1])

    alone = set_up(SingleComm(), Weights((2, 2), (2, 2), (2, 2)), lr=1.0, compression_chunk=2, compression_topk=1)
    model = Weights((2, 2), (2, 2), (2, 2))
    alone.setup(model, SingleComm(), 10)
    for seed in (0, 5):
        random_grads(model, seed)
        before = model.all[1].detach().clone()
        make_step(alone, 1.0, 1)
    signs = (before - model.all[1].detach()).round().tolist()
    assert run_threads(2, rank_main) == [(True, signs, False), (True, signs, True)]


@pytest.mark.parametrize("without", ["work", "a finite gradient", "a finite buffer"])
def test_a_rank_that_has_nothing_to_send_keeps_its_residual(without):
    def rank_main(comm):
        model = Weights((4, 4))
        model.register_buffer("mean", torch.zeros(1))
        demo = set_up(comm, model, compression_chunk=4, compression_topk=3, lr=0.5)
        random_grads(model, comm.rank)
        make_step(demo, 1.0, 1)
        kept, before = demo._residuals[0].clone(), model.all[0].detach().clone()
        random_grads(model, 7)
        weight = 0.0 if comm.rank and without == "work" else 1.0
        if comm.rank and without == "a finite gradient":
            model.all[0].grad[1, 1] = math.nan
        if comm.rank and without == "a finite buffer":
            model.mean.fill_(math.nan)
        result = make_step(demo, weight, 1)
        return kept, demo._residuals[0].clone(), before - model.all[0].detach(), result.skipped, model.mean.item()

    first, second = run_threads(2, rank_main)
    alone, model = DeMoStrategy(compression_chunk=4, compression_topk=3, lr=0.5), Weights((4, 4))
    alone.setup(model, SingleComm(), 10)
    alone._residuals[0].copy_(first[0])
    random_grads(model, 7)
    before = model.all[0].detach().clone()
    make_step(alone, 1.0, 1)
    assert torch.equal(second[0], second[1]) and torch.equal(first[1], alone._residuals[0])
    torch.testing.assert_close(first[2], before - model.all[0].detach())
    assert torch.equal(first[2], second[2]) and not first[3] and bool(second[3]) == (without != "work")
    assert first[4] == second[4] == 0.0


def test_a_rank_clips_its_own_gradient_before_it_counts():
    model = Weights((8, 8))
    demo = set_up(SingleComm(), model, max_norm=0.25, lr=1.0)
    random_grads(model, 0)
    norm = model.all[0].grad.norm().item()
    model.all[0].grad *= 3.0
    local = demo.local_step(3.0, 1)
    values = demo.exchange(False)[0].values[0]
    assert local.grad_norm == pytest.approx(norm) and norm > 0.25
    total = demo._next[0].square().sum() + values.square().sum()
    assert total.sqrt().item() == pytest.approx(0.25, rel=1e-5)


def test_an_exchange_that_fewer_ranks_repeat_is_as_if_it_had_been_their_first():
    fewer = ThreadComm.group(2, timeout=20)

    def with_a_loss(comm):
        model = Weights((9, 9), (3,))
        demo = set_up(comm, model, compression_chunk=4, compression_topk=5)
        random_grads(model, comm.rank)
        local = demo.local_step(1.0, 1)
        untouched = [p.detach().clone() for p in model.all], [r.clone() for r in demo._residuals]
        demo.exchange(False)  # and then rank 2 is lost, before it votes
        assert all(map(torch.equal, untouched[0], model.all)) and all(map(torch.equal, untouched[1], demo._residuals))
        if comm.rank == 2:
            return None
        demo.comm = fewer[comm.rank]
        end_round(demo, local)
        return [p.detach() for p in model.all], demo._residuals

    def from_the_start(comm):
        model = Weights((9, 9), (3,))
        demo = set_up(comm, model, compression_chunk=4, compression_topk=5)
        random_grads(model, comm.rank)
        make_step(demo, 1.0, 1)
        return [p.detach() for p in model.all], demo._residuals

    repeated, first = run_threads(3, with_a_loss)[:2], run_threads(2, from_the_start)
    for one, other in zip(repeated, first, strict=True):
        for ours, theirs in zip([*one[0], *one[1]], [*other[0], *other[1]], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("seed", range(4))
def test_any_fault_at_any_point(seed, tmp_path, monkeypatch):
    """As test_exogym_faults.py has it for the other strategies: hosts die, come back, and runs are resumed."""
    job_of = faults.random_job

    def random_job(chance: random.Random):
        settings = {"compression_chunk": 2, "compression_topk": 1, "check_interval": chance.choice([0, 1, 100])}
        return replace(job_of(chance), strategy=lambda: DeMoStrategy(lr=0.05, **settings))

    monkeypatch.setattr(faults, "random_job", random_job)
    faults.fuzzed(seed, tmp_path)


# state


def test_a_newcomer_takes_the_weights_and_begins_without_a_residual():
    model, other = Weights((5, 5)), Weights((5, 5), seed=1)
    old, new = (set_up(SingleComm(), m, lr=0.1, schedule="linear", compression_topk=9) for m in (model, other))
    for step in range(3):
        random_grads(model, step)
        make_step(old, 1.0, 1)
    new.load_agreed_state(old.agreed_state())
    assert new.steps == new.agreements == 3 and torch.equal(model.all[0], other.all[0])
    assert old._residuals[0].any() and not new._residuals[0].any()
    assert {*old.agreed_state()} == {"steps", "schedule", "weights"}
    new.load_own_state(old.own_state(), inside=True)
    assert torch.equal(old._residuals[0], new._residuals[0]) and new._residuals[0] is not old._residuals[0]


# settings


def test_settings():
    demo = DeMoStrategy(compression_decay=0.999, compression_topk=32, compression_chunk=64, weight_decay=1e-4)
    config = demo.config
    assert (config.compression_decay, config.compression_topk, config.compression_chunk) == (0.999, 32, 64)
    assert set_up(SingleComm(), Scalar()).local_step(0.0, 0).lr == 1e-3
    built = build_strategy("demo", {"compression_topk": "8", "compression_decay": "0.9", "lr": "0.5"})
    assert isinstance(built, DeMoStrategy) and built.config.compression_topk == 8
    assert strategy_of(built.config).config == built.config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inner_optim": "adamw"}, "inner_optim would not be used"),
        ({"inner_optim": torch.optim.SGD}, "inner_optim would not be used"),
        ({"compression_decay": 1.0}, r"compression_decay must be in \[0, 1\)"),
        ({"compression_topk": 0}, "compression_topk must be at least 1"),
        ({"compression_chunk": 0}, "compression_chunk must be at least 1"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0"),
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"max_norm": 0.0}, "max_norm must be above 0"),
        ({"topk": 3}, "has no setting 'topk'"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, message):
    with pytest.raises(SettingError, match=message):
        DeMoStrategy(**settings)
    if isinstance(settings.get("inner_optim", ""), str):
        with pytest.raises(SettingError):
            strategy_config("demo", settings)
