"""What `fit` takes and gives back: settings, randomness, buffers, mixed precision, loggers, scripts without a guard."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from exogym_toys import Line, Points, Sentences, Tokens, run_threads, train_node
from torch import nn

from exogym import AllReduceStrategy, Checkpoints, DiLoCoStrategy, LocalTrainer, SingleComm
from exogym.errors import SettingError
from exogym.samplers.batches import DatasetSamples
from exogym.samplers.elastic import ElasticSampler
from exogym.settings import fit_settings
from exogym.strategy import STRATEGIES, strategy_of


def parsed(**settings):
    return fit_settings({"strategy": AllReduceStrategy(), **settings})


# settings


def test_defaults():
    settings = parsed()
    assert (settings.num_epochs, settings.batch_size, settings.num_nodes) == (1, 16, 1)
    assert parsed(max_steps=5).num_epochs is None and settings.samples_at_once is None


@pytest.mark.parametrize(
    ("given", "at_once"),
    [
        ({"minibatch_size": 8}, 8),
        ({"gradient_accumulation": 4}, 8),
        ({"gradient_accumulation": 5}, 7),
        ({"gradient_accumulation": 32}, 1),
        ({"gradient_accumulation": 5, "minibatch_size": 7}, 7),
        ({"gradient_accumulation": 4, "max_memory_usage": 0.8}, 8),
    ],
)
def test_how_many_samples_are_computed_at_once(given, at_once):
    assert parsed(batch_size=32, **given).samples_at_once == at_once


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gradient_accumulation": 4, "minibatch_size": 4}, "means minibatch_size = 8, not 4: give one of the two"),
        ({"gradient_accumulation": 64}, r"gradient_accumulation \(64\) is more than batch_size \(32\)"),
        ({"minibatch_size": 33}, r"minibatch_size \(33\) is more than batch_size \(32\)"),
        ({"minibatch_size": 0}, "minibatch_size must be at least 1, not 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, not 2.5"),
        ({"val_size": -1}, "val_size must be at least 0"),
        ({"val_interval": 0}, "val_interval must be at least 1"),
        ({"max_steps": True}, "max_steps must be a whole number or None, not True"),
        ({"shuffle": "no"}, "shuffle must be True or False, not 'no'"),
        ({"timeout": "60"}, "timeout must be a number, not '60'"),
        ({"max_memory_usage": "0.5"}, "max_memory_usage must be a number or None, not '0.5'"),
        ({"save_dir": 3}, "save_dir must be text or a path or None, not 3"),
        ({"device": 0}, "device must be text or None, not 0"),
        ({"devices": 2}, r"a list of 1 to num_nodes \(1\), not 2"),
        ({"devices": [1.5]}, "devices: 1.5 is not a device: write mps, cuda:N, N or cpu"),
        ({"checkpoint_interval": -1, "save_dir": "x"}, "checkpoint_interval must be at least 0"),
        ({"max_memory_usage": 0}, "max_memory_usage must be above 0 and at most 1, not 0"),
        ({"max_memory_usage": 80}, "max_memory_usage must be above 0 and at most 1, not 80"),
        ({"autocast": "fp16"}, "autocast must be True, 'bf16' .*, not 'fp16'"),
        ({"precision": "bf16"}, "no setting 'precision'"),
        ({"checkpoint_interval": 5}, "without save_dir: checkpoint_interval would not be used"),
        ({"resume": True}, "without save_dir: resume would not be used"),
        ({"device": "cpu", "devices": ["cpu"]}, "devices has one for each rank: device would not be used"),
        ({"devices": ["cpu", "cpu"]}, r"a list of 1 to num_nodes \(1\)"),
        ({"devices": ["gpu"]}, "devices: 'gpu' is not a device"),
        ({"strategy": "diloco"}, r"strategy must be a Strategy, as DiLoCoStrategy\(H=100\), not 'diloco'"),
        ({"num_nodes": 0}, "num_nodes must be at least 1"),
    ],
)
def test_settings_that_cannot_be(given, message):
    with pytest.raises(SettingError, match=message):
        parsed(**{"batch_size": 32} | given)


@pytest.mark.parametrize("device", ["gpu", "meta", "cpu:x"])
def test_a_device_where_nobody_can_train_is_refused(device):
    with pytest.raises(SettingError, match=f"device {device}: not known; use mps, cuda or cpu"):
        LocalTrainer(Line(), Points(8)).fit(AllReduceStrategy(), device=device)


@pytest.mark.slow
def test_each_rank_has_its_device():
    settings = parsed(num_nodes=5, devices=[0, "cuda:1", torch.device("cpu")])
    assert [str(settings.device_of(rank)) for rank in range(5)] == ["cuda:0", "cuda:1", "cpu", "cuda:0", "cuda:1"]
    assert parsed(num_nodes=2, device=torch.device("cpu")).device_of(1) == "cpu" and parsed().device_of(0) is None
    seen = []
    LocalTrainer(Line(), Points(8)).fit(AllReduceStrategy(), num_nodes=2, devices=["cpu"], logger=seen.append)
    assert [event["device"] for event in seen if event["type"] == "start"] == ["cpu", "cpu"]


@pytest.mark.parametrize(("given", "precision"), [(True, "bf16"), ("bf16", "bf16"), (False, "float32")])
def test_autocast_is_a_precision(given, precision):
    assert parsed(autocast=given).precision == precision


# the model


def test_the_model_that_was_given_is_the_one_that_comes_back_and_training_goes_on_from_it():
    model = Line().bfloat16()
    weight = model.linear.weight
    trainer = LocalTrainer(model, [(x.bfloat16(), y.bfloat16()) for x, y in Points(16)])
    model.eval()
    losses = []
    for _ in range(2):
        assert trainer.fit(AllReduceStrategy(inner_optim="sgd", lr=0.05), device="cpu") is model
        losses.append(trainer.result.train_loss)
    assert model.linear.weight is weight and weight.dtype == torch.bfloat16 and not model.training
    assert losses[1] < 0.9 * losses[0] and weight.grad is None


# randomness


class Chance(Line):
    """Draws from all three generators, and tells what it drew."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("drawn", torch.zeros(3))

    def forward(self, batch):
        x, y = batch
        kept = self.dropout(torch.ones(64))
        self.drawn = torch.tensor([kept.sum().item(), np.random.rand(), random.random()])
        return super().forward((x * kept[:4], y))


def fitted(num_nodes, strategy, seed=0):
    trainer = LocalTrainer(Chance(), Points(24))
    settings = {"num_nodes": num_nodes, "batch_size": 4, "num_epochs": 2, "device": "cpu", "seed": seed}
    return trainer.fit(strategy, **settings).state_dict(), trainer.results


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_runs_are_the_same_to_the_bit(num_nodes):
    runs = []
    for chance in (1, 2):  # whatever the caller has drawn before
        torch.manual_seed(chance), random.seed(chance), np.random.seed(chance)
        runs.append(fitted(num_nodes, DiLoCoStrategy(lr=0.05, H=2)))
    (first, results), (second, others) = runs
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [result.train_loss for result in results] == [result.train_loss for result in others]
    if num_nodes == 1:
        other, _ = fitted(1, DiLoCoStrategy(lr=0.05, H=2), seed=1)
        assert not torch.equal(first["linear.weight"], other["linear.weight"])


class Draws(torch.utils.data.Dataset):
    """A number that three generators have made two digits of each."""

    def __len__(self):
        return 1

    def __getitem__(self, i):
        parts = [torch.rand(()).item(), np.random.rand(), random.random()]
        return float("".join(f"{int(100 * part):02}" for part in parts))


class Tells(Line):
    """Its loss is the sample, beside a dropout that is not of it."""

    def forward(self, batch):
        return self.linear.weight.sum() * 0 + batch.mean()


@pytest.mark.slow
def test_each_generator_gives_ranks_other_numbers():
    trainer = LocalTrainer(Tells(), lambda rank, num_nodes, train_dataset: Draws())
    trainer.fit(AllReduceStrategy(), num_nodes=3, device="cpu")
    told = [f"{int(result.train_loss):06}" for result in trainer.results]
    for digits in (slice(0, 2), slice(2, 4), slice(4, 6)):
        assert len({text[digits] for text in told}) == 3, told


def test_the_callers_generators_are_left_alone_also_after_a_failure():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    def fails(event):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        LocalTrainer(Chance(), Points(8)).fit(AllReduceStrategy(), device="cpu", logger=fails)
    fitted(1, AllReduceStrategy())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


# integer buffers


class Counted(Line):
    """BatchNorm, and a count of its own of the samples that it was trained on."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros((), dtype=torch.int32), persistent=False)
        self.register_buffer("seen", torch.tensor(False))

    def forward(self, batch):
        x, y = batch
        if self.training:
            self.samples += len(x)
            self.scratch += 1
            self.seen = torch.tensor(True, device=x.device)
        return super().forward((self.norm(x), y))


STRATEGY = {"allreduce": lambda: AllReduceStrategy(lr=0.05), "diloco": lambda: DiLoCoStrategy(lr=0.05, H=3)}


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_integer_buffers_are_in_the_model_that_comes_back(num_nodes):
    model = Counted()
    settings = {"num_nodes": num_nodes, "num_epochs": 3, "batch_size": 4, "device": "cpu"}
    LocalTrainer(model, Points(32)).fit(STRATEGY["diloco"](), **settings)
    assert model.norm.num_batches_tracked == 24 // num_nodes
    assert (model.samples, model.seen, model.scratch) == (96 // num_nodes, True, 0)


@pytest.mark.parametrize("strategy", STRATEGY)
def test_integer_buffers_survive_a_stop_anywhere(tmp_path, strategy):
    """Inside a round of DiLoCo's they are neither those of its beginning nor counted twice."""
    settings = {"num_epochs": 3, "batch_size": 4, "device": "cpu"}
    whole = LocalTrainer(Counted(), Points(32)).fit(STRATEGY[strategy](), **settings)
    for after in (4, 8, 13):
        steps, kept = [], {**settings, "save_dir": str(tmp_path / f"{after}")}
        keep = lambda event, steps=steps: steps.append(1) if event["type"] == "step" else None  # noqa: E731
        first = LocalTrainer(Counted(), Points(32))
        stop = lambda steps=steps, after=after: len(steps) >= after  # noqa: E731
        first.fit(STRATEGY[strategy](), should_stop=stop, logger=keep, **kept)
        assert first.result.stopped and 0 < first.model.norm.num_batches_tracked < 24
        resumed = LocalTrainer(Counted(), Points(32)).fit(STRATEGY[strategy](), resume=True, **kept)
        for (name, value), other in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
            assert torch.equal(value, other), (after, name)


@pytest.mark.parametrize("strategy", STRATEGY)
def test_integer_buffers_are_handed_to_a_newcomer_and_not_compared(tmp_path, strategy):
    """Rank 0 has a checkpoint, and rank 1 starts anew. With other counts the ranks have one fingerprint still."""

    def node(comm, folder, **settings):
        samples = DatasetSamples(Points(32), batch_size=4)
        model = Counted()
        if settings.get("resume") and comm.rank == 1:
            model.samples += 1000  # lost, when it takes on the state of the other
        sampler = ElasticSampler(samples, comm.members, comm.members[comm.rank])
        checkpoints = Checkpoints(tmp_path / folder, comm.members[comm.rank])
        made = train_node(model, comm, STRATEGY[strategy](), sampler, checkpoints=checkpoints, epochs=3, **settings)
        made.run()
        return made

    before = node(SingleComm(), "0", max_steps=6, checkpoint_interval=1)
    kept = before.model.samples.item()
    made = run_threads(2, lambda comm: node(comm, str(comm.rank), max_steps=9, resume=True))
    counts = [one.model.samples.item() for one in made]
    assert counts[0] == counts[1] and 0 < counts[0] < 100 and kept == 24
    ours, theirs = (one.state for one in made)
    theirs._buffers.write({"samples": torch.tensor(7)})
    theirs._agreed_buffers = theirs._buffers.read()
    assert ours.fingerprint_of(ours.agreed_state()) == theirs.fingerprint_of(theirs.agreed_state())
    assert theirs.agreed_state()["buffers"]["samples"] == 7


# mixed precision


class Bf16(Tokens):
    """Knows whether its products are computed in bf16."""

    def forward(self, batch):
        states = self.hidden(self.embedding(batch["inputs"]))
        assert states.dtype == torch.bfloat16
        return super().forward(batch)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "pipeline"])
def test_every_strategy_trains_in_bf16(name):
    config, _ = STRATEGIES[name]
    model = Bf16()
    settings = {"num_epochs": 12, "batch_size": 8, "gradient_accumulation": 2, "device": "cpu", "autocast": True}
    trainer = LocalTrainer(model, Sentences(), Sentences())
    losses = []
    keep = lambda event: losses.append(event["loss"]) if event["type"] == "step" else None  # noqa: E731
    trainer.fit(strategy_of(config(lr=0.05)), logger=keep, **settings)
    assert losses[-1] < 0.5 * losses[0] and trainer.result.val_loss < 0.5 * losses[0]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


# loggers


class Logger:
    log_interval = 10

    def __init__(self):
        self.events, self.closed = [], 0

    def __call__(self, event):
        self.events.append(event["type"])

    def close(self):
        self.closed += 1


def test_a_logger_is_told_its_interval_and_closed():
    logger = Logger()
    LocalTrainer(Line(), Points(8)).fit(AllReduceStrategy(), logger=logger, log_interval=3, device="cpu")
    assert (logger.log_interval, logger.closed, logger.events[0]) == (3, 1, "start")
    other = Logger()
    LocalTrainer(Line(), Points(8)).fit(AllReduceStrategy(), logger=other, device="cpu")
    assert (other.log_interval, other.closed) == (10, 1)


def test_without_a_logger_an_interval_asks_for_lines(capsys):
    LocalTrainer(Line(), Points(16)).fit(AllReduceStrategy(), batch_size=2, device="cpu")
    assert not capsys.readouterr().out
    LocalTrainer(Line(), Points(16)).fit(AllReduceStrategy(), batch_size=2, log_interval=4, device="cpu")
    shown = capsys.readouterr().out
    assert "step 4" in shown and "step 8" in shown, shown


def test_an_interval_that_a_logger_would_not_use():
    with pytest.raises(SettingError, match="log_interval would not be used: builtin_function_or_method has none"):
        LocalTrainer(Line(), Points(8)).fit(AllReduceStrategy(), logger=[].append, log_interval=3, device="cpu")


# scripts, and where there is none

SCRIPT = """
import torch
from torch import nn
from exogym import DiLoCoStrategy, LocalTrainer
from beside import WIDTH

SCALE = 2.0

class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.transform = lambda x: x * SCALE
    def __len__(self):
        return 16
    def __getitem__(self, i):
        x = self.transform(torch.full((WIDTH,), i / 16))
        return {"x": x, "y": x.sum()}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
    def forward(self, batch):
        return (self.layer(batch["x"])[:, 0] - batch["y"]).square().mean()

class Own(DiLoCoStrategy):
    def local_step(self, weight, samples):
        return super().local_step(weight, samples)

print("started")
trainer = LocalTrainer(Model(), Data())
trainer.fit(Own(H=2, lr=0.1), num_nodes=2, num_epochs=2, batch_size=4, device="cpu")
print("steps", trainer.result.steps, "of", len(trainer.results))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["script", "stdin"])
def test_models_of_a_script_without_a_guard_or_of_none(tmp_path, way):
    """Of a notebook's cell, which has no file either, too."""
    (tmp_path / "beside.py").write_text("WIDTH = 3\n")
    (tmp_path / "own_script.py").write_text(SCRIPT)
    command = ["own_script.py"] if way == "script" else []
    environment = os.environ | {"PYTHONPATH": os.path.abspath("gym")}  # noqa: PTH100
    done = subprocess.run(
        [sys.executable, *command],
        input=SCRIPT if way == "stdin" else "",
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.splitlines() == ["started", "steps 4 of 2"], done.stdout + done.stderr
    assert "Traceback" not in done.stderr
