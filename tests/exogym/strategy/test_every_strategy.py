"""What holds for every strategy, on any number of ranks."""

import itertools

import pytest
import torch
from exogym_toys import (
    STRATEGIES,
    Line,
    OtherArithmetic,
    Points,
    Processes,
    Steps,
    Tokens,
    run_threads,
    token_batch,
    train_node,
)
from torch import nn

from exogym import Checkpoints, ElasticSampler, FlatParameters, SingleComm
from exogym.flat import digest
from exogym.samplers.batches import DatasetSamples

QUICK = {"sharded", "demo", "sparta", "composed"}  # of what takes seconds for each
a_few_quickly = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES]
)
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


with_any_inner_optimizer = pytest.mark.parametrize("name", [n for n in STRATEGIES if n not in ("demo", "moments")])
LR = {"lr": 0.05}


class Centre(nn.Module):
    """A running mean and a count, as of a batch normalisation, for batches of one as well."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(5))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.running_mean.lerp_(x.detach().mean(0), 0.1)
            self.num_batches_tracked += 1
        return x - self.running_mean


class Everything(nn.Module):
    """Tied and frozen weights, one that is never used, one without dimensions, a running mean and its counter."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(5, 4, generator=generator))
        self.tied = self.a
        self.frozen = nn.Parameter(torch.randn(5, 5, generator=generator), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(7, generator=generator))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.norm = Centre()
        self.kernel = nn.Parameter(torch.randn(2, 1, 3, generator=generator))

    def forward(self, batch):
        x, y = batch
        h = self.norm(x @ self.a.T @ self.frozen)
        h = torch.nn.functional.conv1d(h.unsqueeze(1), self.kernel, padding=1).mean(1)
        return ((self.scale * (h @ self.tied).sum(1, keepdim=True) - y) ** 2).mean()


def work(comm, size=40, batch_size=2):
    return ElasticSampler(DatasetSamples(Points(size), batch_size=batch_size), comm.members, comm.members[comm.rank])


def trained(comm, name, model=None, *, epochs=2, size=40, **settings):
    model = model or Everything()
    node = train_node(model, comm, STRATEGIES[name](**LR | settings), work(comm, size), epochs=epochs)
    return node.run(), model, node


@every_strategy
def test_ranks_end_with_the_same_bits(name):
    """Of frozen weights nothing changes, of those that nobody uses hardly a bit; ties hold; integers are kept."""

    def rank_main(comm):
        before = Everything()
        result, model, _ = trained(comm, name)
        assert torch.equal(model.frozen, before.frozen) and model.tied is model.a
        torch.testing.assert_close(model.unused, before.unused, rtol=1e-6, atol=1e-7)
        assert not torch.equal(model.a, before.a) and not torch.equal(model.scale, before.scale)
        assert model.norm.num_batches_tracked > 0
        return result.digest, digest(FlatParameters(model).read())

    found = run_threads(5, rank_main)
    assert len({value for pair in found for value in pair}) == 1


def _digests(comm):
    return {name: trained(comm, name)[0].digest for name in STRATEGIES}


def test_processes_end_with_the_same_bits():
    with Processes(3, _digests) as processes:
        found = [processes.result(rank, timeout=120) for rank in range(3)]
    assert found[0] == found[1] == found[2]


@with_any_inner_optimizer
def test_alone_it_is_the_inner_optimizer(name):
    """One rank: no strategy does anything of its own, but for an outer step along its own change."""
    settings = {"inner_optim": "sgd", "lr": 1e-3}
    if name in ("nesterov", "hidden", "server"):
        settings["outer_momentum"] = 0.0
    _, model, _ = trained(SingleComm(), name, **settings)
    plain = Everything()
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=1e-3)
    for epoch, at in itertools.product(range(2), range(0, 40, 2)):
        order = DatasetSamples(Points(40), batch_size=2).order(epoch)[at : at + 2]
        optimizer.zero_grad()
        plain((Points(40).x[order], Points(40).y[order])).backward()
        optimizer.step()
    torch.testing.assert_close(FlatParameters(model).read(), FlatParameters(plain).read(), rtol=1e-4, atol=1e-5)


@every_strategy
def test_learning_goes_on_whoever_has_work(name):
    """A rank has no batch in most steps, another has a gradient for only one of two weights."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))

        def forward(self, batch):
            return (self.one**2).sum() + ((self.other**2).sum() if batch[0, 0] else 0)

    def rank_main(comm):
        batch = torch.tensor([[float(comm.rank == 0)]])
        steps = [[] if comm.rank == 2 and n % 4 else [batch] for n in range(12)]
        model = Two()
        node = train_node(model, comm, STRATEGIES[name](lr=0.05), Steps(steps), epochs=1)
        return node.run().digest, model.one.max().item(), model.other.max().item()

    found = run_threads(3, rank_main)
    assert len({value[0] for value in found}) == 1
    assert found[0][1] < 0.9 and found[0][2] < 1


@a_few_quickly
@pytest.mark.parametrize(
    ("ranks", "stop_at"),
    [(3, 7), *(pytest.param(*two, marks=pytest.mark.slow) for two in ((1, 5), (2, 4), (3, 1), (3, 6)))],
)
def test_stopped_and_resumed_is_as_if_nothing_had_happened(tmp_path, name, ranks, stop_at):
    def rank_main(comm, folder, stop):
        model = Everything()
        checkpoints = Checkpoints(folder, f"rank{comm.rank}")
        asked = []

        def should_stop():
            asked.append(1)
            return bool(stop) and comm.rank == 0 and len(asked) >= stop

        node = train_node(
            model, comm, STRATEGIES[name](**LR), work(comm, 12 * ranks), epochs=2,
            checkpoints=checkpoints, should_stop=should_stop, resume=not stop, checkpoint_interval=2,
        )  # fmt: skip
        result = node.run()
        checkpoints._writer.shutdown()
        return result.digest, result.stopped, model.norm.running_mean.tolist()

    whole = run_threads(ranks, lambda comm: rank_main(comm, tmp_path / "whole", None))
    first = run_threads(ranks, lambda comm: rank_main(comm, tmp_path / "run", stop_at))
    assert all(stopped for _, stopped, _ in first) and len({value for value, *_ in first}) == 1
    assert run_threads(ranks, lambda comm: rank_main(comm, tmp_path / "run", None)) == whole


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in ("demo", "sharded")])
def test_machines_that_round_differently_end_alike(name):
    def rank_main(comm):
        optimizer = OtherArithmetic if comm.rank else torch.optim.AdamW
        return trained(comm, name, inner_optim=optimizer)[0].digest

    assert len(set(run_threads(3, rank_main))) == 1


@every_strategy
def test_a_gradient_that_is_not_finite_does_no_harm(name):
    """In the data of one rank, once."""

    def rank_main(comm):
        data = Points(24, nan_at=5)
        sampler = ElasticSampler(DatasetSamples(data, batch_size=2), comm.members, comm.members[comm.rank])
        model, told = Everything(), []
        node = train_node(model, comm, STRATEGIES[name](**LR), sampler, epochs=1, events=told.append)
        result = node.run()
        assert FlatParameters(model).read().isfinite().all()
        return result.digest, sum(event["type"] == "warning" for event in told)

    found = run_threads(2, rank_main)
    assert found[0][0] == found[1][0] and sum(warnings for _, warnings in found) == 1


@every_strategy
def test_dict_batches_weighted_by_tokens_and_a_validation(name):
    def rank_main(comm):
        steps = [[token_batch(3, seed=10 * comm.rank + n)] for n in range(6)]
        told = []
        node = train_node(
            Tokens(), comm, STRATEGIES[name](**LR), Steps(steps), epochs=2, events=told.append,
            val=Steps([[token_batch(4, seed=99 + comm.rank)]]), val_interval=5,
        )  # fmt: skip
        result = node.run()
        return result.val_loss, [event["loss"] for event in told if event["type"] == "validation"]

    found = run_threads(2, rank_main)
    assert found[0] == found[1] and len(found[0][1]) >= 2 and found[0][0] == found[0][1][-1]


@with_any_inner_optimizer
def test_a_batch_in_parts_is_the_same_batch(name):
    def train(minibatch_size):
        def rank_main(comm):
            samples = DatasetSamples(Points(24), batch_size=6, minibatch_size=minibatch_size)
            sampler = ElasticSampler(samples, comm.members, comm.members[comm.rank])
            model = Line()
            train_node(model, comm, STRATEGIES[name](inner_optim="sgd", lr=0.05, max_norm=0.5), sampler, epochs=3).run()
            return FlatParameters(model).read()

        return run_threads(2, rank_main)

    torch.testing.assert_close(train(6)[0], train(2)[0], rtol=1e-4, atol=1e-5)
