"""Adafactor without momentum, and weights in bf16, alone and with every strategy."""

import pytest
import torch
from exogym_toys import STRATEGIES, Points, Resumable, run_threads, train_node
from torch import nn

from exogym import Checkpoints, DiLoCoStrategy, FlatParameters, SingleComm, digest
from exogym.errors import SettingError
from exogym.strategy import low_memory
from exogym.strategy.communication_module import Draft
from exogym.strategy.diloco import DiLoCoCommunicator
from exogym.strategy.low_memory import LowMemory, rounded_by_chance


def test_a_step_by_hand():
    p = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    optimizer = LowMemory([p], lr=0.1, weight_decay=0.5)
    p.grad = torch.tensor([[1.0, 2.0], [3.0, 6.0]])  # mean squares of rows 2.5, 22.5, of columns 5, 20; of all 12.5
    optimizer.step()
    # g / sqrt(row * column / all) is 1 everywhere; weight decay takes a twentieth.
    torch.testing.assert_close(p.detach(), 0.95 * torch.tensor([[1.0, 2.0], [3.0, 4.0]]) - 0.1)
    before = p.detach().clone()
    p.grad = torch.tensor([[4.0, 0.0], [0.0, 0.0]])
    optimizer.step()
    new = 2**-0.8
    rows = torch.tensor([2.5, 22.5]).lerp(torch.tensor([8.0, 0.0]), new)
    columns = torch.tensor([5.0, 20.0]).lerp(torch.tensor([8.0, 0.0]), new)
    direction = p.grad / torch.sqrt(rows[:, None] * columns / rows.mean())
    direction /= max(1.0, direction.square().mean().sqrt())
    torch.testing.assert_close(p.detach(), 0.95 * before - 0.1 * direction)


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (4, 2, 3)])
def test_it_computes_the_same_in_pieces(monkeypatch, shape):
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), [torch.randn(shape) for _ in range(3)]

    def trained():
        p = nn.Parameter(start.clone())
        optimizer = LowMemory([p], lr=0.1)
        for p.grad in gradients:
            optimizer.step()
        return p.detach()

    whole = trained()
    monkeypatch.setattr(low_memory, "PIECE", 2)
    torch.testing.assert_close(trained(), whole)
    assert (whole - start).abs().max() > 0.05


def test_rounding_by_chance_is_right_in_the_mean():
    generator = torch.Generator().manual_seed(0)
    for value in (1.001, -1.001, 3e-5, 0.0, 1.0):
        values = torch.full((200_000,), value)
        rounded = rounded_by_chance(values, generator)
        assert len(rounded.unique()) <= 2
        assert rounded.float().mean().item() == pytest.approx(value, rel=1e-4)
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(rounded_by_chance(exact.float(), generator), exact)


def test_steps_below_the_last_bit_of_a_weight_count():
    p = nn.Parameter(torch.ones(100, 100, dtype=torch.bfloat16))
    optimizer = LowMemory([p], lr=1e-4)  # the next bf16 below 1 is 1 - 0.0039
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p.float().mean().item() == pytest.approx(0.99, abs=1e-3)


class Rounded(nn.Module):
    """Matrices are bf16, other weights are not, as in a Whisper that is trained so."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(8, 4, generator=generator).bfloat16())
        self.bias = nn.Parameter(torch.zeros(8))
        self.b = nn.Parameter(torch.randn(1, 8, generator=generator).bfloat16())
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, batch):
        x, y = batch
        self.mean += 0.1
        return ((torch.tanh(x @ self.a.float().T + self.bias) @ self.b.float().T - y) ** 2).mean()


def node(comm, name, steps, checkpoints=None, **settings):
    strategy = STRATEGIES[name](inner_optim="low_memory", lr=0.003)
    work = Resumable(
        [[(Points(40).x[8 * comm.rank + n :: 16], Points(40).y[8 * comm.rank + n :: 16])] for n in range(steps)]
    )
    return train_node(Rounded(), comm, strategy, work, epochs=1, checkpoints=checkpoints, **settings)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in ("demo", "moments", "sharded")])
def test_every_strategy_trains_weights_in_bf16(name):
    def rank_main(comm):
        trained = node(comm, name, 8)
        before, result = trained.model.a.clone(), trained.run()
        assert trained.model.a.dtype == torch.bfloat16 and not torch.equal(before, trained.model.a)
        return digest(FlatParameters(trained.model).read()), result.train_loss

    (first, loss), (second, _) = run_threads(2, rank_main)
    assert first == second and loss < 12  # 16 with weights as they are at first


@pytest.mark.parametrize("name", ["allreduce", "diloco", "hidden"])
def test_a_resumed_run_makes_the_same_steps(tmp_path, name):
    whole, stopped = node(SingleComm(), name, 8), node(SingleComm(), name, 8, Checkpoints(tmp_path, "rank0"))
    asked = iter(range(8))
    stopped.should_stop = lambda: next(asked) == 4
    assert stopped.run().stopped
    resumed = node(SingleComm(), name, 8, Checkpoints(tmp_path, "rank0"), resume=True)
    assert resumed.run().digest == whole.run().digest


def test_what_rounding_took_is_no_change_of_a_round():
    """The common weights have more bits than the model: they keep what lies between two values of bf16."""
    communicator, parameters = DiLoCoCommunicator(H=2, outer_momentum=0), FlatParameters(Rounded())
    common = parameters.read() + 1e-4
    communicator.setup(SingleComm(), parameters, common, keeps_common=True)
    parameters.write(common)
    change = torch.ones(parameters.numel)
    assert communicator._read_change(Draft(parameters), change, samples=3)
    assert not change.any() and not torch.equal(parameters.read(), common)


def test_adams_settings_are_refused():
    with pytest.raises(SettingError, match="share_moments needs inner_optim adam"):
        DiLoCoStrategy(inner_optim="low_memory", share_moments=True)
