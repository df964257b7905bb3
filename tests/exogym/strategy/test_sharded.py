"""AllReduce whose ranks divide the optimizer's moments among them, against the same where each rank has them all."""

import pytest
import torch
from exogym_toys import Line, Points, Processes, Sentences, Steps, Tokens, run_threads, token_batch, train_node
from torch import nn

from exogym import AllReduceStrategy, Checkpoints, ElasticSampler, FlatParameters, LocalTrainer, OptimSpec, SingleComm
from exogym.errors import SettingError
from exogym.samplers.batches import DatasetSamples
from exogym.strategy import strategy_config

STEPS, EPOCHS = 8, 4  # of 2 steps
SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "max_norm": 0.05, "schedule": "cosine", "warmup_steps": 2}


class Unused(Tokens):
    """A parameter of it never has a gradient. All begin at multiples of 16 values, as Whisper's: kernels compute the
    values behind the last 16 in another way, with another last bit."""

    def __init__(self):
        super().__init__(vocabulary=50)
        self.unused = nn.Parameter(torch.ones(48))
        generator = torch.Generator().manual_seed(5)  # the threads of ranks share torch's own
        for p in self.parameters():
            nn.init.normal_(p, std=0.3, generator=generator)


def train(comm, *, folder=None, stop_at=None, model=Unused, **settings):
    """Return the weights, the node and its events; with a folder it is resumed from what is there."""
    net, events = model(), []
    if folder is None:
        work = Steps([[token_batch(2 + comm.rank, seed=10 * step + comm.rank)] for step in range(STEPS)])
    else:  # whoever is there shares it
        samples = DatasetSamples(Sentences(), batch_size=4)
        work = ElasticSampler(samples, comm.members, comm.members[comm.rank])
    saved = {} if folder is None else {"checkpoints": Checkpoints(folder, f"rank{comm.rank}"), "resume": True}
    node = train_node(
        net, comm, AllReduceStrategy(**{"shard_optimizer": True} | SETTINGS | settings), work,
        epochs=EPOCHS if folder else 1, events=events.append,
        should_stop=lambda: node.state.now.step + 1 == stop_at, **saved,
    )  # fmt: skip
    result = node.run()
    return FlatParameters(net).read(), node, events, result.digest


@pytest.mark.parametrize("settings", [{}, {"inner_optim": "adam"}, {"inner_optim": OptimSpec("sgd", momentum=0.9)}])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_same_weights_as_where_each_rank_has_all_moments(ranks, settings):
    if settings:
        settings = settings | {"weight_decay": None}
    if not isinstance(settings.get("inner_optim", ""), str):
        settings |= {"lr": None}
    divided = run_threads(ranks, lambda comm: train(comm, **settings))
    whole = run_threads(ranks, lambda comm: train(comm, shard_optimizer=False, **settings))
    assert {digest for *_, digest in divided} == {divided[0][3]}
    assert torch.equal(divided[0][0], whole[0][0])
    for key in ("lr", "grad_norm", "loss"):
        got, expected = ([e[key] for e in run[0][2] if e["type"] == "step"] for run in (divided, whole))
        assert got == expected
    assert not any(e["type"] in ("drift", "warning") for _, _, events, _ in divided for e in events)


def test_each_rank_keeps_its_part_of_the_moments():
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(300, 304), nn.Linear(304, 7))
            for p in self.parameters():
                nn.init.constant_(p, 0.01)

        def forward(self, batch):
            return self.layers(batch["inputs"].float().sum() * torch.linspace(-1, 1, 300)).square().mean() * 1e-4

    def values(node):
        return [v for kept in node.strategy.optimizer.state.values() for v in kept.values() if v.ndim]

    divided = run_threads(3, lambda comm: train(comm, model=Large))
    count = divided[0][1].strategy.parameters.num_parameters
    for _, node, *_ in divided:
        assert sum(v.numel() for v in values(node)) == pytest.approx(2 * count / 3, rel=0.04)
        assert sum(v.untyped_storage().nbytes() for v in values(node)) == 4 * sum(v.numel() for v in values(node))
    whole = run_threads(3, lambda comm: train(comm, model=Large, shard_optimizer=False))
    assert torch.equal(divided[0][0], whole[0][0])


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_resumed_on_any_number_of_ranks(tmp_path, after):
    """Each rank has its part on its disk; what was on that of a rank who is gone begins anew."""
    whole = run_threads(3, lambda comm: train(comm, folder=tmp_path / "whole"))
    run_threads(3, lambda comm: train(comm, folder=tmp_path / "run", stop_at=5))
    resumed = run_threads(after, lambda comm: train(comm, folder=tmp_path / "run"))
    assert len({digest for *_, digest in resumed}) == 1
    warnings = [e["what"] for _, _, events, _ in resumed for e in events if e["type"] == "warning"]
    moments = [kept for _, node, *_ in resumed for kept in node.strategy.optimizer.state.values() if kept]
    steps, end = {kept["step"].item() for kept in moments}, resumed[0][1].state.now.step
    for _, _, events, _ in resumed:  # the schedule of the run that is gone on with, which others had begun
        assert [e["total_steps"] for e in events if e["type"] in ("start", "plan")][-1] == end
    if after == 3:
        assert torch.equal(resumed[0][0], whole[0][0])
    if after >= 3:
        assert not warnings and steps == {end}
    else:
        assert len(warnings) == 1 and "begin anew" in warnings[0] and steps == {end, end - 5}
        part = 1 - after / 3
        assert float(warnings[0].split("moments of ")[1].split(" %")[0]) / 100 == pytest.approx(part, abs=0.05)


def test_optimizers_that_do_not_treat_each_weight_by_itself_are_refused():
    for optim in ("low_memory", torch.optim.Adafactor):
        with pytest.raises(SettingError, match=r"treats each weight by itself, not .*set one of adamw, adam, sgd"):
            AllReduceStrategy(inner_optim=optim, shard_optimizer=True)
    with pytest.raises(SettingError, match="shard_optimizer"):
        strategy_config("diloco", {"shard_optimizer": "true"})
    model = Line()
    model.linear.weight = nn.Parameter(torch.randn(4, 3).t())
    with pytest.raises(SettingError, match=r"contiguous in memory, and linear\.weight is not"):
        AllReduceStrategy(shard_optimizer=True).setup(model, SingleComm(), 1)


def in_process(comm):
    flat, *_, digest = train(comm)
    return flat.tolist(), digest


def test_in_processes_over_gloo():
    threads = run_threads(2, lambda comm: train(comm))
    with Processes(2, in_process) as processes:
        found = [processes.result(rank) for rank in range(2)]
    assert found[0] == found[1] and torch.equal(torch.tensor(found[0][0]), threads[0][0])


def test_by_local_trainer():
    def fit(**settings):
        strategy = AllReduceStrategy(lr=0.05, **settings)
        return LocalTrainer(Line(), Points(32)).fit(strategy=strategy, num_nodes=2, num_epochs=2, device="cpu")

    ours, theirs = fit(shard_optimizer=True), fit()
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
