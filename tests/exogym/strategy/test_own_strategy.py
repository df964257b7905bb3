"""A strategy that a user writes, and what constructors take."""

import copy

import pytest
import torch
from exogym_toys import Line, PlainMean, Points, Scalar, Steps, make_step, run_threads, train_node
from torch import nn

from exogym import AllReduceStrategy, DiLoCoStrategy, FedAvgStrategy, FlatParameters, OptimSpec, SettingError, Strategy
from exogym.strategy import STRATEGIES, build_strategy


def trained(strategy, ranks=2, **settings):
    def rank_main(comm):
        points = Points(24)
        steps = [
            [(points.x[s + comm.rank : s + 6 : ranks], points.y[s + comm.rank : s + 6 : ranks])]
            for s in range(0, 24, 6)
        ]
        model, told = Line(), []
        node = train_node(model, comm, copy.deepcopy(strategy), Steps(steps), epochs=2, events=told.append, **settings)
        node.run()
        return FlatParameters(model).read(), [event["lr"] for event in told if event["type"] == "step"]

    return run_threads(ranks, rank_main)


class InStep(Strategy):
    """The form with a `step` of its own."""

    def __init__(self, scale: float = 1.0, **settings):
        super().__init__(**settings)
        self.scale = scale

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * self.scale)

    def step(self) -> None:
        self.communicate_gradients()
        self.update_parameters()
        super().step()


@pytest.mark.parametrize("strategy", [Strategy, PlainMean, AllReduceStrategy])
def test_plain_strategies_are_all_reduce(strategy):
    reduced = trained(AllReduceStrategy(inner_optim="sgd", lr=0.05))
    found = trained(strategy(inner_optim="sgd", lr=0.05))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][0], reduced[0][0])


def test_a_step_of_ones_own():
    reduced = trained(AllReduceStrategy(inner_optim="sgd", lr=0.05))
    found = trained(InStep(), ranks=2)
    torch.testing.assert_close(found[0][0], reduced[0][0])
    with pytest.raises(TypeError, match="InStep has no setting 'scael'"):
        InStep(scael=1)


def test_the_schedule_is_followed_and_comes_first_with_the_first_rate():
    settings = {"inner_optim": "sgd", "lr": 1.0, "schedule": "linear", "warmup_steps": 2}
    expected = trained(AllReduceStrategy(**settings))[0][1]
    assert trained(PlainMean(**settings))[0][1] == trained(Strategy(**settings))[0][1] == expected
    assert expected[:2] == [0.5, 1.0] and len(expected) == 8


def test_gradients_are_this_ranks_mean_and_never_missing():
    seen = []

    class Looks(Strategy):
        def communicate_gradients(self):
            seen.append({name: p.grad.clone() for name, p in self.model.named_parameters()})

    class Two(Scalar):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.ones(2))

    def rank_main(comm):
        model, strategy = Two(), Looks(inner_optim="sgd", lr=0.0)
        strategy.setup(model, comm, 1)
        model.w.grad = torch.tensor([6.0])
        make_step(strategy, 3.0, 3)

    run_threads(2, rank_main)
    assert [(g["w"].item(), g["unused"].tolist()) for g in seen] == [(2.0, [0.0, 0.0])] * 2


def test_what_is_repeated_starts_from_the_same_gradients():
    strategy = PlainMean(inner_optim="sgd", lr=0.1)

    def rank_main(comm):
        mine, model = copy.deepcopy(strategy), Scalar()
        mine.setup(model, comm, 1)
        model.w.grad = torch.tensor([2.0 + 2 * comm.rank])
        local = mine.local_step(1.0, 1)
        for _ in range(3):
            stop = mine.exchange(False)
        mine.apply(stop, local)
        return model.w.item()

    assert run_threads(2, rank_main) == pytest.approx([0.7, 0.7])


@pytest.mark.parametrize("name", STRATEGIES)
def test_unknown_keywords_are_refused_by_name(name):
    cls = type(build_strategy(name, {}))
    with pytest.raises(TypeError, match="'inner_otpim'; did you mean 'inner_optim'"):
        cls(inner_otpim="sgd")
    with pytest.raises(SettingError):
        cls(inner_otpim="sgd")


def test_other_names_of_settings():
    strategy = DiLoCoStrategy(
        inner_optim="adamw", outer_optim="sgd", H=200, inner_lr=1e-4, outer_lr=0.5, max_norm=1.0,
        lr_scheduler="cosine", warmup_steps=1000,
    )  # fmt: skip
    config = strategy.config
    assert (config.lr, config.schedule, config.warmup_steps, config.outer_spec().lr) == (1e-4, "cosine", 1000, 0.5)
    with pytest.raises(SettingError, match="inner_lr is another name of lr"):
        DiLoCoStrategy(lr=1e-3, inner_lr=1e-4)
    with pytest.raises(TypeError, match="did you mean 'lr_scheduler'"):
        DiLoCoStrategy(lr_sheduler="cosine")


def test_optimizers_by_spec_and_class():
    assert OptimSpec(torch.optim.SGD, lr=0.05) == OptimSpec("sgd", lr=0.05) == OptimSpec(name="sgd", lr=0.05)

    def rank_main(comm):
        strategy = FedAvgStrategy(inner_optim=OptimSpec(torch.optim.SGD, lr=0.05), H=5)
        strategy.setup(Scalar(), comm, 1)
        return type(strategy.optimizer), strategy.optimizer.param_groups[0]["lr"]

    assert run_threads(1, rank_main) == [(torch.optim.SGD, 0.05)]
    with pytest.raises(SettingError, match=r"unknown optimizer .adamaxx."):
        OptimSpec("adamaxx", lr=0.05)


def test_one_that_makes_no_optimizer_of_its_own_gets_the_usual_one():
    class Looks(Strategy):
        def _init_node(self, model, rank, num_nodes):
            super()._init_node(model, rank, num_nodes)
            assert self.optimizer is None

    trained(Looks(inner_optim="sgd", lr=0.05))


def test_a_step_that_leaves_out_the_schedule_is_refused():
    class Forgets(Strategy):
        def step(self):
            self.update_parameters()

    with pytest.raises(SettingError, match=r"Forgets.step\(\) must call super\(\).step\(\)"):
        trained(Forgets(inner_optim="sgd", lr=0.05))
