"""Records of hand-written events, computed by hand."""

import math

import pytest

from exogym.errors import SettingError
from exogym.logger import Summary


def start(rank=0, *, nodes=2, in_round=1, total=None):
    return {"type": "start", "rank": rank, "num_nodes": nodes, "steps_in_round": in_round, "total_steps": total}


def step(rank, number, loss=1.0, tokens=10, **more):
    event = {"type": "step", "rank": rank, "step": number, "epoch": 0, "loss": loss, "tokens": tokens, "samples": 2}
    return event | {"lr": 0.1, "seconds": 0.5, "grad_norm": 1.0, "bytes": 0, "memory": 100} | more


def take(summary, *events):
    return [record for event in events for record in summary.take(event)]


def shown(records, *names):
    return [tuple(getattr(record, name) for name in ("kind", "step", *names)) for record in records]


def test_all_figures_of_two_ranks():
    now = iter(range(100))
    summary = Summary(2, clock=lambda: next(now))
    spent = {"bytes": 100, "seconds_exchanging": 0.25}
    records = take(
        summary,
        *(start(0), start(1)),
        step(0, 1, 1.0, 10, lr=0.3, memory=70, **spent),
        step(1, 1, 2.0, 30, lr=0.3, memory=90, **spent),
        step(0, 2, 3.0, 10, lr=0.2, memory=80, epoch=1, grad_norm=3.0, **spent),
    )
    assert records == []
    less = spent | {"lr": 0.2, "memory": 10, "grad_norm": None}
    [record] = take(summary, step(1, 2, 4.0, 0, samples=0, seconds=1.5, epoch=1, **less))
    loss = (1 * 10 + 2 * 30 + 3 * 10) / 50
    seconds = (0.5 + 0.5 + 0.5 + 1.5) / 2  # of the mean rank
    assert vars(record) == {
        **{"kind": "train", "step": 2, "epoch": 2, "seconds": 1, "ranks": 2},
        **{"loss": pytest.approx(loss), "perplexity": pytest.approx(math.exp(loss))},
        **dict.fromkeys(("val_loss", "val_perplexity", "local_val_loss", "local_val_perplexity", "val_accuracy")),
        "correlation": None,
        **{"lr": 0.2, "grad_norm": pytest.approx(5 / 3)},
        **{"samples_per_s": 6 / seconds, "tokens_per_s": 50 / seconds},
        **{"bytes_per_step": 200, "bytes_total": 400, "bandwidth": 400, "memory": 90},
    }
    assert record.figures()["loss"] == record.loss and "val_loss" not in record.figures()


def test_ranks_that_run_ahead_of_each_other():
    summary = Summary(2)
    take(summary, start(0, in_round=6), start(1, in_round=6))
    assert take(summary, *(step(0, n, loss=1.0) for n in range(1, 7))) == []  # six ahead, as a round allows
    records = take(summary, *(step(1, n, loss=3.0) for n in range(1, 6)))
    assert shown(records, "loss", "ranks") == [("train", 2, 2.0, 2), ("train", 4, 2.0, 2)]
    assert shown(take(summary, step(1, 6, loss=5.0)), "loss") == [("train", 6, (2 * 1 + 3 + 5) / 4)]


def test_a_rank_that_has_not_told_anything_yet_is_waited_for():
    summary = Summary(1)
    assert take(summary, start(0), step(0, 1, 1.0), step(0, 2, 1.0), start(1)) == []
    assert shown(take(summary, step(1, 1, 3.0)), "loss") == [("train", 1, 2.0)]
    resumed = Summary(1)
    resume = {"type": "resume", "rank": 0, "step": 1000}
    assert take(resumed, start(0), start(1), resume, step(0, 1001)) == []
    assert shown(take(resumed, resume | {"rank": 1}, step(1, 1001)), "ranks") == [("train", 1001, 2)]


def test_a_lost_rank_holds_up_nothing_for_long():
    summary = Summary(2)
    take(summary, start(0, nodes=3))
    records = take(summary, *(step(rank, 1, bytes=5) for rank in range(3)))
    records += take(summary, *(step(rank, n, bytes=5) for n in range(2, 31) for rank in range(2)))
    last = records[-1]
    assert [record.step for record in records] == list(range(2, 31, 2))
    assert (records[0].ranks, last.ranks, last.bytes_total) == (3, 2, 5 * (3 + 2 * 29))
    at_most = summary.take(step(0, 31)), len(summary._open), len(summary._reached), len(summary._told)
    assert at_most == ([], 1, 2, 2)
    # Late news of it do not count again, but for what it sent.
    assert take(summary, step(2, 2, bytes=7)) == []
    assert shown(take(summary, step(0, 32), step(1, 31), step(1, 32)), "ranks", "bytes_total") == [
        ("train", 32, 2, 312)
    ]


def test_a_rank_that_is_lost_inside_a_round_is_not_waited_for_after_its_end():
    summary = Summary(50)
    take(summary, start(0, nodes=2, in_round=500))
    records = take(summary, *(step(rank, n) for n in range(1, 31) for rank in range(2)))
    records += take(summary, *(step(0, n) for n in range(31, 500)))
    assert records == []
    records = take(summary, step(0, 500, bytes=9), {"type": "round", "rank": 0, "step": 500, "bytes": 9, "round": 1})
    assert shown(records, "ranks")[:2] == [("train", 50, 2), ("train", 100, 1)] and records[-1].step == 500
    assert records[-1].bytes_total == 9


def test_another_rank_joins():
    summary = Summary(2)
    take(summary, start(0, nodes=1), *(step(0, n) for n in (1, 2, 3)))
    records = take(summary, start(1, nodes=1), step(0, 4), step(0, 5), step(1, 5), step(1, 6), step(0, 6))
    assert shown(records, "ranks") == [("train", 4, 1), ("train", 6, 2)]


def test_steps_that_are_made_again_count_once():
    summary = Summary(4)
    take(summary, start(0, nodes=1), *(step(0, n, loss=9.0, bytes=1) for n in (1, 2, 3)))
    records = take(summary, *(step(0, n, loss=1.0, bytes=1) for n in (2, 3, 4)))
    assert shown(records, "loss", "bytes_total") == [("train", 4, (9 + 3) / 4, 6)]  # what was sent twice, was
    assert records[0].samples_per_s == 4 * 2 / 2.0
    assert take(summary, step(0, 3), step(0, 4)) == []
    assert [record.kind for record in summary.finish()] == ["end"]


def test_steps_without_a_loss():
    summary = Summary(2)
    take(summary, start(0))
    empty = {"loss": None, "tokens": 0, "samples": 0, "grad_norm": None}
    records = take(summary, step(0, 1, 4.0), step(1, 1, **empty), step(0, 2, float("nan"), 0), step(1, 2, **empty))
    records += take(summary, *(step(rank, n, **empty) for n in (3, 4) for rank in (0, 1)))
    assert shown(records, "loss", "grad_norm") == [("train", 2, 4.0, 1.0), ("train", 4, None, None)]
    assert records[1].perplexity is None and records[1].samples_per_s == 0
    assert shown(summary.finish(), "loss") == [("end", 4, 4.0)]


def test_a_run_that_is_stopped_inside_an_interval():
    summary = Summary(10)
    take(summary, start(0), *(step(rank, n, loss=n) for n in range(1, 14) for rank in range(2)))
    take(summary, {"type": "stop", "rank": 0, "step": 13, "bytes": 8, "seconds": 2.0})
    partial, end = summary.finish()
    assert (partial.kind, partial.step, partial.loss, partial.bytes_total) == ("train", 13, 12.0, 8)
    assert (end.kind, end.step, end.loss, end.bytes_total, end.memory, end.bandwidth) == ("end", 13, 12.0, 8, 100, 4.0)
    assert end.samples_per_s == pytest.approx(2 * 2 / 0.5)
    assert Summary().finish() == []


def test_the_last_interval_ends_with_the_run():
    summary = Summary(10)
    take(summary, start(0, nodes=1, total=12), *(step(0, n) for n in range(1, 12)))
    validation = {"type": "validation", "rank": 0, "step": 12, "loss": 1.0}
    assert shown(take(summary, step(0, 12), validation)) == [("train", 12), ("validation", 12)]
    # The work of a lost rank makes it longer.
    take(summary, {"type": "plan", "rank": 0, "step": 12, "total_steps": 14})
    assert shown(take(summary, step(0, 13), step(0, 14)), "samples_per_s") == [("train", 14, 4.0)]
    assert shown(summary.finish()) == [("end", 14)]


def test_a_round_is_paid_once():
    summary = Summary(2)
    agreed = {"type": "round", "bytes": 100, "seconds": 0.5}
    take(summary, start(0, nodes=1, in_round=2), step(0, 1))
    [record] = take(summary, step(0, 2, bytes=100, seconds_exchanging=0.5), agreed | {"rank": 0, "step": 2})
    assert (record.bytes_total, record.bandwidth) == (100, 200)
    take(summary, step(0, 3), agreed | {"rank": 0, "step": 3})  # the last round, which ended after its last step
    *_, end = summary.finish()
    assert (end.bytes_total, end.bandwidth) == (200, 200)


def test_validation_and_correlation_come_once_and_in_their_place():
    summary = Summary(2)
    validation = {"type": "validation", "epoch": 0, "step": 2, "loss": 2.0, "local_loss": 3.0}
    correlation = {"type": "correlation", "epoch": 0, "step": 2, "value": 0.5}
    take(summary, start(0), step(0, 1), step(0, 2))
    assert take(summary, correlation | {"rank": 0}, validation | {"rank": 0}, step(1, 1)) == []
    records = take(summary, step(1, 2), correlation | {"rank": 1}, validation | {"rank": 1})
    assert shown(records, "correlation", "val_loss", "local_val_loss") == [
        ("train", 2, None, None, None),
        ("correlation", 2, 0.5, None, None),
        ("validation", 2, None, 2.0, 3.0),
    ]
    assert records[2].local_val_perplexity == pytest.approx(math.exp(3))
    agreed = {"type": "validation", "epoch": 0, "step": 3, "loss": 1000.0}
    records = take(summary, step(0, 3), step(1, 3), agreed | {"rank": 0}, agreed | {"rank": 1, "loss": None})
    assert shown(records, "local_val_loss", "val_perplexity") == [("validation", 3, 1000.0, math.inf)]
    *_, end = summary.finish()
    assert (end.val_loss, end.local_val_loss) == (1000.0, 1000.0)


def test_ranks_are_told_apart_by_their_hosts_where_events_have_them():
    summary = Summary(1)
    take(summary, start(0))
    records = take(summary, step(0, 1, host="ada"), step(0, 1, host="bob"), {"type": "warning", "what": "of no rank"})
    assert shown(records, "ranks") == [("train", 1, 2)]


@pytest.mark.parametrize("seed", range(6))
def test_any_order_between_ranks_gives_the_same_records(seed):
    import random

    chance = random.Random(seed)
    queues = [[step(rank, n, loss=rank + n, bytes=n) for n in range(1, 41)] for rank in range(3)]
    summary, records = Summary(7), []
    take(summary, start(0, nodes=3, in_round=40))
    while any(queues):
        records += take(summary, chance.choice([queue for queue in queues if queue]).pop(0))
    records += summary.finish()
    assert [record.step for record in records] == [7, 14, 21, 28, 35, 40, 40]
    assert [record.loss for record in records[:6]] == [5, 12, 19, 26, 33, 39]
    assert records[-1].bytes_total == 3 * sum(range(41))


def test_an_interval_is_at_least_a_step():
    with pytest.raises(SettingError, match="log_interval"):
        Summary(0)
