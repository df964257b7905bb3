"""Common weights in bf16, exchanged a piece at a time."""

import pytest
import torch
from exogym_toys import Points, Resumable, make_step, run_threads, train_node
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from exogym import Checkpoints, DiLoCoStrategy, FlatParameters, SingleComm, digest
from exogym.errors import PeerLost
from exogym.strategy import in_pieces
from exogym.strategy.in_pieces import InPieces

ULP = 2.0**-7  # of bf16 from 1 to 2
FEW = 8  # values of a piece, in tests that want several


class Pair(nn.Module):
    """Of two matrices and a bias the first is bf16."""

    def __init__(self, size: int = 8):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.ones(size, 4, dtype=torch.bfloat16))
        self.b = nn.Parameter(torch.randn(1, size, generator=generator))
        self.bias = nn.Parameter(torch.zeros(size))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, batch):
        x, y = batch
        self.seen += 1
        return ((torch.tanh(x @ self.a.float().T + self.bias) @ self.b.T - y) ** 2).mean()


def set_up(comm, size=8, **settings):
    model, strategy = (
        Pair(size),
        DiLoCoStrategy(**{"inner_optim": "low_memory", "H": 1, "outer_momentum": 0} | settings),
    )
    strategy.setup(model, comm, 10)
    assert isinstance(strategy.modules[0], InPieces)
    return model, strategy


def moved(model, strategy, samples, *, a, b, seen=0.0):
    """End a round in which a rank has moved its weights by so much, and return the result."""
    strategy.optimizer.step = lambda: None
    with torch.no_grad():
        model.a.add_(a)
        model.b.add_(b)
        model.seen.add_(seen)
    return make_step(strategy, 1.0, samples)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_a_round_by_hand(rate):
    def rank_main(comm):
        model, strategy = set_up(comm, size=1000, outer_lr=rate)
        started = model.b.detach().clone()
        step = (ULP, 0.5)[comm.rank], (1.0, 3.0)[comm.rank]
        result = moved(model, strategy, (3, 1)[comm.rank], a=step[0], b=step[1], seen=2.0 * comm.rank)
        assert result.digest == digest(strategy.agreed_weights())
        assert torch.equal(FlatParameters(model).read()[:4000], strategy.agreed_weights()[0].float().flatten())
        return result.digest, model.a.detach().float(), model.b.detach() - started, model.seen

    (first, a, b, seen), (second, *_) = run_threads(2, rank_main)
    assert first == second
    mean = (3 * ULP + 0.5) / 4  # it lies between two values of bf16
    lower = int(rate * mean / ULP)
    assert set(((a - 1) / ULP).unique().tolist()) == {lower, lower + 1}
    assert (a - 1).mean().item() == pytest.approx(rate * mean, rel=0.01)
    torch.testing.assert_close(b, torch.full_like(b, rate * 1.5))
    assert torch.equal(seen, torch.full((3,), 0.5))  # buffers take the mean itself


def test_the_size_of_pieces_makes_no_difference(monkeypatch):
    def rank_main(comm):
        model, strategy = set_up(comm)
        return moved(model, strategy, 1 + comm.rank, a=0.1, b=0.3).digest

    whole = run_threads(2, rank_main)
    monkeypatch.setattr(in_pieces, "AT_ONCE", FEW)
    monkeypatch.setattr(in_pieces, "PIECE", 3)
    assert run_threads(2, rank_main) == whole


def test_a_rank_that_is_not_finite_does_not_count():
    def rank_main(comm):
        model, strategy = set_up(comm)
        result = moved(model, strategy, 2, a=ULP, b=float("nan") if comm.rank else 1.0)
        return result.digest, bool(result.skipped), model.a.unique().tolist()

    (first, is_skipped, a), (second, other_is_skipped, _) = run_threads(2, rank_main)
    assert first == second and (is_skipped, other_is_skipped) == (False, True) and a == [1 + ULP]


@pytest.mark.parametrize("wire", ["float32", "bf16", "int8"])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_exchange_that_broke_off_leaves_nothing_behind(monkeypatch, wire, at):
    """A peer is lost while some piece travels; what the others then make anew is as if nothing had been."""
    monkeypatch.setattr(in_pieces, "AT_ONCE", FEW)

    def rank_main(comm, breaks):
        model, strategy = set_up(comm, wire=wire)
        digests = [moved(model, strategy, 1 + comm.rank, a=0.1, b=0.3).digest]
        with torch.no_grad():
            model.a.add_(0.2)
        local, agreed, own = strategy.local_step(1.0, 3), [*strategy.agreed_weights()], FlatParameters(model).read()
        if breaks:
            with monkeypatch.context() as patched, pytest.raises(PeerLost):
                calls = iter(range(100))

                def broken(act):
                    def call(flat):
                        if next(calls) == at:
                            raise PeerLost("gone")
                        return act(flat)

                    return call

                for name in ("all_reduce_", "all_to_all"):
                    patched.setattr(comm, name, broken(getattr(comm, name)))
                strategy.exchange(False)
            assert digest(agreed) == digest(strategy.agreed_weights()) == digests[0]
            assert torch.equal(own, FlatParameters(model).read())
        digests.append(strategy.apply(strategy.exchange(False), local).digest)
        return [*digests, moved(model, strategy, 1 + comm.rank, a=0.1, b=0.3).digest]

    whole, broken = (run_threads(2, lambda comm, breaks=breaks: rank_main(comm, breaks)) for breaks in (False, True))
    assert whole == broken and whole[0] == whole[1] and len({*whole[0]}) == 3


def node(comm, folder=None, **settings):
    loop = {key: settings.pop(key) for key in ("resume",) if key in settings}
    strategy = DiLoCoStrategy(**{"inner_optim": "low_memory", "lr": 0.01, "H": 3, "outer_momentum": 0} | settings)
    points = Points(80)
    work = Resumable([[(points.x[n::20], points.y[n::20])] for n in range(comm.rank, 20, 2)])
    kept = folder and Checkpoints(folder, f"rank{comm.rank}")
    return train_node(Pair(), comm, strategy, work, epochs=1, checkpoints=kept, **loop)


@pytest.mark.parametrize("settings", [{}, {"wire": "int8"}, {"overlap_steps": 2}, {"overlap_steps": 1, "wire": "bf16"}])
def test_a_resumed_run_of_two_ranks_makes_the_same_steps(tmp_path, monkeypatch, settings):
    monkeypatch.setattr(in_pieces, "AT_ONCE", FEW)

    def stopped(comm):
        trained, asked = node(comm, tmp_path, **settings), iter(range(20))
        trained.should_stop = lambda: next(asked) == 4
        return trained.run()

    whole = [result.digest for result in run_threads(2, lambda comm: node(comm, **settings).run())]
    assert all(result.stopped for result in run_threads(2, stopped))
    ends = [r.digest for r in run_threads(2, lambda comm: node(comm, tmp_path, resume=True, **settings).run())]
    assert whole == ends and whole[0] == whole[1]


class Largest(TorchDispatchMode):
    """The most values of any float32 tensor that was made."""

    def __init__(self):
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.float32:
            self.values = max(self.values, found.numel())
        return found


def test_no_more_than_a_piece_is_in_float32(monkeypatch):
    monkeypatch.setattr(in_pieces, "AT_ONCE", 4 * FEW)
    with Largest() as largest:
        model, strategy = set_up(SingleComm(), size=100)
        with torch.no_grad():
            model.a.add_(ULP)
        make_step(strategy, 1.0, 1)
        strategy.own_state()
    assert largest.values <= 100 + 2  # that of b, which is float32, and the header
    held = sum(tensor.nbytes for tensor in strategy.agreed_weights())
    assert held == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def test_copies_can_be_written_to_a_model_in_float32():
    model = Pair()
    copies = FlatParameters(model).copies()
    with torch.no_grad():
        model.a.add_(1)
    other = Pair().float()
    FlatParameters(other).write(copies)
    assert [copy.dtype for copy in copies] == [torch.bfloat16] + 3 * [torch.float32]
    assert torch.equal(other.a, torch.ones(8, 4)) and other.a.dtype == torch.float32
