import pytest
import torch
from exogym_toys import Points, Scalar, Steps, end_round, make_step, run_threads, train_node
from test_diloco import drive
from torch import nn

from exogym import DiLoCoStrategy, FedAvgStrategy, FlatParameters, SingleComm, SPARTADiLoCoStrategy, SPARTAStrategy
from exogym.errors import SettingError
from exogym.strategy.communication_module import Draft
from exogym.strategy.sparta import SparseCommunicator, largest
from exogym.strategy.wire import BLOCK, dequantized, quantized


class Vector(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.w = nn.Parameter(values)


def after_steps(comm, strategy, values, steps=1):
    """The weights [numel] after steps without a gradient: only what is exchanged changes them."""
    model = Vector(torch.zeros(len(values)))
    strategy.setup(model, comm, steps)
    with torch.no_grad():
        model.w.copy_(values)
    for _ in range(steps):
        make_step(strategy, 0.0, 0)
    return model.w.detach().clone()


def test_one_exchange_by_hand():
    """Two ranks, two of four weights: these become the mean, the others stay each rank's own."""

    def rank_main(comm):
        strategy = SPARTAStrategy(p_sparta=0.5, compression_method="sequential")
        return after_steps(comm, strategy, torch.tensor([1.0, 2.0, 3.0, 4.0]) * (1 + 2 * comm.rank)).tolist()

    assert run_threads(2, rank_main) == [[2.0, 4.0, 3.0, 4.0], [2.0, 4.0, 9.0, 12.0]]


@pytest.mark.parametrize("method", ["random", "sequential", "partitioned", "topk"])
def test_with_all_weights_it_is_averaging_at_every_step(method):
    def train(strategy):
        def rank_main(comm):
            points = Points(24)
            steps = [
                [(points.x[s + comm.rank : s + 6 : 2], points.y[s + comm.rank : s + 6 : 2])] for s in range(0, 24, 6)
            ]
            model = nn.Module()
            model.linear = nn.Linear(4, 1)
            nn.init.ones_(model.linear.weight)
            nn.init.zeros_(model.linear.bias)
            model.forward = lambda batch: ((model.linear(batch[0]) - batch[1]) ** 2).mean()
            train_node(model, comm, strategy(), Steps(steps), epochs=2).run()
            return FlatParameters(model).read()

        return run_threads(2, rank_main)

    sparse = train(lambda: SPARTAStrategy(p_sparta=1.0, compression_method=method, lr=0.05))
    averaged = train(lambda: FedAvgStrategy(H=1, lr=0.05))
    assert torch.equal(sparse[0], sparse[1])
    torch.testing.assert_close(sparse[0], averaged[0])


@pytest.mark.parametrize(("method", "rate"), [("random", 0.1), ("sequential", 0.07), ("partitioned", 0.13)])
def test_places_are_sorted_and_each_has_its_turn(method, rate):
    module = SparseCommunicator(sparsification_rate=rate, compression_method=method)
    parameters = FlatParameters(Vector(torch.zeros(997)))
    module.setup(SingleComm(), parameters, torch.zeros(997), keeps_common=True)
    turns = torch.zeros(997)
    for _ in range(200):
        places = module._places(Draft(parameters))
        assert torch.equal(places, places.unique()) and places[0] >= 0 and places[-1] < 997
        assert abs(len(places) - rate * 997) < 1 + 0.02 * 997
        turns[places] += 1
        module.apply((places, torch.zeros(len(places))), Draft(parameters))
    assert turns.min() >= (1 if method == "random" else 0.95 * 200 * rate - 2)
    assert turns.mean() / 200 == pytest.approx(rate, rel=0.05)


def test_topk_takes_the_weights_that_are_furthest_from_the_common_ones():
    def rank_main(comm):
        values = torch.zeros(10)
        values[comm.rank] = 5.0
        values[7] = 0.1 * (comm.rank + 1)
        return after_steps(comm, SPARTAStrategy(p_sparta=0.2, compression_method="topk"), values).tolist()

    first, second = run_threads(2, rank_main)
    assert first[:2] == second[:2] == [2.5, 2.5] and (first[7], second[7]) == pytest.approx((0.1, 0.2))


@pytest.mark.parametrize("count", [1, 99, 2000])
def test_the_largest_are_found_in_pieces(count, monkeypatch):
    monkeypatch.setattr("exogym.strategy.sparta.LEAST_PIECE", 10)
    values = torch.randperm(1000, generator=torch.Generator().manual_seed(count)).float()
    found = largest(values, count)
    assert torch.equal(found.sort().values, values.topk(min(count, 1000)).indices.sort().values)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("count", [1, BLOCK, 3 * BLOCK - 5])
def test_what_was_quantized_comes_back_within_half_a_quantum(bits, count):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 3
    sent = quantized(values, bits)
    back = dequantized(sent, count, bits)
    blocks = -(-count // BLOCK)
    assert sent.dtype == torch.uint8 and sent.numel() == 4 * blocks + -(-count * bits // 8)
    quanta = torch.stack([part.abs().max() for part in values.split(BLOCK)]) / (2 ** (bits - 1) - 1)
    assert ((back - values).abs() <= 0.501 * quanta.repeat_interleave(BLOCK)[:count]).all()
    assert torch.equal(dequantized(quantized(torch.zeros(count), bits), count, bits), torch.zeros(count))


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("largest", [1e-45, 1e-38, 4e-34, 1.6e38])
def test_the_smallest_and_largest_floats_are_within_half_a_quantum(bits, largest):
    """No quantum is so small that it has lost digits."""
    values = torch.linspace(-largest, largest, BLOCK)
    back = dequantized(quantized(values, bits), BLOCK, bits)
    quantum = (values.abs().max() / (2 ** (bits - 1) - 1)).clamp(min=torch.finfo(torch.float32).tiny)
    assert (values - back).abs().max() <= quantum * 0.501


def test_quantized_ranks_agree_where_they_exchange():
    def rank_main(comm):
        values = torch.randn(2000, generator=torch.Generator().manual_seed(comm.rank))
        strategy = SPARTAStrategy(p_sparta=1.0, quantization_bits=8)
        return values, after_steps(comm, strategy, values)

    found = run_threads(3, rank_main)
    mean = torch.stack([values for values, _ in found]).mean(0)
    assert all(torch.equal(after, found[0][1]) for _, after in found)
    assert (found[0][1] - mean).abs().max() < 4 / 127


@pytest.mark.parametrize(("bits", "method"), [(None, "random"), (8, "random"), (4, "sequential"), (None, "topk")])
def test_no_mask_travels(bits, method):
    """Bytes of one exchange by two ranks of 10,000 weights: the places' values, and little besides."""
    values = [torch.randn(10_000, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]

    def rank_main(comm):
        strategy = SPARTAStrategy(p_sparta=0.01, quantization_bits=bits, compression_method=method)
        model = Vector(torch.zeros(10_000))
        strategy.setup(model, comm, 1)
        with torch.no_grad():
            model.w.add_(values[comm.rank])
        before = comm.bytes_sent
        make_step(strategy, 0.0, 0)
        return comm.bytes_sent - before

    value, places, named = (4 if bits is None else bits / 8), 100, 0
    if method == "topk":  # a place that both ranks name is one place
        largest = [set(of_rank.abs().topk(50).indices.tolist()) for of_rank in values]
        places, named = len(largest[0] | largest[1]), 4 * 50
    expected = places * value + named
    assert all(expected <= sent <= expected + 16 for sent in run_threads(2, rank_main))


def test_weights_that_are_not_finite_are_healed_by_the_others():
    def rank_main(comm):
        values = torch.full((4,), float("nan") if comm.rank else 2.0)
        return after_steps(
            comm, SPARTAStrategy(p_sparta=0.5, compression_method="sequential"), values, steps=2
        ).tolist()

    assert run_threads(2, rank_main) == [[2.0] * 4] * 2


def test_sparta_diloco_by_hand():
    """H = 2, a sparse average of all weights after the first step: it changes nothing that the outer step makes."""

    def rank_main(comm):
        strategy = SPARTADiLoCoStrategy(
            inner_optim="sgd", lr=0.1, H=2, p_sparta=1.0, outer_momentum=0.9, sparta_interval=1
        )
        model = Scalar()
        strategy.setup(model, comm, 4)
        trace = []
        for _ in range(4):
            model.w.grad = torch.tensor([float(1 + 2 * comm.rank)])
            result = make_step(strategy, 1.0, 1)
            trace.append((round(model.w.item(), 6), result.round))
        return trace

    first, second = run_threads(2, rank_main)
    outer = 1 - 0.7 * (0.4 + 0.9 * 0.4)  # mean change of two steps: -0.4
    again = outer - 0.7 * (0.4 + 0.9 * (0.9 * 0.4 + 0.4))
    assert first == second
    assert [value for value, _ in first] == pytest.approx([1 - 0.2, outer, outer - 0.2, again], abs=1e-6)
    assert [number for _, number in first] == [None, 1, None, 2]


@pytest.mark.parametrize("interval", [1, 2, 3, 4])
def test_the_sparta_interval_is_kept_and_the_end_is_an_outer_step(interval):
    def rank_main(comm):
        strategy = SPARTADiLoCoStrategy(inner_optim="sgd", lr=0.1, H=5, p_sparta=0.5, sparta_interval=interval)
        _, results = drive(comm, strategy, [1.0] * 13)
        told = [(step + 1, result.round) for step, result in enumerate(results) if result.agreed]
        ends = []
        while strategy.has_open_round:
            ends.append(end_round(strategy).round)
        return told, ends, strategy.parameters.read().item()

    found = run_threads(2, rank_main)
    told, ends, _ = found[0]
    assert found[0] == found[1]
    assert [step for step, number in told if number is not None] == [5, 10]
    assert ends[-1] == 3 and len(ends) == (2 if interval == 2 else 1)  # a sparse one is due before the outer step
    steps, last = [], 0
    for step in range(1, 14):
        if step - last == interval or (step % 5 == 0):
            steps.append(step)
        last = step if step - last == interval else last
    assert [step for step, _ in told] == steps


def test_without_sparse_exchanges_inside_a_round_it_is_diloco():
    def train(strategy):
        def rank_main(comm):
            return drive(comm, strategy(), [[1.0, 2.0, -1.0, 0.5], [0.5, 1.0, 3.0, 1.0]][comm.rank])[0].w.item()

        return run_threads(2, rank_main)

    settings = {"inner_optim": "sgd", "lr": 0.1, "H": 2, "outer_momentum": 0.9}
    assert train(lambda: SPARTADiLoCoStrategy(sparta_interval=50, **settings)) == train(
        lambda: DiLoCoStrategy(**settings)
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"p_sparta": 0}, "p_sparta must be above 0"),
        ({"p_sparta": 1.5}, "at most 1"),
        ({"compression_method": "randm"}, "did you mean 'random'"),
        ({"quantization_bits": 7}, "must be 4, 8 or 16"),
        ({"sparta_interval": 0}, "sparta_interval must be at least 1"),
    ],
)
def test_settings_that_make_no_sense(settings, told):
    with pytest.raises(SettingError, match=told):
        SPARTAStrategy(**settings)
