"""What several modules keep, and what ranks that differ come to in the end."""

import pytest
import torch
from exogym_toys import STRATEGIES, Scalar, make_step, run_threads

from exogym import CommunicateOptimizeStrategy
from exogym.strategy.diloco import DiLoCoCommunicator
from exogym.strategy.federated_averaging import AveragingCommunicator


def test_what_is_handed_over_between_the_rounds_of_two_that_agree_is_what_ranks_have():
    def rank_main(comm):
        modules = [AveragingCommunicator(interval=1), DiLoCoCommunicator(interval=3)]
        strategy = CommunicateOptimizeStrategy(communication_modules=modules, inner_optim="sgd", lr=0.1)
        model = Scalar()
        strategy.setup(model, comm, 5)
        model.w.grad = torch.tensor([1.0 + comm.rank])
        make_step(strategy, 1.0, 1)
        return model.w.item(), strategy.agreed_state()["weights"].item()

    assert run_threads(2, rank_main) == [pytest.approx((0.85, 0.85))] * 2


@pytest.mark.parametrize("name", ["own", "islands", "sparta", "composed"])
def test_the_mean_leaves_out_a_rank_whose_weights_are_not_finite(name):
    def rank_main(comm):
        strategy, model = STRATEGIES[name](), Scalar([2.0, 4.0, float("nan")][comm.rank])
        strategy.setup(Scalar(1.0), comm, 5)
        strategy.parameters.write(model.w.detach())
        return strategy.consensus().item()

    assert run_threads(3, rank_main) == pytest.approx([3.0] * 3)


S = 40_000


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_formulas(ranks):
    """Up to the few that say who takes part: a flag for each tensor, weights of the mean, whether to stop."""
    reduced = 2 * (ranks - 1) / ranks * S
    relays = {2: [1, 1], 4: [2, 2, 1, 1]}[ranks]
    expected = {
        "own": [reduced] * ranks,
        "allreduce": [reduced] * ranks,
        "diloco": [reduced] * ranks,
        "fedavg": [reduced] * ranks,
        "server": [S * count for count in relays],
    }

    def rank_main(comm, name):
        model = Scalar()
        model.w = torch.nn.Parameter(torch.arange(S // 4) / S)
        settings = {"H": 1} if name in ("diloco", "fedavg", "server") else {}
        strategy = STRATEGIES[name](**settings)
        strategy.setup(model, comm, 2)
        model.w.grad = torch.ones(S // 4)
        make_step(strategy, 1.0, 1)
        return comm.bytes_sent

    for name, values in expected.items():
        found = run_threads(ranks, lambda comm, name=name: rank_main(comm, name))
        assert found == pytest.approx(values, abs=100), name
