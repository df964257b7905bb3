import pytest
import torch
from exogym_toys import Scalar, run_threads
from test_diloco import drive

from exogym import DiLoCoStrategy, ParameterServerStrategy

SETTINGS = {"inner_optim": "sgd", "lr": 0.1, "H": 2, "outer_momentum": 0.9}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_it_is_diloco_and_one_rank_holds_the_outer_state(ranks):
    def train(strategy):
        def rank_main(comm):
            mine = strategy(**SETTINGS)
            model, results = drive(comm, mine, [1.0 + comm.rank, 2.0, -1.0, 0.5, 3.0, 1.0], samples=1 + comm.rank)
            held = [key for state in mine.modules[-1].outer.state_dict()["state"].values() for key in state]
            return model.w.item(), [result.round for result in results], held

        return run_threads(ranks, rank_main)

    server, diloco = train(ParameterServerStrategy), train(DiLoCoStrategy)
    assert [found[1] for found in server] == [found[1] for found in diloco]
    assert len({found[0] for found in server}) == 1
    assert server[0][0] == pytest.approx(diloco[0][0], rel=1e-6)
    assert [found[2] for found in server] == [["momentum_buffer"]] + [[]] * (ranks - 1)


def test_a_repeated_exchange_gives_the_same():
    def rank_main(comm):
        strategy, model = ParameterServerStrategy(**SETTINGS | {"H": 1}), Scalar()
        strategy.setup(model, comm, 2)
        for _ in range(2):
            model.w.grad = torch.tensor([1.0])
            local = strategy.local_step(1.0, 1)
            first = strategy.exchange(False)
            values = first.by_module[0][1].result[0].clone()
            second = strategy.exchange(False)
            assert torch.equal(values, second.by_module[0][1].result[0])
            strategy.apply(second, local)
        return model.w.item()

    assert len(set(run_threads(2, rank_main))) == 1
