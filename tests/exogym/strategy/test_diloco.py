import copy

import pytest
import torch
from exogym_toys import Line, Points, Scalar, Steps, end_round, make_step, run_threads, train_node
from torch import nn

from exogym import DiLoCoStrategy, FlatParameters, SingleComm
from exogym.errors import RanksDiverged, SettingError
from exogym.flat import digest
from exogym.strategy import OptimSpec
from exogym.strategy.communication_module import Draft
from exogym.strategy.diloco import DiLoCoCommunicator

PAPER = {"outer_momentum": 0.9}  # Nesterov, outer lr 0.7
PLAIN = {"outer_momentum": 0}


def drive(comm, strategy, gradients, model=None, samples=1, total=None):
    """Give `strategy` a mean gradient for each step (None: no work); returns the model and all step results."""
    model = model or Scalar()
    strategy.setup(model, comm, total or len(gradients))
    results = []
    for gradient in gradients:
        weight = 0 if gradient is None else 2.0
        model.w.grad = None if gradient is None else torch.tensor([gradient * weight])
        results.append(make_step(strategy, weight, samples if weight else 0))
        model.w.grad = None
    return model, results


def test_two_rounds_by_hand():
    """Inner SGD 0.1 for two steps: changes -0.2 (2 samples) and -0.6 (6 samples), mean -0.5; outer Nesterov."""

    def rank_main(comm):
        gradient, samples = [(1.0, 1), (3.0, 3)][comm.rank]
        model, results = drive(
            comm, DiLoCoStrategy(inner_optim="sgd", lr=0.1, H=2, **PAPER), [gradient] * 4, samples=samples
        )
        return model.w.item(), [r.round for r in results], results[-1].digest

    first = 1 - 0.7 * (0.5 + 0.9 * 0.5)
    second = first - 0.7 * (0.5 + 0.9 * (0.9 * 0.5 + 0.5))
    (w0, rounds, digest0), (w1, _, digest1) = run_threads(2, rank_main)
    assert w0 == w1 == pytest.approx(second, rel=1e-6)
    assert rounds == [None, 1, None, 2]
    assert digest0 == digest1 is not None


def test_two_replicas_go_the_way_that_torchft_has_published():
    """Its fixture diloco_mocked_updates_0 (pytorch/torchft, test_fixtures), the fragment that is synchronised every 6
    steps: gradients of 2, inner lr 1, outer lr 2 without momentum, and the weight before each step.
    """
    published = [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53]

    def rank_main(comm):
        strategy, model = DiLoCoStrategy(inner_optim="sgd", lr=1.0, H=6, outer_lr=2.0, **PLAIN), Scalar()
        strategy.setup(model, comm, len(published))
        ours = []
        for _ in published:
            ours.append(model.w.item())
            model.w.grad = torch.tensor([2.0])
            make_step(strategy, 1.0, 1)
        return ours

    assert run_threads(2, rank_main) == [published, published]


def test_identical_ranks_stay_where_they_are():
    """Summing N equal values and dividing changes about one in seven of them (N = 3); changes of zero stay zero."""

    def rank_main(comm):
        model = Scalar()
        own = torch.Generator().manual_seed(0)  # the global one is shared by these threads
        model.w = nn.Parameter(torch.randn(1000, generator=own))
        before = model.w.detach().clone()
        strategy = DiLoCoStrategy(inner_optim="sgd", lr=0.0, H=1, **PLAIN)
        strategy.setup(model, comm, 1)
        model.w.grad = torch.ones(1000)
        make_step(strategy, 1.0, 1)
        return torch.equal(before, model.w)

    assert all(run_threads(3, rank_main))


@pytest.mark.parametrize(("steps", "H", "ends"), [(6, 3, [3, 6]), (7, 3, [3, 6]), (2, 3, []), (3, 1, [1, 2, 3])])
def test_rounds_end_after_H_steps_and_the_tail_is_flushed(steps, H, ends):
    strategy = DiLoCoStrategy(inner_optim="sgd", lr=0.1, H=H, **PLAIN)
    model, results = drive(SingleComm(), strategy, [1.0] * steps)
    assert [i + 1 for i, r in enumerate(results) if r.round is not None] == ends
    assert [r.agreed for r in results] == [r.round is not None for r in results]
    assert strategy.has_open_round == (steps % H != 0)
    if strategy.has_open_round:
        end_round(strategy)
    assert not strategy.has_open_round
    assert model.w.item() == pytest.approx(1 - 0.1 * steps, rel=1e-6)
    assert strategy.agreed_weights().item() == model.w.item()
    assert strategy.rounds == -(-steps // H)


def test_a_rank_without_work_has_no_say():
    def rank_main(comm):
        strategy = DiLoCoStrategy(inner_optim="sgd", lr=0.1, H=2, **PLAIN)
        return drive(comm, strategy, [[1.0, 1.0], [None, None]][comm.rank])[0].w.item()

    assert run_threads(2, rank_main) == pytest.approx([0.8, 0.8])


def test_nothing_moves_when_nobody_worked():
    def rank_main(comm):
        strategy = DiLoCoStrategy(inner_optim="sgd", lr=0.1, H=1, **PAPER)
        model, results = drive(comm, strategy, [1.0, None, None])
        return model.w.item(), len({r.digest for r in results})

    for w, digests in run_threads(2, rank_main):
        assert w == pytest.approx(1 - 0.7 * 1.9 * 0.1) and digests == 1


def test_all_learn_of_one_rank_that_wants_to_stop():
    def rank_main(comm):
        strategy = DiLoCoStrategy(inner_optim="sgd", lr=0.1, H=4, **PLAIN)
        model = Scalar()
        strategy.setup(model, comm, 20)
        for step in range(1, 21):
            model.w.grad = torch.tensor([1.0])
            result = make_step(strategy, 1.0, 1, stopping=comm.rank == 1 and step == 6)
            if result.stop:
                break
        assert not strategy.has_open_round
        return step, model.w.item(), result.digest

    (step0, w0, digest0), (step1, w1, digest1) = run_threads(2, rank_main)
    assert (step0, step1) == (8, 6) and digest0 == digest1
    assert w0 == w1 == pytest.approx(0.6 - (4 * 0.4 + 2 * 0.2) / 6)


@pytest.mark.parametrize("of_all", [4.0, 0.0])
def test_the_less_of_a_step_a_rank_has_the_larger_its_rate(of_all):
    """Of 4 samples one has 1 and the other 3. Adam's first steps are as long as the rate, whatever the gradient."""

    def rank_main(comm, **settings):
        strategy = DiLoCoStrategy(lr=0.1, weight_decay=0.0, H=2, **PLAIN, **settings)
        strategy.samples_in_step = of_all
        return drive(comm, strategy, [1.0, None], samples=1 if comm.rank == 0 else 3)

    (w0, steps0), (w1, steps1) = run_threads(2, lambda comm: rank_main(comm, scale_lr=True))
    rates = [0.1 * max(1, of_all / samples) ** 0.25 for samples in (1, 3)]
    assert [steps0[0].lr, steps1[0].lr] == pytest.approx(rates)
    assert w0.w.item() == w1.w.item() == pytest.approx(1 - (rates[0] + 3 * rates[1]) / 4)
    assert [one[1][0].lr for one in run_threads(2, rank_main)] == [0.1, 0.1]
    assert rank_main(SingleComm(), scale_lr=True)[1][0].lr == 0.1  # alone it has all that there is


def weighed(comm, gradients, weights, *, samples=1, of_all=4.0, **settings):
    """How far each step of SGD with lr 1 goes, where each has such a mean gradient and weight; and the norms told."""
    strategy = DiLoCoStrategy(inner_optim="sgd", lr=1.0, H=100, **{"weigh_steps": True} | settings)
    strategy.samples_in_step = of_all
    model = Scalar()
    strategy.setup(model, comm, 100)
    changes, norms = [], []
    for gradient, weight in zip(gradients, weights, strict=True):
        before = model.w.item()
        model.w.grad = torch.tensor([gradient * weight])
        norms.append(strategy.local_step(weight, samples).grad_norm)
        changes.append(before - model.w.item())
    return changes, norms, strategy


def of_rank_0(**settings):
    return run_threads(2, lambda comm: weighed(comm, **settings))[0]


def test_a_step_counts_as_its_samples_would_in_one_batch_of_all():
    """After weights of 10 and 30 the usual one is 20. No step counts for more than the 4 samples of all usually do."""
    changes, norms, _ = of_rank_0(gradients=[0.5] * 4, weights=[10.0, 30.0, 20.0, 940.0])
    assert changes == pytest.approx([0.5, 0.75, 0.5, 0.5 * 940 / 250]) and norms == pytest.approx([0.5] * 4)
    changes, _, _ = of_rank_0(gradients=[0.5] * 10, weights=[10.0] * 9 + [1000.0])
    assert changes[-1] == pytest.approx(0.5 * 4)
    halves, _, _ = of_rank_0(gradients=[0.5] * 10, weights=[10.0] * 9 + [1000.0], samples=2)
    assert halves[-1] == pytest.approx(0.5 * 2)


def test_a_step_that_is_clipped_counts_for_the_root_of_it():
    changes, norms, _ = of_rank_0(gradients=[8.0, 8.0, 0.5], weights=[10.0, 30.0, 5.0], max_norm=1.0)
    assert changes == pytest.approx([1.0, 1.5**0.5, 0.5 * 5 / 15], abs=1e-5)
    assert norms == pytest.approx([8.0, 8.0, 0.5])


def test_steps_count_alike_where_nothing_says_how_they_differ():
    uneven = {"gradients": [0.5, 0.5], "weights": [10.0, 30.0]}
    assert of_rank_0(weigh_steps=False, **uneven)[0] == of_rank_0(of_all=0.0, **uneven)[0] == [0.5, 0.5]
    assert of_rank_0(gradients=[0.5, 0.5], weights=[20.0, 20.0])[0] == [0.5, 0.5]
    assert weighed(SingleComm(), **uneven)[0] == [0.5, 0.5]
    assert of_rank_0(of_all=1.0, **uneven)[0] == [0.5, 0.5]  # a rank that has the whole step


def test_what_a_step_usually_weighs_goes_on_in_a_resumed_run():
    """After 10, 30 and 50 the usual weight is 30. One that began anew would take the 50 for usual."""

    def rank_main(comm):
        _, _, strategy = weighed(comm, [0.5, 0.5], [10.0, 30.0])
        own = strategy.own_state()
        _, _, other = weighed(comm, [], [])
        other.load_own_state(own, inside=False)
        other.model.w.grad = torch.tensor([0.5 * 50])
        before = other.model.w.item()
        other.local_step(50.0, 1)
        del own["seen"]
        other.load_own_state(own, inside=False)  # of a run of an earlier version
        return before - other.model.w.item()

    assert run_threads(2, rank_main)[0] == pytest.approx(0.5 * 50 / 30)


class WithMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(10))
        self.register_buffer("mean", torch.ones(9))


@pytest.mark.parametrize("in_flight", [True, False])
def test_only_the_change_of_parameters_is_stretched_in_whichever_piece_they_end(monkeypatch, in_flight):
    monkeypatch.setattr("exogym.strategy.diloco.PIECE", 7)
    weights = torch.arange(19.0)

    def rank_main(comm):
        parameters, module = FlatParameters(WithMean()), DiLoCoCommunicator()
        module.setup(comm, parameters, parameters.read(), keeps_common=True)
        module.stretch, change = 4.0, torch.empty(19)
        parameters.write(torch.zeros(19) if in_flight else weights)
        assert module._read_change(Draft(parameters, weights if in_flight else None), change, 3)
        return change

    factors = torch.tensor([12.0] * 10 + [3.0] * 9)
    assert all(torch.equal(change, (weights - 1) * factors) for change in run_threads(2, rank_main))
    assert torch.equal(weights, torch.arange(19.0))


def momentum(gradients, *, stretches=True, then=None, **settings):
    """Adam's of rank 0 of two, after steps with these gradients; `then` ones after a resume."""

    def rank_main(comm):
        def begin():
            strategy, model = DiLoCoStrategy(lr=1e-3, H=100, weight_decay=0.0, **PLAIN, **settings), Scalar()
            strategy.stretches = stretches
            strategy.setup(model, comm, 10)
            return strategy, model

        def train(strategy, model, gradients):
            for gradient in gradients:
                model.w.grad = torch.tensor([gradient or 0.0])
                make_step(strategy, 1.0 if gradient else 0.0, 1 if gradient else 0)

        strategy, model = begin()
        train(strategy, model, gradients)
        if then:
            state = copy.deepcopy(strategy.own_state())
            strategy, model = begin()
            strategy.load_own_state(state, inside=True)
            train(strategy, model, then)
        (group,) = strategy.optimizer.param_groups
        return strategy.optimizer.state[model.w]["exp_avg"].item(), group["betas"]

    found, betas = run_threads(2, rank_main)[0]
    assert betas == (0.9, 0.999)
    return found


@pytest.mark.parametrize("settings", [{}, {"weigh_steps": True, "share_moments": True}])
def test_the_momentum_of_a_rank_with_fewer_steps_is_as_old_as_that_of_the_others(settings):
    rests = momentum([None, 2.0, None, None, 3.0, 5.0], **settings)
    after_two = (1 - 0.9**2) * 2.0
    after_five = 0.9**3 * after_two + (1 - 0.9**3) * 3.0
    assert rests == pytest.approx(0.9 * after_five + 0.1 * 5.0, rel=1e-5)


def test_the_momentum_of_a_resumed_rank_is_as_old_too():
    whole = momentum([2.0, None, None, 3.0])
    assert momentum([2.0, None], then=[None, 3.0]) == pytest.approx(whole, rel=1e-6)


def test_the_momentum_of_a_rank_whose_change_is_not_stretched_counts_its_own_steps():
    assert momentum([2.0, None, 3.0], stretches=False) == pytest.approx(momentum([2.0, 3.0]), rel=1e-6)


def test_buffers_take_the_mean_and_no_momentum():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))
            self.register_buffer("mean", torch.zeros(2))

    def rank_main(comm):
        model = Normed()
        strategy = DiLoCoStrategy(inner_optim="sgd", lr=0.0, H=1, **PAPER)
        strategy.setup(model, comm, 2)
        for _ in range(2):
            model.mean += comm.rank + 1
            model.w.grad = torch.ones(1)
            make_step(strategy, 1.0, 1)
        return model.mean.tolist()

    assert run_threads(2, rank_main) == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("wire", ["float32", "int8"])
@pytest.mark.parametrize("outer_lr", [None, 0.3])
def test_the_plain_outer_step_has_the_bits_of_the_outer_optimizers(outer_lr, wire, monkeypatch):
    class Buffered(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.linspace(-1, 1, 3000))
            self.register_buffer("mean", torch.linspace(0, 3, 700))

    def rank_main(comm):
        model, own = Buffered(), torch.Generator().manual_seed(comm.rank)
        strategy = DiLoCoStrategy(inner_optim="sgd", lr=0.1, H=2, outer_lr=outer_lr, wire=wire, **PLAIN)
        strategy.setup(model, comm, 6)
        digests = []
        for _ in range(6):
            model.mean += torch.rand(700, generator=own)
            model.w.grad = torch.randn(3000, generator=own)
            digests.append(make_step(strategy, 1.0, comm.rank + 1).digest)
        assert digests[-1] == digest(strategy.agreed_weights())
        return digests

    plain = run_threads(3, rank_main)
    monkeypatch.setattr(DiLoCoCommunicator, "_is_plain", False)
    assert plain == run_threads(3, rank_main)
    assert plain[0] == plain[1] == plain[2]


def test_one_collective_a_round_with_trainables_only():
    calls = []

    def rank_main(comm):
        reduce_ = comm.all_reduce_
        comm.all_reduce_ = lambda flat: (calls.append(flat.numel()), reduce_(flat))
        drive(comm, DiLoCoStrategy(inner_optim="sgd", lr=0.1, H=2, **PLAIN), [1.0] * 4)

    run_threads(2, rank_main)
    assert calls == [1 + 2] * 4  # two rounds on two ranks: weight, samples, stopping


def test_divergence_is_noticed():
    def rank_main(comm):
        strategy = DiLoCoStrategy(inner_optim="sgd", lr=0.1, H=1, **PLAIN)
        strategy.setup(Scalar(), comm, 2)
        strategy.agreed_weights().add_(comm.rank)
        make_step(strategy, 0.0, 0)

    with pytest.raises(RanksDiverged, match=r"after round 1 the weights of rank \[1\]"):
        run_threads(2, rank_main)


def test_without_trainable_parameters_there_is_nothing_to_do():
    with pytest.raises(SettingError, match="no trainable"):
        DiLoCoStrategy().setup(nn.Linear(2, 2).requires_grad_(False), SingleComm(), 1)


def test_state_returns_to_the_last_round():
    settings = {"inner_optim": OptimSpec(name="sgd", lr=0.1, momentum=0.5), "H": 2} | PAPER
    whole, _ = drive(SingleComm(), DiLoCoStrategy(**settings), [1.0, -2.0, 0.5, 3.0])
    strategy = DiLoCoStrategy(**settings)
    model, _ = drive(SingleComm(), strategy, [1.0, -2.0], total=4)
    state = copy.deepcopy(strategy.state_dict())
    resumed, other = DiLoCoStrategy(**settings), Scalar(9.0)
    resumed.setup(other, SingleComm(), 4)
    resumed.load_agreed_state(state["agreed"])
    resumed.load_own_state(state["own"], inside=True)
    assert digest(resumed.agreed_weights()) == digest(strategy.agreed_weights()) and torch.equal(other.w, model.w)
    for gradient in (0.5, 3.0):
        other.w.grad = torch.tensor([gradient])
        make_step(resumed, 1.0, 1)
    assert torch.equal(other.w, whole.w) and resumed.rounds == 2


def test_outer_adam_and_pieces_of_a_flat(monkeypatch):
    """The outer optimizer sees pieces of the flat; elementwise optimizers cannot tell."""

    def train(chunk):
        monkeypatch.setattr("exogym.strategy.diloco.CHUNK", chunk)
        strategy = DiLoCoStrategy(outer_optim="adam", outer_lr=0.1, inner_optim="sgd", lr=0.1, H=1)
        model, points = Line(), Points(8)
        train_node(model, SingleComm(), strategy, Steps([[(points.x, points.y)]]), epochs=3, device="cpu").run()
        return FlatParameters(model).read()

    assert torch.equal(train(2), train(10**6))
