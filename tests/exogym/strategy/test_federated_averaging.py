from collections import Counter

import pytest
import torch
from exogym_toys import Scalar, make_step, run_threads
from test_diloco import drive
from test_sparta import after_steps

from exogym import (
    AllReduceStrategy,
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    SettingError,
    SingleComm,
)
from exogym.strategy.diloco import DiLoCoCommunicator
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.sparta import SparseCommunicator


def test_one_round_by_hand_weighted_by_samples():
    def rank_main(comm):
        strategy = FedAvgStrategy(inner_optim="sgd", lr=0.1, H=2)
        model, _ = drive(comm, strategy, [1.0 + 2 * comm.rank] * 2, samples=1 + 2 * comm.rank)
        return model.w.item()

    assert run_threads(2, rank_main) == pytest.approx([1 - (0.2 + 3 * 0.6) / 4] * 2)


def test_one_round_of_islands_by_hand():
    """Four ranks in islands of two: who is together has the same, the mean over all is kept."""

    def rank_main(comm):
        strategy = FedAvgStrategy(inner_optim="sgd", lr=0.1, H=1, island_size=2)
        model = Scalar()
        strategy.setup(model, comm, 1)
        island = strategy.modules[0].island()
        model.w.grad = torch.tensor([float(comm.rank)])
        results = make_step(strategy, 1.0, 1)
        return island, model.w.item(), results.digest

    found = run_threads(4, rank_main)
    for rank, (island, value, told) in enumerate(found):
        assert rank in island and len(island) == 2 and told is None
        assert value == pytest.approx(1 - 0.1 * sum(island) / 2)
        assert all(found[other][1] == value for other in island)


@pytest.mark.parametrize(("world", "size"), [(4, 2), (5, 4), (7, 3), (3, 5), (4, 1)])
def test_islands_are_drawn_anew_are_equal_in_size_and_join_everybody_in_time(world, size):
    class Comm(SingleComm):
        world_size = world

    modules = []
    for rank in range(world):
        module = AveragingCommunicator(island_size=size)
        comm = Comm()
        comm.rank, module._count = rank, 0
        module.comm = comm
        modules.append(module)
    met = Counter()
    for count in range(100):
        for module in modules:
            module._count = count
        islands = {tuple(module.island()) for module in modules}
        assert sorted(rank for island in islands for rank in island) == list(range(world))
        lengths = [len(island) for island in islands]
        assert max(lengths) <= size and max(lengths) - min(lengths) <= 1
        met.update((a, b) for island in islands for a in island for b in island if a < b)
    if size > 1:
        assert len(met) == world * (world - 1) // 2


def test_islands_of_all_are_plain_averaging():
    def train(strategy):
        return run_threads(3, lambda comm: drive(comm, strategy(), [[1.0], [2.0], [4.0]][comm.rank])[0].w.item())

    settings = {"inner_optim": "sgd", "lr": 0.1, "H": 1}
    whole = train(lambda: FedAvgStrategy(**settings))
    assert whole == train(lambda: FedAvgStrategy(island_size=3, **settings))
    assert whole == pytest.approx(train(lambda: DiLoCoStrategy(outer_momentum=0, **settings)))
    assert whole == pytest.approx(train(lambda: AllReduceStrategy(inner_optim="sgd", lr=0.1)))


def test_an_island_that_has_not_trained_keeps_its_weights():
    def rank_main(comm):
        return after_steps(comm, FedAvgStrategy(H=1, island_size=1), torch.tensor([float(comm.rank)])).item()

    assert run_threads(3, rank_main) == [0.0, 1.0, 2.0]


def test_any_composition_runs_in_its_order():
    """Sparse at every step, islands every second, an outer step every fourth, which is the only one then."""
    calls = []

    class Told(SparseCommunicator):
        def exchange(self, *args):
            calls.append((self.comm.rank, "sparse"))
            return super().exchange(*args)

    def rank_main(comm):
        modules = [
            Told(sparsification_rate=1.0),
            AveragingCommunicator(interval=2, island_size=1),
            DiLoCoCommunicator(interval=4, outer_momentum=0.9),
        ]
        strategy = CommunicateOptimizeStrategy(communication_modules=modules, inner_optim="sgd", lr=0.1)
        model, results = drive(comm, strategy, [1.0 + comm.rank] * 8)
        return model.w.item(), [result.round for result in results]

    (first, rounds), (second, _) = run_threads(2, rank_main)
    assert first == second and rounds == [None, 1, None, 2, None, 3, None, 4]
    assert Counter(calls) == {(0, "sparse"): 6, (1, "sparse"): 6}
    outer = 1 - 0.7 * 1.9 * 0.6
    assert first == pytest.approx(outer - 0.7 * (0.6 + 0.9 * (0.9 * 0.6 + 0.6)), abs=1e-5)


def test_modules_are_not_shared_between_strategies():
    module = AveragingCommunicator(interval=2)
    for _ in range(2):
        strategy = CommunicateOptimizeStrategy(communication_modules=[module], inner_optim="sgd", lr=0.1)
        drive(SingleComm(), strategy, [1.0] * 3)
    assert not hasattr(module, "comm")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: FedAvgStrategy(island_size=0), "island_size must be at least 1"),
        (lambda: CommunicateOptimizeStrategy(inner_optim="adamw"), "must be a list of one at least"),
        (lambda: CommunicateOptimizeStrategy(communication_modules=["average"]), "must hold objects"),
        (lambda: AveragingCommunicator(interval=0), "interval must be at least 1"),
        (lambda: SparseCommunicator(sparsification_rate=2), "sparsification_rate must be above 0"),
    ],
)
def test_settings_of_modules_that_make_no_sense(make, told):
    with pytest.raises(SettingError, match=told):
        make()
