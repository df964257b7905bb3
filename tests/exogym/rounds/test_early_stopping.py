"""Training ends when validation gets no better, and the best weights are kept: by hand, on any strategy, over stops."""

from functools import partial

import pytest
import torch
from exogym_toys import STRATEGIES, OtherArithmetic, Scalar, Steps, run_threads, train_node

from exogym import AllReduceStrategy, Checkpoints, DiLoCoStrategy, FlatParameters, SingleComm
from exogym.errors import SettingError
from exogym.flat import digest

SGD = {"inner_optim": "sgd", "lr": 0.05}


class Pulled(Scalar):
    """Loss (w - target)^2. Trained towards 1 from 0, it passes the 0.5 of the validation on its way."""

    def __init__(self):
        super().__init__(0.0)

    def forward(self, target):
        return (self.w - target).square().mean()


def run(comm=None, strategy=None, *, val=0.5, epochs=20, events=None, score=None, **settings):
    """(result, node, the weight at the end); an epoch has one step, and ends with a validation."""
    model = Pulled()
    train, validation = Steps([[torch.ones(2)]]), Steps([[torch.full((2,), val)]])
    events = [].append if events is None else events.append
    strategy = strategy or AllReduceStrategy(**SGD)
    node = train_node(
        model, comm or SingleComm(), strategy, train, val=validation, epochs=epochs, events=events,
        score=score and (lambda batch: score(model.w.item())), **settings,
    )  # fmt: skip
    return node.run(), node, node.model.w.item()


def weight_after(steps: int) -> float:
    w = 0.0
    for _ in range(steps):
        w -= 0.05 * 2 * (w - 1)
    return w


def of(events, kind):
    return [event for event in events if event["type"] == kind]


def test_training_ends_after_so_many_validations_without_a_better_one():
    result, _, w = run(early_stopping=2, events=(events := []))
    assert (result.steps, result.stopped, result.best_step) == (9, False, None)  # the seventh was the best
    assert w == pytest.approx(weight_after(9))
    [told] = of(events, "early_stop")
    assert (told["step"], told["validations"], told["total_steps"]) == (9, 2, 20) and not of(events, "best")


def test_the_best_weights_are_kept():
    result, _, w = run(keep_best=True, events=(events := []))
    assert (result.steps, result.best_step) == (20, 7) and w == pytest.approx(weight_after(7))
    assert result.val_loss == pytest.approx((weight_after(7) - 0.5) ** 2, rel=1e-4)
    assert [event["best_step"] for event in of(events, "best")] == [7] and not of(events, "early_stop")
    result, _, w = run(keep_best=True, early_stopping=3)
    assert (result.steps, result.best_step) == (10, 7) and w == pytest.approx(weight_after(7))


@pytest.mark.parametrize(
    ("weigh", "steps"),
    [
        (lambda w: 100 * abs(w - 0.8), 15),  # 0.794, before 0.815
        (lambda w: 0.0, 7),  # of all alike, the one with the lowest loss
        (lambda w: round(w + 0.25), 2),  # it rises to 1 then
    ],
)
def test_the_best_are_those_with_the_lowest_score_where_there_is_one(weigh, steps):
    events: list[dict] = []
    result, _, w = run(keep_best=True, events=events, score=lambda w: (3 * weigh(w), 3))
    assert result.best_step == steps and w == pytest.approx(weight_after(steps))
    told = of(events, "validation")
    assert [event["score"] for event in told] == pytest.approx([weigh(weight_after(n)) for n in range(1, 21)])
    assert of(events, "best")[0]["score"] == pytest.approx(weigh(weight_after(steps)))


def test_without_anything_to_score_the_last_weights_stay():
    result, _, w = run(keep_best=True, score=lambda w: (0, 0))
    assert result.best_step is None and w == pytest.approx(weight_after(20))


def test_the_last_weights_may_be_the_best():
    result, _, w = run(keep_best=True, early_stopping=1, epochs=5)
    assert (result.steps, result.best_step) == (5, 5) and w == pytest.approx(weight_after(5))


def test_a_loss_that_stays_the_same_is_not_a_better_one():
    result, *_ = run(strategy=AllReduceStrategy(inner_optim="sgd", lr=0.0), early_stopping=3, keep_best=True)
    assert (result.steps, result.best_step) == (4, 1)


def test_a_validation_without_a_finite_loss_is_no_better_one():
    result, *_ = run(val=float("nan"), early_stopping=2, keep_best=True)
    assert (result.steps, result.best_step, result.val_loss) == (2, None, None)


@pytest.mark.parametrize("name", STRATEGIES)
def test_all_ranks_end_alike_with_the_same_weights(name):
    def rank_main(comm):
        events: list[dict] = []
        strategy = STRATEGIES[name](lr=0.08)
        result, node, w = run(comm, strategy, keep_best=True, early_stopping=2, epochs=60, events=events)
        return result, digest(FlatParameters(node.model).read()), of(events, "validation"), w

    (result, own, validations, w), *others = run_threads(3, rank_main)
    losses = {event["step"]: event["loss"] for event in validations}
    best = min(losses, key=losses.get)
    assert result.best_step == best and result.val_loss == losses[best] and list(losses).index(best) == len(losses) - 3
    assert result.digest == own and all((other[0].digest, other[1]) == (own, own) for other in others)
    assert (w - 0.5) ** 2 == pytest.approx(losses[best], abs=1e-6)  # it is the one that was validated


def test_machines_that_round_differently_keep_the_same_weights():
    def rank_main(comm):
        strategy = AllReduceStrategy(inner_optim=partial(OtherArithmetic if comm.rank else torch.optim.AdamW, lr=0.08))
        result, node, _ = run(comm, strategy, keep_best=True, epochs=12)
        return result.best_step, digest(FlatParameters(node.model).read())

    assert len(set(run_threads(2, rank_main))) == 1


@pytest.mark.parametrize("stop_at", [3, 8])
@pytest.mark.parametrize("name", ["allreduce", "diloco", "hidden", "islands"])
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(tmp_path, name, stop_at):
    def rank_main(folder, stopped_at=None, resume=False):
        def of_rank(comm):
            node = None
            at = lambda: node is not None and node.state.now.step >= stopped_at  # noqa: E731
            checkpoints = Checkpoints(folder / str(comm.rank), str(comm.rank))
            train, validation = Steps([[torch.ones(2)]]), Steps([[torch.full((2,), 0.5)]])
            node = train_node(
                Pulled(), comm, STRATEGIES[name](**SGD), train, val=validation, epochs=60, early_stopping=4,
                keep_best=True, checkpoints=checkpoints, resume=resume, should_stop=at if stopped_at else lambda: False,
            )  # fmt: skip
            result = node.run()
            return result.steps, result.best_step, result.val_loss, result.digest, result.stopped

        return of_rank

    expected = run_threads(2, rank_main(tmp_path / "whole"))
    first = run_threads(2, rank_main(tmp_path / "parts", stop_at))
    assert all(rank[-1] for rank in first)
    assert run_threads(2, rank_main(tmp_path / "parts", resume=True)) == expected


def test_a_run_resumed_without_or_with_what_it_had_not(tmp_path):
    """Weights that were not kept at the time are not the best ones later."""

    def part(folder, *, stop_at=None, **settings):
        node = None
        train, validation = Steps([[torch.ones(2)]]), Steps([[torch.full((2,), 0.5)]])
        node = train_node(
            Pulled(), SingleComm(), AllReduceStrategy(**SGD), train, val=validation, epochs=20,
            checkpoints=Checkpoints(folder, "rank0"), resume=True,
            should_stop=lambda: bool(stop_at) and node is not None and node.state.now.step >= stop_at - 1, **settings,
        )  # fmt: skip
        return node.run(), node.model.w.item()

    part(tmp_path / "later", stop_at=10)
    result, w = part(tmp_path / "later", keep_best=True)
    assert result.best_step == 10 and w == pytest.approx(weight_after(10))  # validated once it goes on
    part(tmp_path / "no more", stop_at=10, keep_best=True)
    result, w = part(tmp_path / "no more")
    assert result.best_step is None and w == pytest.approx(weight_after(20))


def test_without_validation_data_both_are_refused():
    for setting in ({"early_stopping": 2}, {"keep_best": True}):
        with pytest.raises(SettingError, match="without validation data"):
            train_node(Pulled(), SingleComm(), DiLoCoStrategy(), Steps([[torch.ones(2)]]), epochs=1, **setting)
    with pytest.raises(SettingError, match="early_stopping"):
        run(early_stopping=-1)
