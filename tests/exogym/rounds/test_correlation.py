import numpy as np
import pytest
import torch
from exogym_toys import Line, Points, Scalar, Steps, run_threads, train_node

from exogym import AllReduceStrategy, DiLoCoStrategy, FlatParameters, SingleComm
from exogym.errors import SettingError
from exogym.rounds import round as round_module
from exogym.rounds.round import mean_correlation


def of(comm, model):
    return mean_correlation(comm, FlatParameters(model))


def line(values):
    model = Line()
    with torch.no_grad():
        model.linear.weight.copy_(torch.tensor([values[:4]]))
        model.linear.bias.fill_(values[4])
    return model


WEIGHTS = [[1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 1.0, 4.0, 3.0, 5.0], [5.0, 4.0, 3.0, 2.0, 1.0]]


def test_the_mean_over_pairs():
    table = np.corrcoef(WEIGHTS)
    expected = (table[0, 1] + table[0, 2] + table[1, 2]) / 3  # 0.8, -1, -0.8
    values = run_threads(3, lambda comm: of(comm, line(WEIGHTS[comm.rank])))
    assert values == [pytest.approx(expected)] * 3 and expected == pytest.approx(-1 / 3)


def test_where_there_is_none():
    assert of(SingleComm(), Line()) is None
    assert run_threads(2, lambda comm: of(comm, Scalar(1.0 + comm.rank))) == [None, None]
    assert run_threads(2, lambda comm: of(comm, line([float("nan")] * 5 if comm.rank else WEIGHTS[0]))) == [None, None]


def test_a_large_model_is_sampled_alike_on_all_ranks(monkeypatch):
    monkeypatch.setattr(round_module, "MOST_COMPARED", 3000)
    flat = torch.arange(100_000.0)
    sample = round_module.sample(flat)
    assert sample.shape == (3000,) and torch.equal(sample, round_module.sample(flat)) and sample.std() > 20_000
    generator = torch.Generator().manual_seed(1)
    first, noise = torch.randn(2, 100_000, generator=generator)

    def measured(comm):
        model = torch.nn.Linear(100_000, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(first + comm.rank * noise)
        return of(comm, model)

    assert run_threads(2, measured) == [pytest.approx(0.5**0.5, abs=0.03)] * 2


def trained(strategy, size, **settings):
    def main(comm):
        points, events = Points(24), []
        steps = [[(points.x[n :: 3 * size], points.y[n :: 3 * size])] for n in range(comm.rank, 3 * size, size)]
        train_node(Line(), comm, strategy(), Steps(steps), epochs=2, events=events.append, **settings).run()
        return [event for event in events if event["type"] == "correlation"]

    return run_threads(size, main)


def test_ranks_are_compared_before_they_agree():
    ranks = trained(lambda: DiLoCoStrategy(lr=0.1, H=2), 2, log_correlation=2)
    assert [[event["step"] for event in events] for events in ranks] == [[4]] * 2  # rounds end at 2, 4 and 6
    assert ranks[0][0]["value"] == ranks[1][0]["value"] < 0.9999
    ranks = trained(lambda: AllReduceStrategy(lr=0.1), 2, log_correlation=3)
    assert ranks == [[], []]  # they never differ


def test_it_changes_nothing():
    def weights(every):
        def main(comm):
            steps = [[(Points(8).x + comm.rank, Points(8).y)]] * 5
            node = train_node(Line(), comm, DiLoCoStrategy(lr=0.1, H=2), Steps(steps), epochs=2, log_correlation=every)
            return node.run().digest

        return run_threads(3, main)

    assert weights(0) == weights(1)


def test_no_correlation_by_default_nor_of_one_rank():
    assert trained(lambda: DiLoCoStrategy(lr=0.1, H=2), 2) == [[], []]
    assert trained(lambda: DiLoCoStrategy(lr=0.1, H=2), 1, log_correlation=1) == [[]]
    with pytest.raises(SettingError, match="log_correlation"):
        trained(lambda: AllReduceStrategy(lr=0.1), 1, log_correlation=-1)
