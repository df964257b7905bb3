"""What may change when a run is resumed, and what may not; and what becomes of the learning rate."""

from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from exogym_toys import Line, Points, Steps, Tokens, run_threads, train_node

from exogym import (
    AllReduceStrategy,
    Checkpoints,
    DiLoCoStrategy,
    ElasticSampler,
    FlatParameters,
    LocalTrainer,
    SingleComm,
)
from exogym.errors import CheckpointError
from exogym.samplers.batches import DatasetSamples
from exogym.state import state_sync
from exogym.state.checkpoint import FORMAT
from exogym.state.state_sync import check_settings
from exogym.strategy import ScheduleSpec, optim
from exogym.strategy.optim import Schedule

CLIPS, BATCH, EPOCHS, WARMUP = 96, 2, 4, 12
CURVE = {"lr": 1.0, "schedule": "linear", "warmup_steps": WARMUP}
STRATEGIES = {
    "allreduce": lambda: AllReduceStrategy(**CURVE),
    "diloco": lambda: DiLoCoStrategy(**CURVE, H=3),
}
QUICK = [(2, 4), (3, 3)]
HOST_COUNTS = [
    pytest.param(before, after, marks=[] if (before, after) in QUICK else pytest.mark.slow)
    for before in range(1, 5)
    for after in range(1, 5)
]
every_strategy = pytest.mark.parametrize("name", STRATEGIES)
diloco_first = pytest.mark.parametrize("name", ["diloco", pytest.param("allreduce", marks=pytest.mark.slow)])


class Idle(Line):
    """Its weights stay: only the learning rate is of interest."""

    def forward(self, batch):
        return super().forward(batch) * 0


def train(hosts, folder, strategy, *, epochs=EPOCHS, max_steps=None, stop_at=None):
    """The learning rates of rank 0's steps, and its TrainResult. It goes on from what is in the folder."""

    def rank_main(comm):
        rates = []

        def events(event):
            if event["type"] == "step":
                rates.append(event["lr"])

        work = ElasticSampler(DatasetSamples(Points(CLIPS), batch_size=BATCH), comm.members, comm.members[comm.rank])
        node = train_node(
            Idle(), comm, strategy(), work, epochs=epochs, max_steps=max_steps, device="cpu", events=events,
            should_stop=lambda: stop_at is not None and node.state.now.step + 1 >= stop_at,
            checkpoints=Checkpoints(folder, f"rank{comm.rank}"), checkpoint_interval=1, resume=True,
        )  # fmt: skip
        result = node.run()
        node.saved.checkpoints._writer.shutdown()
        return rates, result

    return run_threads(hosts, rank_main)[0]


def steps_of(hosts, epochs=EPOCHS):
    return epochs * CLIPS // (BATCH * hosts)


@every_strategy
@pytest.mark.parametrize(("before", "after"), HOST_COUNTS)
def test_the_curve_goes_on_where_it_was_on_any_number_of_hosts(tmp_path, name, before, after):
    """Stopped after half of the work. The rest of the curve, down to 0 here, is spread over the steps that are left."""
    strategy, half = STRATEGIES[name], steps_of(before) // 2 // 3 * 3
    whole, _ = train(before, tmp_path / "whole", strategy)
    first, _ = train(before, tmp_path / "run", strategy, stop_at=half)
    second, result = train(after, tmp_path / "run", strategy)
    assert (len(whole), len(first)) == (steps_of(before), half) and first == whole[:half]
    if before == after:
        assert second == whole[half:]
        return
    # A round that a stop has cut short is ended by those of its hosts who are there; with other hosts it begins anew.
    agreed = half - 3 if name == "diloco" and after > before else half
    done = half * before - (3 * (before - min(before, after) if after < before else before) if name == "diloco" else 0)
    left = (CLIPS * EPOCHS - done * BATCH) / (BATCH * after)
    assert left <= len(second) <= left + 1 and result.steps == agreed + len(second)
    where = agreed + torch.arange(len(second)) * (steps_of(before) - agreed) / len(second)
    expected = 1 - (where.clamp(max=steps_of(before) - 1) - WARMUP) / (steps_of(before) - WARMUP)
    assert second == pytest.approx(expected.tolist(), abs=1e-6)
    assert second[0] == pytest.approx(whole[agreed]) and min(second) >= min(whole) - 1e-9


@every_strategy
def test_stopped_and_resumed_on_other_hosts_again_and_again(tmp_path, name):
    """The rate rises to its peak and then falls, without a jump and never to nothing."""
    rates, stop_at = [], 0
    for hosts in (2, 4, 1, 3, 4, 2):
        stop_at += 6
        rates += train(hosts, tmp_path, STRATEGIES[name], stop_at=stop_at)[0]
    rates += train(1, tmp_path, STRATEGIES[name])[0]
    peak = rates.index(max(rates))
    # DiLoCo makes the steps of a round again that a stop had cut short, where the hosts are others.
    back = 0.0 if name == "allreduce" else 3 / WARMUP
    assert 0.9 < rates[peak] <= 1.0 and min(b - a for a, b in pairwise(rates[: peak + 1])) >= -back
    falls = [a - b for a, b in pairwise(rates[peak:])]
    assert min(falls) >= -back and max(falls) < 6 / steps_of(4) and 0 < rates[-1] < 0.05


@diloco_first
def test_more_epochs_are_trained_as_if_they_had_been_planned(tmp_path, name):
    strategy, half = STRATEGIES[name], steps_of(2) // 2
    planned, _ = train(2, tmp_path / "planned", strategy, epochs=8)
    train(2, tmp_path / "run", strategy, epochs=4, stop_at=half)
    rates, result = train(2, tmp_path / "run", strategy, epochs=8)
    assert result.steps == steps_of(2, 8) and rates == pytest.approx(planned[half:])


@diloco_first
def test_more_epochs_after_the_end(tmp_path, name):
    planned, _ = train(2, tmp_path / "planned", STRATEGIES[name], epochs=5)
    train(2, tmp_path / "run", STRATEGIES[name], epochs=4)
    rates, result = train(2, tmp_path / "run", STRATEGIES[name], epochs=5)
    assert result.steps == steps_of(2, 5) and len(rates) in (24 + 1, 24 + 3)  # the last agreement is not kept
    assert rates == pytest.approx(planned[-len(rates) :])


@diloco_first
def test_more_epochs_and_other_hosts_at_once(tmp_path, name):
    train(2, tmp_path, STRATEGIES[name], epochs=4, stop_at=48)
    rates, _ = train(3, tmp_path, STRATEGIES[name], epochs=8)
    agreed = 48 if name == "allreduce" else 45
    assert len(rates) == (8 * CLIPS - agreed * 4) / 6
    assert rates[0] == pytest.approx(1 - (agreed - WARMUP) / (192 - WARMUP)) and 0 < rates[-1] < 0.02


@diloco_first
def test_fewer_epochs_end_sooner_and_less_than_is_done_at_once(tmp_path, name):
    train(2, tmp_path, STRATEGIES[name], epochs=8, stop_at=60)
    rates, result = train(2, tmp_path, STRATEGIES[name], epochs=3)
    assert result.steps == 72 and 0 < rates[-1] < 0.1
    assert train(2, tmp_path, STRATEGIES[name], epochs=2)[0] == []


@every_strategy
def test_a_limit_of_steps_may_change_too(tmp_path, name):
    train(2, tmp_path, STRATEGIES[name], max_steps=30, stop_at=15)
    rates, result = train(2, tmp_path, STRATEGIES[name], max_steps=45)
    assert result.steps == 45 and rates[0] == pytest.approx(1 - (15 - WARMUP) / (45 - WARMUP))


# the curve itself


def curve(total, warmup=0, name="linear"):
    [weight] = [torch.nn.Parameter(torch.ones(1))]
    optimizer = torch.optim.SGD([weight], lr=1.0)
    return Schedule(ScheduleSpec(name=name, warmup_steps=warmup), optimizer, total)


def test_a_plan_stretched_inside_the_warm_up_does_not_exceed_the_peak():
    for warmup, remaining, at in product((1, 2, 3, 10), (1, 7, 9, 60, 1000), (0, 1, 2, 5)):
        schedule = curve(40, warmup)
        schedule.stretch(at, remaining)
        rates = [schedule.set(at + step) for step in range(remaining)]
        assert max(rates) <= 1.0 and min(rates) > 0, (warmup, remaining, at)


def test_work_that_is_done_again_after_the_end_has_a_rate():
    """A host was lost in the last round: its clips are resharded when the curve is at its end."""
    schedule = curve(10)
    last = [schedule.set(step) for step in range(10)][-1]
    schedule.stretch(10, 3)
    assert [schedule.set(step) for step in (10, 11, 12)] == [last] * 3


# what may not change


def fit(folder, *, model=Tokens, data=None, num_epochs=2, strategy=None, **settings):
    settings = {"batch_size": 4, "device": "cpu", "save_dir": str(folder), "resume": True} | settings
    strategy = strategy or DiLoCoStrategy(lr=0.05, H=2)
    trainer = LocalTrainer(model(), data or Points(16))
    trainer.fit(strategy=strategy, num_epochs=num_epochs, **settings)
    return trainer


CHANGES = {
    "batch_size": ({"batch_size": 8}, "batch_size was 4, and is 8"),
    "seed": ({"seed": 5}, "seed was 0, and is 5"),
    "shuffle": ({"shuffle": False}, "shuffle was True, and is False"),
    "a longer data set": ({"data": Points(24)}, "samples was 16, and is 24"),
    "lr": ({"strategy": DiLoCoStrategy(lr=0.1, H=2)}, "lr was 0.05, and is 0.1"),
    "H": ({"strategy": DiLoCoStrategy(lr=0.05, H=4)}, "H was 2, and is 4"),
    "strategy": ({"strategy": AllReduceStrategy(lr=0.05)}, "strategy was DiLoCoStrategy, and is AllReduceStrategy"),
    "optimizer": ({"strategy": DiLoCoStrategy(lr=0.05, H=2, inner_optim="sgd")}, "inner_optim was adamw, and is sgd"),
}


class Others(Points):
    """As long as Points, with other values."""

    def __init__(self, size):
        super().__init__(size)
        self.x = self.x * 3


class Halves(Line):
    def __init__(self):
        super().__init__()
        self.linear.bias.requires_grad_(False)


CHANGES["another data set of the same length"] = ({"data": Others(16)}, "data was Points 16 .*, and is Others 16")
CHANGES["what is frozen"] = ({"model": Halves}, "its trained parameters differ; its frozen weights differ")


def test_a_run_of_a_version_that_planned_otherwise_is_refused():
    with pytest.raises(CheckpointError, match="another version of this program planned its steps"):
        check_settings({"seed": 1}, {"seed": 1, "version": 2}, "here")


def test_a_run_of_a_version_without_rounded_changes_and_hidden_rounds_is_resumed(tmp_path, monkeypatch):
    whole = fit(tmp_path / "whole", model=Line, checkpoint_interval=1, num_epochs=3)
    with monkeypatch.context() as older:
        fixed = state_sync.fixed_settings
        older.setattr(state_sync, "fixed_settings", lambda *args: without(fixed(*args), "wire", "overlap_steps"))
        fit(tmp_path / "older", model=Line, checkpoint_interval=1)
    resumed = fit(tmp_path / "older", model=Line, num_epochs=3)
    assert resumed.result.steps == whole.result.steps == 12
    with pytest.raises(CheckpointError, match="overlap_steps was 0, and is 1"):
        fit(tmp_path / "older", model=Line, strategy=DiLoCoStrategy(lr=0.05, H=2, overlap_steps=1), num_epochs=4)
    with pytest.raises(CheckpointError, match="wire was float32, and is int8"):
        fit(tmp_path / "older", model=Line, strategy=DiLoCoStrategy(lr=0.05, H=2, wire="int8"), num_epochs=4)


def test_a_run_from_before_the_optimizer_had_weight_decay_is_refused(tmp_path, monkeypatch):
    """No setting of it has changed: it was not given then, and is not given now."""
    with monkeypatch.context() as older:
        older.setattr(optim, "decay_groups", lambda parameters, decay: [{"params": [*parameters], "weight_decay": 0.0}])
        fit(tmp_path, model=Line, checkpoint_interval=1, strategy=AllReduceStrategy(lr=0.05))
    with pytest.raises(CheckpointError, match=r"of another optimizer .* as weight decay.*new run"):
        fit(tmp_path, model=Line, num_epochs=3, strategy=AllReduceStrategy(lr=0.05))


def without(values, *names):
    return {key: value for key, value in values.items() if key not in names}


@pytest.mark.parametrize(("changes", "message"), CHANGES.values(), ids=CHANGES)
def test_what_must_stay_as_it_was_is_refused_by_name(tmp_path, changes, message):
    fit(tmp_path, model=Line, checkpoint_interval=1)
    kept = sorted(tmp_path.rglob("*.json"))
    with pytest.raises(CheckpointError, match=rf"belongs to a run with other settings: {message}.*Set them back"):
        fit(tmp_path, **{"model": Line, "num_epochs": 3, **changes})
    assert sorted(tmp_path.rglob("*.json")) == kept
    assert fit(tmp_path, model=Line, num_epochs=3).result.steps == 12  # and nothing is lost


def test_what_may_change_is_accepted(tmp_path):
    fit(tmp_path, model=Line, checkpoint_interval=1)
    more = {"num_epochs": 4, "minibatch_size": 2, "val_interval": 3, "checkpoint_interval": 2, "autocast": True}
    assert fit(tmp_path, model=Line, **more).result.steps == 16


@pytest.mark.slow
def test_other_numbers_of_local_nodes(tmp_path):
    one = fit(tmp_path, model=Line, checkpoint_interval=1, num_epochs=1)
    two = fit(tmp_path, model=Line, checkpoint_interval=1, num_epochs=3, num_nodes=2, timeout=60)
    assert (one.result.steps, two.result.steps) == (4, 2 + (3 * 16 - 8) / 8)  # a round was kept, of two
    last = fit(tmp_path, model=Line, num_epochs=4)
    assert last.result.steps == 6 + (4 * 16 - 8 - 4 * 8) / 4
    assert not torch.equal(FlatParameters(two.model).read(), FlatParameters(last.model).read())


class Flickers(Points):
    """Other values at each reading, as data augmentation has."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + torch.rand(()) + torch.rand((), generator=self.own), y

    def __init__(self, size):
        super().__init__(size)
        self.own = torch.Generator()


def test_data_that_change_at_each_reading_are_told_by_their_length(tmp_path):
    fit(tmp_path, model=Line, data=Flickers(16), checkpoint_interval=1)
    assert fit(tmp_path, model=Line, data=Flickers(16), num_epochs=3).result.steps == 12
    with pytest.raises(CheckpointError, match="samples was 16, and is 12"):
        fit(tmp_path, model=Line, data=Flickers(12), num_epochs=3)


class Noisy(Points):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + torch.rand(()), y


def test_looking_at_the_data_leaves_the_random_generators_alone(tmp_path):
    with_checkpoints = fit(tmp_path, model=Line, data=Noisy(16), checkpoint_interval=1).model
    without = fit(tmp_path / "none", model=Line, data=Noisy(16)).model
    assert torch.equal(FlatParameters(with_checkpoints).read(), FlatParameters(without).read())


def test_an_epoch_that_is_done_between_others_that_are_not_is_passed_over():
    """After two losses in rounds longer than an epoch of few clips: the loop went on for ever, without a step."""
    work = ElasticSampler(DatasetSamples(Points(3), batch_size=1), ("rank0",), "rank0")
    done = {0: torch.tensor([True, False, True]), 1: torch.tensor([True, True, True])}
    work.load_state_dict(work.state_dict() | {"done": done, "done_at_reshard": done, "needs_reshard": True})
    node = train_node(Line(), SingleComm(), AllReduceStrategy(lr=0.05), work, epochs=3, device="cpu")
    assert node.run().steps == 1 + 3 and work.first_epoch == 3


def test_epochs_on_top_of_a_run_whose_end_was_stretched():
    """The steps that a lost host had left over are worth little of the curve; those of a new epoch are not."""
    schedule = curve(100)
    schedule.stretch(98, 20)
    schedule.extend(110, before=8, remaining=8 + 400, pace=1.0)
    rates = [schedule.set(110 + step) for step in range(408)]
    assert rates[0] == pytest.approx(400.8 / 500, abs=0.01) and 0 < rates[-1] < 0.01
    assert rates[300] == pytest.approx(rates[0] * 108 / 408, abs=0.01)


# data and settings that are not ours


class Described(Steps):
    """A source of the user's own, which says what must stay as it is."""

    settings = "a plain attribute of this name is nobody's business"

    def __init__(self, value):
        super().__init__([[(torch.ones(2, 4), torch.ones(2, 1))]] * 4)
        self.value = value

    def epoch(self, epoch, *, first_step=0):
        yield from self.steps[first_step:]

    def fixed_settings(self):
        return {"what": self.value}


@pytest.mark.parametrize("value", [Path("a"), np.int64(3), {2: 1, 10: 2}, float("nan"), {"a": (1, 2)}, lambda: 0])
def test_a_source_may_say_anything_of_itself(tmp_path, value):
    def fit(value, epochs):
        kept = Checkpoints(tmp_path, "rank0")
        about = {"device": "cpu", "checkpoints": kept, "checkpoint_interval": 1, "resume": True, "epochs": epochs}
        return train_node(Line(), SingleComm(), DiLoCoStrategy(H=1, lr=0.01), Described(value), **about).run().steps

    assert (fit(value, 1), fit(value, 2)) == (4, 8)
    with pytest.raises(CheckpointError, match=r"what was .*, and is other"):
        fit("other", 3)


class WithPaths(Points):
    """Samples that name their files, in a folder that may be another one tomorrow."""

    def __init__(self, size, folder):
        super().__init__(size)
        self.folder = folder

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return {"x": x, "y": y, "path": f"{self.folder}/{i}.wav"}


class OnDicts(Line):
    def forward(self, batch):
        return super().forward((batch["x"], batch["y"]))


def test_the_same_data_in_another_folder(tmp_path):
    fit(tmp_path, model=OnDicts, data=WithPaths(16, "/here"), checkpoint_interval=1)
    assert fit(tmp_path, model=OnDicts, data=WithPaths(16, "/there"), num_epochs=3).result.steps == 12


def test_a_checkpoint_of_another_version_of_the_program_is_called_that(tmp_path):
    fit(tmp_path, model=Line, checkpoint_interval=1)
    for file in tmp_path.rglob("*.json"):
        file.write_text(file.read_text().replace(f'"format": {FORMAT}', '"format": 1'))
    with pytest.raises(CheckpointError, match=r"another version of this program \(format 1\): resume with it"):
        fit(tmp_path, model=Line, num_epochs=3)
