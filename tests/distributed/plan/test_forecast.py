"""What a run is expected to take: sums that can be done by hand."""

from __future__ import annotations

import math

import pytest
from small_run import PAIR, folder, job, run_dir

from distributed.plan import forecast
from distributed.plan.forecast import HERE, Speed, key_of, learn, ratios_of, step_of_all, step_seconds
from distributed.plan.job import Job
from distributed.run_dir.summary import PARTS
from whisper_tuner.fact_store import FactStore
from whisper_tuner.text import in_words

__all__ = ["folder", "job", "run_dir"]
CLIPS = {"train": 12, "validation": 4, "test": 10}
FAST = Speed(host="a", sizes=[[2, 1.5], [1, 1.0]], trainable=1_000_000, start_s=10.0, clip_s=1.5)
SLOW = Speed(host="b", sizes=[[2, 4.0], [1, 2.0]], trainable=1_000_000, start_s=12.0)


@pytest.fixture(autouse=True)
def _facts(monkeypatch, tmp_path):
    monkeypatch.setattr(forecast, "FACTS", FactStore(tmp_path / "facts"))


def alone(job: Job, **known: object) -> forecast.Forecast:
    return forecast.forecast(job, CLIPS, [FAST], before_s=3.0, **known)


def test_a_run_alone_is_the_sum_of_its_parts(job):
    found = alone(job)
    # 3 epochs of 6 steps of 1.5 s, and validation of a third of them at a third; loading again, and 10 clips twice.
    assert dict(found.parts) == pytest.approx({"start": 13.0, "training": 3 * 6 * 1.5 * (1 + 1 / 9), "evaluation": 40})
    assert found.seconds == pytest.approx(83.0) and found.sent == found.waiting_s == 0
    assert alone(job.with_profile(max_steps=9)).parts["training"] == pytest.approx(9 * 1.5 * (1 + 1 / 9))
    told = ["about 10 seconds", "about 90 seconds", "about 10 minutes", "about 1 h 2 min"]
    assert [in_words(seconds) for seconds in (1, 89, 600, 3700)] == told


def test_a_step_of_several_is_divided_so_that_they_end_together():
    assert step_seconds([FAST], 4) == pytest.approx(0.5 + 4 * 0.5)
    assert step_seconds([FAST, FAST], 4) == pytest.approx(0.5 + 2 * 0.5)
    both = step_seconds([FAST, SLOW], 4)
    assert (both - 0.5) / 0.5 + both / 2.0 == pytest.approx(4)  # clips of either in this time
    unknown = Speed(host="c", problem="gone")
    assert step_of_all([FAST, unknown], 4) == step_seconds([FAST], 2) and step_of_all([unknown], 4) is None
    assert step_seconds([FAST, SLOW], 0.1) == pytest.approx(0.5)  # what is beside the clips stays
    crowded = Speed(host="d", sizes=[[8, 8.0], [4, 1.0]])  # its memory is short for 8
    assert (step_seconds([crowded], 8), step_seconds([crowded, crowded], 8)) == (8.0, 1.0)


def test_of_several_the_link_is_waited_for_at_each_step_or_once_a_round(job):
    slow, fast = (
        forecast.forecast(job.with_strategy("allreduce"), CLIPS, [FAST, FAST], bytes_s=rate) for rate in (4e6, math.inf)
    )
    assert slow.waiting_s == pytest.approx(18 * 1.0)  # 4 MB each way between two, 18 steps
    assert slow.sent == pytest.approx(18 * 4e6 * 2) and slow.held_back_by(alone(job), "a-b", "a") == "the link a-b"
    assert fast.waiting_s == 0 and fast.held_back_by(alone(job), "a-b", "a") == "evaluation on a"
    rounds = forecast.forecast(job, CLIPS, [FAST, FAST], bytes_s=4e6)
    assert rounds.waiting_s < slow.waiting_s / 2 and rounds.sent < slow.sent / 2


def test_what_a_run_took_corrects_the_next_forecast_on_the_same_hosts(job):
    key, before = key_of(job, HERE.all), alone(job)
    took = [26.0, 33.0, 20.0]
    learn(before.kept(key, 0.0), took, str(job.profile.base_model), str(job.profile.test))
    assert ratios_of(key_of(job, PAIR.all)) == {} and ratios_of(key_of(job.with_profile(method="lora"), HERE.all)) == {}
    again = alone(job, ratios=ratios_of(key))
    # Half of it was transcribing with the base model, which need not be done again.
    assert [again.parts[part] for part in PARTS] == pytest.approx([26.0, 33.0, 20.0 * 25 / 40])
    assert again.measured["training"] == before.measured["training"]
    training = before.measured["training"]  # was measured while the machine was busy, so it says nothing of the next
    learn(before.kept(key, 0.0), [26.0, training / 4, 20.0], str(job.profile.base_model), str(job.profile.test))
    assert ratios_of(key)["training"] == pytest.approx(33.0 / training)
