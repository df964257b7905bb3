"""A model in stages, a process each: it trains as in one process. A lost stage ends the run, which goes on later."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from exogym import AllReduceStrategy, Checkpoints, LocalTrainer, PipelineTrainer, split
from exogym.errors import NodeFailed, SettingError
from exogym.strategy import PipelineStrategy

WORDS, WIDTH = 13, 8


class Texts(Dataset):
    """Texts of 3 to 9 words, so that batches have other shapes; the target is the same words from the end."""

    def __init__(self, count: int = 24):
        chance = torch.Generator().manual_seed(3)
        lengths = torch.randint(3, 10, (count,), generator=chance)
        self.texts = [torch.randint(1, WORDS, (int(n),), generator=chance) for n in lengths]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, number):
        return self.texts[number]

    @staticmethod
    def collate_fn(texts):
        """[B, longest], padded with 0, which is no target."""
        return tuple(
            nn.utils.rnn.pad_sequence([text.flip(0) if flipped else text for text in texts], batch_first=True)
            for flipped in (False, True)
        )


def loss(output, batch):
    targets = batch[1]
    total = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=0)
    return total, (targets != 0).sum()


class Whole(nn.Module):
    """The stages one after the other, in one process."""

    def __init__(self, stages):
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, batch):
        first, *others = self.stages
        made = first(batch)
        for stage in others:
            made = stage(made, batch)
        return made


def stages(count, frozen=()):
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Embedding(WORDS, WIDTH), *[nn.Linear(WIDTH, WIDTH) for _ in range(4)], nn.Tanh(), nn.Linear(WIDTH, WORDS)
    )
    for number in frozen:
        layers[number].requires_grad_(False)
    return split(layers, loss, shares=[1] * count)


SETTINGS = {"batch_size": 8, "minibatch_size": 3, "num_epochs": 3, "device": "cpu", "val_interval": 2}
STEP = {"lr": 0.02, "max_norm": 0.5, "schedule": "cosine", "warmup_steps": 2}


def losses(events):
    found = [event["loss"] for event in events if event["type"] == "step" and event["rank"] == 0]
    return found, [event["loss"] for event in events if event["type"] == "validation" and event["rank"] == 0]


def alone(count, frozen=(), **settings):
    events, whole = [], Whole(stages(count, frozen))
    trainer = LocalTrainer(whole, Texts(), Texts(7))
    trainer.fit(AllReduceStrategy(**STEP), logger=events.append, **SETTINGS, **settings)
    return whole.stages, losses(events)


def together(count, frozen=(), wire="float32", **settings):
    events, parts = [], stages(count, frozen)
    trainer = PipelineTrainer(parts, Texts(), Texts(7))
    trainer.fit(PipelineStrategy(wire=wire, **STEP), logger=events.append, **SETTINGS, **settings)
    return parts, losses(events), trainer, events


def weights(modules):
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


@pytest.mark.parametrize(
    ("count", "frozen"),
    [
        (2, ()),
        pytest.param(3, (), marks=pytest.mark.slow),
        pytest.param(2, (0, 1, 2, 3), marks=pytest.mark.slow),
        (3, (0, 3)),
    ],
)
def test_it_trains_as_in_one_process(count, frozen):
    one, (steps, validations) = alone(count, frozen)
    parts, (their_steps, their_validations), trainer, events = together(count, frozen)
    assert len(steps) == 9 and steps[-1] < steps[0]
    assert their_steps == pytest.approx(steps, abs=2e-6)
    assert their_validations == pytest.approx(validations, abs=2e-6)
    torch.testing.assert_close(weights(parts), weights(one), rtol=0, atol=2e-6)
    assert trainer.result.samples == 72 and [result.samples for result in trainer.results[1:]] == [0] * (count - 1)
    assert trainer.result.val_loss == pytest.approx(validations[-1], abs=2e-6)
    tokens = sum(event["tokens"] for event in events if event["type"] == "step")
    assert tokens == 3 * sum(len(text) for text in Texts().texts)  # each is told once


@pytest.mark.slow
def test_bf16_on_the_wire_is_half_of_it_and_close():
    _, (exact, _), sent, _ = together(2)
    _, (rounded, _), less, _ = together(2, wire="bf16")
    assert rounded == pytest.approx(exact, rel=0.02) and rounded != exact
    assert less.result.bytes_sent < 0.8 * sent.result.bytes_sent  # shapes travel as well


@pytest.mark.slow
def test_the_best_weights_are_those_of_all_stages():
    one, _ = alone(2, keep_best=True)
    parts, *_ = together(2, keep_best=True)
    torch.testing.assert_close(weights(parts), weights(one), rtol=0, atol=2e-6)


class Once(Texts):
    """Kills the process of one stage, once, when it reads this sample of the second epoch."""

    def __init__(self, flag, in_stage):
        super().__init__()
        self.flag, self.in_stage, self.epoch = flag, in_stage, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, number):
        from multiprocessing import current_process

        if self.epoch == 1 and current_process().name == f"node {self.in_stage}" and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(number)


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_lost_stage_ends_the_run_and_it_goes_on_with_the_same_weights(tmp_path, lost):
    def fit(parts, data, **settings):
        trainer = PipelineTrainer(parts, data, Texts(7))
        trainer.fit(PipelineStrategy(wire="float32", **STEP), **SETTINGS, **settings)

    whole = stages(2)
    fit(whole, Texts())
    parts, data = stages(2), Once(tmp_path / "killed", lost)
    about = {"save_dir": tmp_path / "saved", "checkpoint_interval": 1}
    before = weights(parts).clone()
    with pytest.raises(
        NodeFailed, match=r"(?s)killed.*can be resumed from the newest step that all of them have saved: fit"
    ):
        fit(parts, data, **about)
    assert torch.equal(weights(parts), before)
    assert all(Checkpoints(about["save_dir"], f"rank{rank}").good() for rank in range(2))
    fit(parts, data, **about, resume=True)
    assert torch.equal(weights(parts), weights(whole))


@pytest.mark.slow
def test_stages_that_have_saved_other_steps_go_on_from_the_last_one_in_common(tmp_path):
    about = {"save_dir": tmp_path, "checkpoint_interval": 1, "keep_checkpoints": 5}
    whole, *_ = together(2)
    together(2, **about)
    for number in Checkpoints(tmp_path, "rank1").numbers()[-3:]:
        (tmp_path / f"{number:07d}" / "rank1.json").unlink()
    parts, _, trainer, events = together(2, **about, resume=True)
    resumed = [event["agreements"] for event in events if event["type"] == "resume"]
    assert resumed == [5, 5] and trainer.result.steps == 9
    assert torch.equal(weights(parts), weights(whole))
    for number in Checkpoints(tmp_path, "rank1").numbers():
        (tmp_path / f"{number:07d}" / "rank1.json").unlink()
    with pytest.raises(NodeFailed, match="no step of which all stages of the model have a checkpoint"):
        together(2, **about, resume=True)


@pytest.mark.slow
def test_a_stop_ends_all_stages_at_the_same_step_and_it_goes_on(tmp_path):
    about = {"save_dir": tmp_path, "checkpoint_interval": 1}
    whole, *_ = together(2)
    asked = threading.Event()
    parts, data = stages(2), Texts()

    def logger(event):
        if event["type"] == "step" and event["step"] == 3:
            asked.set()

    trainer = PipelineTrainer(parts, data, Texts(7))
    strategy = PipelineStrategy(wire="float32", **STEP)
    trainer.fit(strategy, logger=logger, should_stop=asked.is_set, **SETTINGS, **about)
    stopped = [result.steps for result in trainer.results]
    assert trainer.result.stopped and stopped[0] == stopped[1] < 9
    trainer = PipelineTrainer(copy.deepcopy(stages(2)), data, Texts(7))
    done = trainer.fit(strategy, resume=True, **SETTINGS, **about)
    assert torch.equal(weights(done), weights(whole))


class NotFinite(Texts):
    @staticmethod
    def collate_fn(texts):
        inputs, targets = Texts.collate_fn(texts)
        return inputs, torch.where(targets == WORDS - 1, WORDS, targets)  # no such word


def bad_loss(output, batch):
    total, count = loss(output, (batch[0], batch[1].clamp(max=WORDS - 1)))
    return total + torch.where((batch[1] == WORDS).any(), torch.inf, 0.0), count


def test_what_has_no_finite_loss_counts_in_no_stage():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS))
    events, parts = [], split(layers, bad_loss)
    data = NotFinite(24)
    PipelineTrainer(parts, data).fit(
        PipelineStrategy(lr=0.01), logger=events.append, **SETTINGS | {"minibatch_size": 1}
    )
    told = [event["what"] for event in events if event["type"] == "warning"]
    assert told and all("the loss is inf" in what for what in told)
    assert weights(parts).isfinite().all()


def test_layers_are_cut_by_their_shares():
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])
    sizes = lambda *shares: [len(part.layers) for part in split(layers, loss, shares=shares)]  # noqa: E731
    assert sizes(1, 1) == [4, 4] and sizes(3, 1) == [6, 2] and sizes(1, 2, 1) == [2, 4, 2]
    assert sizes(1, 100) == [1, 7] and sizes(100, 1, 1) == [6, 1, 1] and sizes(1) == [8]
    with pytest.raises(SettingError, match="8 layers cannot be cut"):
        sizes(*[1] * 9)


class Pair(nn.Linear):
    def forward(self, batch):
        return (batch[0], batch[1])


def test_a_stage_gives_one_tensor():
    with pytest.raises(SettingError, match="a stage returned tuple: what goes to the next is one tensor"):
        PipelineTrainer([Pair(2, 2), nn.Linear(2, 2)], Texts()).fit(batch_size=8, num_epochs=1, device="cpu")


def test_what_cannot_be_is_said_before():
    shared = nn.Linear(2, 2)
    with pytest.raises(SettingError, match="no parameter to two of them"):
        PipelineTrainer([shared, nn.Sequential(shared)], Texts())
    with pytest.raises(SettingError, match="num_nodes = 3, but there are 2 stages"):
        PipelineTrainer(stages(2), Texts()).fit(num_nodes=3)
    with pytest.raises(SettingError, match="trained by PipelineStrategy, not by AllReduceStrategy"):
        PipelineTrainer(stages(2), Texts()).fit(AllReduceStrategy(), device="cpu")
    with pytest.raises(SettingError, match="give them to a PipelineTrainer"):
        LocalTrainer(Whole(stages(2)), Texts()).fit(PipelineStrategy(), device="cpu")


SCRIPT = """
import json, sys
from pathlib import Path
from test_pipeline import SETTINGS, STEP, Texts, losses, stages
from exogym import LaunchedPipelineTrainer
from exogym.launch import rank
from exogym.strategy import PipelineStrategy

made, events = [], []

def stage(number):
    made.append(number)
    return stages(2)[number]

trainer = LaunchedPipelineTrainer([lambda: stage(0), lambda: stage(1)], Texts(), Texts(7))
trainer.fit(PipelineStrategy(wire="float32", **STEP), logger=events.append, **SETTINGS)
Path(sys.argv[1], f"{rank()}.json").write_text(json.dumps([made, losses(events)[0]]))
"""


@pytest.mark.slow
def test_processes_of_a_launch_make_their_own_stage_only(tmp_path):
    script, project = tmp_path / "script.py", Path(__file__).parents[2]
    script.write_text(SCRIPT)
    paths = os.pathsep.join(str(project / path) for path in ("gym", "tests/exogym"))
    command = [sys.executable, "-m", "exogym.launch", "--nproc-per-node", "2", str(script), str(tmp_path)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (first, told), (second, _) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == [0] and second == [1]
    assert told == pytest.approx(alone(2)[1][0], abs=2e-6)
