import time
from functools import partial

import pytest
import torch
from exogym_toys import Line, Points, Steps, Tokens, run_threads, token_batch, train_node
from torch import nn

from exogym import AllReduceStrategy, Checkpoints, DiLoCoStrategy, FlatParameters, SingleComm
from exogym.errors import ExogymError, NotFinite, RanksDiverged, SettingError
from exogym.rounds.progress import MOST_SKIPPED


def steps_of(points: Points, size: int) -> Steps:
    return Steps([[(points.x[i : i + size], points.y[i : i + size])] for i in range(0, len(points), size)])


def node(model=None, comm=None, strategy=None, train=None, **settings):
    events: list[dict] = []
    settings = {"device": "cpu", "events": events.append} | settings
    if not {"epochs", "max_steps"} & settings.keys():
        settings["epochs"] = 2
    strategy = strategy or AllReduceStrategy(lr=0.05)
    made = train_node(model or Line(), comm or SingleComm(), strategy, train or steps_of(Points(12), 4), **settings)
    return made, events


def test_all_start_from_rank_0_and_must_build_the_same():
    def train(model, steps=1, strategy=DiLoCoStrategy):
        return lambda comm: train_node(
            model(comm.rank), comm, strategy(), Steps([[(torch.ones(2, 4), torch.ones(2, 1))]] * steps(comm.rank)),
            max_steps=1 + steps(comm.rank), epochs=1, device="cpu",
        ).run()  # fmt: skip

    one = lambda rank: 1  # noqa: E731
    assert len({result.digest for result in run_threads(3, train(lambda rank: Line(seed=rank), one))}) == 1
    with pytest.raises(RanksDiverged, match="same model"):
        run_threads(2, train(lambda rank: [Line, Tokens][rank](), one))
    with pytest.raises(RanksDiverged, match="number of steps"):
        run_threads(2, train(lambda rank: Line(), lambda rank: 1 + rank))
    with pytest.raises(RanksDiverged, match="other base models"):
        run_threads(2, train(lambda rank: Tokens(seed=rank), one))


def test_events_and_result():
    made, events = node(val=steps_of(Points(6), 4))
    result = made.run()
    kinds = [e["type"] for e in events]
    assert kinds == ["start", *["step"] * 3, "validation", *["step"] * 3, "validation"]
    expected = {"steps_per_epoch": 3, "total_steps": 6, "trainable": 5, "device": "cpu", "rank": 0, "num_nodes": 1}
    assert events[0] == events[0] | expected
    step = events[5]
    assert (step["step"], step["epoch"], step["tokens"], step["samples"], step["lr"]) == (4, 1, 4, 4, 0.05)
    assert step["loss"] > 0 and step["grad_norm"] > 0 and step["seconds"] > 0
    assert (result.steps, result.samples, result.stopped, result.val_loss) == (6, 24, False, events[-1]["loss"])
    assert result.train_loss == pytest.approx(sum(e["loss"] for e in events if e.get("epoch") == 1 and "lr" in e) / 3)


class SlowSteps(Steps):
    def epoch(self, epoch):
        for batches in super().epoch(epoch):
            time.sleep(0.05)
            yield batches


def test_a_step_tells_how_long_it_waited_for_its_batches():
    made, events = node(train=SlowSteps(steps_of(Points(12), 4).steps))
    made.run()
    waited = [event["seconds_waiting"] for event in events if event["type"] == "step"]
    assert len(waited) == 6 and min(waited) >= 0.05
    made, events = node()
    made.run()
    assert min(event["seconds_waiting"] for event in events if event["type"] == "step") < 0.05


def test_round_events_and_the_last_short_one():
    made, events = node(strategy=DiLoCoStrategy(H=4, lr=0.01))
    result = made.run()
    rounds = [e for e in events if e["type"] == "round"]
    assert [(e["round"], e["step"]) for e in rounds] == [(1, 4), (2, 6)] and result.rounds == 2
    assert rounds[-1]["digest"] == result.digest and {"bytes", "seconds"} <= rounds[0].keys()


def test_the_epoch_reaches_the_source_and_max_steps_cuts_it():
    source = steps_of(Points(12), 4)
    result = node(train=source, max_steps=7)[0].run()
    assert source.epochs_seen == [0, 1, 2] and result.steps == 7
    assert node(train=source, max_steps=2, epochs=5)[0].run().steps == 2


class Modes(Line):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.seen = []

    def forward(self, batch):
        self.seen.append((self.training, self.dropout.training, torch.is_grad_enabled()))
        return super().forward(batch)


def test_train_and_eval_modes():
    model = Modes()
    model.train()
    model.dropout.eval()
    node(model=model, train=steps_of(Points(4), 4), val=steps_of(Points(4), 4))[0].run()
    assert model.seen == [(True, True, True), (False, False, False)] * 2
    assert model.training and not model.dropout.training


def test_validation_waits_for_agreement_and_is_the_same_on_all_ranks():
    def rank_main(comm):
        points = Points(12)
        share = (points.x[comm.rank :: 5], points.y[comm.rank :: 5])  # 3 and 3 of 12, not even
        model = Line()
        strategy = DiLoCoStrategy(H=4, lr=0.05)
        made, events = node(model, comm, strategy, Steps([[share]] * 3), epochs=3, val=Steps([[share]]), val_interval=3)
        made.run()
        return [(e["step"], e["loss"]) for e in events if e["type"] == "validation"]

    first, second = run_threads(2, rank_main)
    assert first == second and [step for step, _ in first] == [4, 8, 9]


def test_validation_loss_is_per_token_over_all_ranks():
    batches = [token_batch(n + 2, seed=n) for n in range(3)]

    def rank_main(comm):
        val = Steps([[b] for b in (batches[:2] if comm.rank == 0 else batches[2:])])
        made, _ = node(Tokens(), comm, AllReduceStrategy(lr=0.0), Steps([[batches[0]]]), epochs=1, val=val)
        return made.run().val_loss

    with torch.no_grad():
        losses = [(loss * n, n) for loss, n in map(Tokens(), batches)]
    expected = sum(total for total, _ in losses) / sum(n for _, n in losses)
    assert run_threads(2, rank_main) == pytest.approx([expected.item()] * 2)


@pytest.mark.parametrize("strategy", [AllReduceStrategy, DiLoCoStrategy])
def test_one_rank_that_should_stop_stops_all(strategy):
    def rank_main(comm):
        asked = []
        made, events = node(
            comm=comm,
            strategy=strategy(),
            epochs=100,
            val=steps_of(Points(4), 4),
            val_interval=5,
            should_stop=lambda: asked.append(1) or (comm.rank == 1 and len(asked) == 7),
        )
        return made.run(), [e["step"] for e in events if e["type"] == "validation"]

    (first, validated), (second, _) = run_threads(2, rank_main)
    assert first.stopped and second.stopped and first.digest == second.digest
    assert second.steps == 7
    assert (first.steps, validated) == ((7, [5]) if strategy is AllReduceStrategy else (100, []))


@pytest.mark.parametrize("strategy", [AllReduceStrategy, DiLoCoStrategy, partial(DiLoCoStrategy, overlap_steps=2)])
def test_who_asks_at_the_last_step_stops_nothing(strategy):
    """All work is done, so its result is validated, and is that of a run that nobody stopped."""

    def rank_main(comm, stop_at=0):
        made, events = node(
            comm=comm,
            strategy=strategy(),
            epochs=1,
            val=steps_of(Points(4), 4),
            should_stop=lambda: made.state.now.step + 1 == stop_at,
        )
        result = made.run()
        return result.steps, result.stopped, result.digest, [e["step"] for e in events if e["type"] == "validation"]

    [(steps, stopped, *result), other] = run_threads(2, rank_main)
    assert not stopped and run_threads(2, lambda comm: rank_main(comm, steps)) == [(steps, False, *result), other]


class Bad(Tokens):
    """A batch with the id `bad` has no finite loss, one with `steep` no finite gradient."""

    def forward(self, batch):
        loss, tokens = super().forward(batch)
        if "bad" in batch["ids"]:
            return loss * float("nan"), tokens
        return (loss + (self.hidden.weight * 0).sum().sqrt() if "steep" in batch["ids"] else loss), tokens


def named(*ids):
    """A micro-batch for each id."""
    return [{**token_batch(2, seed=number), "ids": [name]} for number, name in enumerate(ids)]


STRATEGIES = {"allreduce": lambda: AllReduceStrategy(lr=0.02), "diloco": lambda: DiLoCoStrategy(lr=0.02, H=2)}
both = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)


def weights_of(strategy, *sources, epochs=1):
    def rank_main(comm):
        made, events = node(
            Bad(), comm=comm, strategy=strategy(), train=Steps(sources[comm.rank]), epochs=epochs, val_interval=99
        )
        result = made.run()
        weights = FlatParameters(made.model).read()
        assert weights.isfinite().all()
        return weights, [event for event in events if event["type"] == "warning"], result

    return run_threads(len(sources), rank_main)


@both
@pytest.mark.parametrize("kind", ["bad", "steep"])
def test_what_has_no_finite_loss_or_gradient_is_left_out_and_told(strategy, kind):
    """As if that step had had no work on that rank; the other ranks' work counts."""
    others = [named("a"), named("b"), named("c"), named("d")]
    ranks = weights_of(strategy, [named("e"), named(kind), named("f"), named("g")], others)
    expected = weights_of(strategy, [named("e"), [], named("f"), named("g")], others)
    assert all(torch.equal(ours, theirs) for (ours, *_), (theirs, *_) in zip(ranks, expected, strict=True))
    [warning] = ranks[0][1]
    assert "at step 2 of rank 0" in warning["what"] and f"({kind}" in warning["what"] and warning["skipped"] == 1
    assert not ranks[1][1]


@both
def test_a_good_micro_batch_counts_beside_a_bad_one(strategy):
    ranks = weights_of(strategy, [named("a", "bad"), named("b")], [named("c"), named("d")])
    expected = weights_of(strategy, [named("a"), named("b")], [named("c"), named("d")])
    assert torch.equal(ranks[1][0], expected[1][0]) and "(bad)" in ranks[0][1][0]["what"]


class Normed(nn.Module):
    """With buffers that each forward pass changes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, batch):
        return self.norm(batch["x"]).pow(2).mean() + self.norm.weight.sum()


@both
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_left_out_does_not_change_buffers_either(strategy, ranks):
    def rank_main(comm):
        x = [torch.full((3, 4), float(step)) + torch.eye(3, 4) for step in range(8)]
        good = [[{"x": value, "ids": ["good"]}] for value in x]
        mixed = [[*step, {"x": torch.full((3, 4), torch.nan), "ids": ["bad"]}] for step in good]
        results = []
        for steps in (good, mixed if comm.rank == 0 else good):
            made, _ = node(Normed(), comm=comm, strategy=strategy(), train=Steps(steps), epochs=1, val_interval=99)
            made.run()
            results.append(FlatParameters(made.model).read())
        return results

    for without, with_bad in run_threads(ranks, rank_main):
        assert torch.equal(without, with_bad) and with_bad.isfinite().all()


@both
def test_after_too_many_bad_steps_what_was_agreed_can_still_be_saved(strategy, tmp_path):
    steps = [named("a"), named("b"), *(named("bad") for _ in range(MOST_SKIPPED))]
    made, _ = node(Bad(), strategy=strategy(), train=Steps(steps), epochs=1, checkpoints=Checkpoints(tmp_path, "rank0"))
    with pytest.raises(NotFinite):
        made.run()
    assert made.save_agreed(patience_s=0.0) and made.saved.checkpoints.good()


@both
@pytest.mark.parametrize("kind", ["bad", "steep"])
def test_only_several_bad_steps_in_a_row_end_the_run(strategy, kind):
    kinds = [kind] * (MOST_SKIPPED - 1)
    [(_, warnings, _)] = weights_of(strategy, [named(name) for name in (*kinds, "a", *kinds)])
    assert len(warnings) == 2 * (MOST_SKIPPED - 1)
    with pytest.raises(NotFinite, match=rf"step 6 of rank 0 \({kind}\), as in the 4 steps before"):
        weights_of(strategy, [named(name) for name in ("a", *kinds, kind)])


def test_a_step_without_work_does_not_make_a_bad_row_shorter():
    with pytest.raises(NotFinite):
        weights_of(STRATEGIES["diloco"], [step for _ in range(MOST_SKIPPED) for step in (named("bad"), [])])


def test_a_validation_loss_leaves_out_what_is_not_finite():
    made, _ = node(Bad(), train=Steps([named("a")]), val=Steps([named("b", "bad")]), epochs=1)
    value = made.run().val_loss
    made, _ = node(Bad(), train=Steps([named("a")]), val=Steps([named("b")]), epochs=1)
    assert value == made.run().val_loss


def test_a_batch_without_a_single_token_is_no_work():
    empty = token_batch(3, seed=0)
    empty["labels"][:] = -100
    made, events = node(Tokens(), train=Steps([[empty], [empty, token_batch(2, seed=1)]]), epochs=1)
    made.run()
    assert events[1]["loss"] is None and events[1]["tokens"] == 0 and events[2]["loss"] > 0


def test_a_source_that_breaks_its_promise():
    class Short(Steps):
        steps_per_epoch = 5

    with pytest.raises(ExogymError, match="lacks 3 of the 5 steps"):
        node(train=Short(steps_of(Points(8), 4).steps))[0].run()
    with pytest.raises(SettingError, match="nothing to train on"):
        node(train=Steps([]))
    with pytest.raises(SettingError, match="precision"):
        node(precision="fp16")
    with pytest.raises(SettingError, match="give num_epochs or max_steps"):
        train_node(Line(), SingleComm(), AllReduceStrategy(), steps_of(Points(4), 4), device="cpu")
