"""What upstream exogym's example scripts call, of revisions c8012ac (old) and 9fa323c (new), on data that are here.

Written anew from what they import, construct and pass; only sizes, data and a hard-coded "mps" are other ones.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
NODES = 2

DIGITS = """
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from exogym.strategy.diloco import DiLoCoStrategy
from exogym.strategy.optim import OptimSpec
from exogym.strategy.sparta import SPARTAStrategy
from exogym.strategy.strategy import SimpleReduceStrategy

found = load_digits()
images, labels = torch.tensor(found.images).float().unsqueeze(1) / 16, torch.tensor(found.target)
train_ds, val_ds = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])
NODES = int(sys.argv[1])


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.1)),
            *(nn.Flatten(), nn.Linear(128, 10)),
        )

    def forward(self, batch):
        images, labels = batch
        return F.cross_entropy(self.backbone(images), labels)


device = "mps" if torch.backends.mps.is_available() else "cuda" if torch.cuda.is_available() else "cpu"
optim_spec = OptimSpec(torch.optim.AdamW, lr=3e-3, weight_decay=1e-4)
schedule = {"lr_scheduler": "lambda_cosine", "lr_scheduler_kwargs": {"warmup_steps": 20, "cosine_anneal": True}}
kinds = {"ddp": SimpleReduceStrategy, "diloco": DiLoCoStrategy, "sparta": SPARTAStrategy}
"""

MNIST = {
    "new": DIGITS
    + """
from exogym.trainer import Trainer

for name, Strat in kinds.items():
    trainer = Trainer(Wrapped(), train_ds, val_ds)
    strategy = Strat(optim_spec=optim_spec, H=20, p=0.05, **schedule)
    trainer.fit(max_steps=150, num_epochs=5, strategy=strategy, num_nodes=NODES, device=device, batch_size=64,
                val_size=len(val_ds), val_interval=10, wandb_project=None, run_name=f"mnist_{name}")
""",
    "old": DIGITS
    + """
from exogym.trainer import LocalTrainer

for name, Strat in kinds.items():
    trainer = LocalTrainer(Wrapped(), train_ds, val_ds)
    strategy = Strat(inner_optim=optim_spec, H=10, **schedule)
    trainer.fit(num_epochs=15, strategy=strategy, num_nodes=NODES, device=device, batch_size=32, minibatch_size=32,
                val_size=len(val_ds), val_interval=10, run_name=f"mnist_{name}")
""",
}

NANOGPT = f"""
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

text = Path({str(PROJECT / "gym" / "example" / "sonnets.txt")!r}).read_text()
letters = sorted(set(text))


class Windows(torch.utils.data.Dataset):
    def __init__(self, codes, block_size):
        self.codes, self.block_size = codes, block_size

    def __len__(self):
        return len(self.codes) - self.block_size - 1

    def __getitem__(self, at):
        window = self.codes[at : at + self.block_size + 1]
        return window[:-1], window[1:]


def get_dataset(name, block_size, device, start_pc=0.0, end_pc=1.0):
    codes = torch.tensor([letters.index(c) for c in text[int(start_pc * len(text)) : int(end_pc * len(text))]])
    return Windows(codes, block_size), len(letters)


@dataclass
class GPTConfig:
    vocab_size: int = 0
    block_size: int = 32
    n_embd: int = 32
    dropout: float = 0.0

    @classmethod
    def gpt2_size_map(cls, size):
        return {{"small": cls()}}[size]

    @classmethod
    def gpt2_small(cls):
        return cls()


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.layer = nn.GRU(config.n_embd, config.n_embd, batch_first=True)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, batch, inference=False):
        inputs, targets = batch
        logits = self.head(self.dropout(self.layer(self.tokens(inputs))[0]))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""

GPT_HEAD = """
import os
import sys
from functools import partial

import numpy as np
import torch

from exogym.strategy.optim import OptimSpec
from nanogpt import GPT, GPTConfig, get_dataset

NODES, KIND = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
schedule = {"lr_scheduler": "lambda_cosine", "lr_scheduler_kwargs": {"warmup_steps": 10, "cosine_anneal": True}}
train_dataset, vocab_size = get_dataset("shakespeare", block_size=32, device="cpu", start_pc=0.0, end_pc=0.9)
val_dataset, vocab_size = get_dataset("shakespeare", block_size=32, device="cpu", start_pc=0.9, end_pc=1.0)
gpt_config = GPTConfig.gpt2_small()
gpt_config.dropout, gpt_config.vocab_size = 0.2, vocab_size
"""


NANOGPT_TRAIN = (
    GPT_HEAD
    + """
is_old, lr = KIND.startswith("old-"), 0.004
KIND = KIND.removeprefix("old-")


def factory_of_parts(name, block_size, end_pc, rank: int, num_nodes: int, train_dataset: bool):
    start, end = (rank / num_nodes * end_pc, (rank + 1) / num_nodes * end_pc) if train_dataset else (end_pc, 1.0)
    return get_dataset(name, block_size=block_size, device="cpu", start_pc=start, end_pc=end)[0]


optim = OptimSpec(torch.optim.AdamW, lr=lr)
outer = OptimSpec(torch.optim.SGD, lr=0.7, nesterov=True, momentum=0.9)
common = {**schedule, "max_norm": 1.0}
demo = {"compression_decay": 0.999, "compression_topk": 32, "compression_chunk": 64, "weight_decay": 0.0}
if KIND == "ddp":
    from exogym.strategy.strategy import SimpleReduceStrategy

    strategy = SimpleReduceStrategy(optim_spec=optim, **common)
elif KIND == "fedavg":
    from exogym.strategy.federated_averaging import FedAvgStrategy

    strategy = FedAvgStrategy(inner_optim_spec=optim, H=20, island_size=NODES, **common)
elif KIND == "sparta":
    from exogym.strategy.sparta import SPARTAStrategy

    strategy = SPARTAStrategy(optim_spec=optim, p_sparta=0.005, async_sparta_delay=0, **common)
elif KIND == "diloco":
    from exogym.strategy.diloco import DiLoCoStrategy

    inner = {"inner_optim_spec" if is_old else "optim_spec": optim}
    strategy = DiLoCoStrategy(**inner, outer_optim_spec=outer, H=20, **common)
elif KIND == "demo":
    from exogym.strategy.demo import DeMoStrategy

    if is_old:
        strategy = DeMoStrategy(optim_spec=OptimSpec(torch.optim.AdamW, lr=lr, **demo), **common)
    else:
        strategy = DeMoStrategy(optim_spec=OptimSpec(torch.optim.AdamW, lr=lr, weight_decay=0.0), **demo, **common)
elif KIND == "diloco_sparta":
    from exogym.strategy.sparta_diloco import SPARTADiLoCoStrategy

    strategy = SPARTADiLoCoStrategy(inner_optim_spec=optim, outer_optim_spec=outer, H=20, p_sparta=0.005,
                                    sparta_interval=1, **common)

if is_old:
    from exogym.trainer import LocalTrainer

    trainer = LocalTrainer(GPT(gpt_config), train_dataset, val_dataset)
    trainer.fit(num_epochs=1, max_steps=120, strategy=strategy, num_nodes=NODES, device="", batch_size=16,
                minibatch_size=16, shuffle=True, val_size=64, val_interval=50, wandb_project=None, run_name=None)
else:
    from exogym.trainer import Trainer

    if KIND == "ddp":
        train_dataset = val_dataset = partial(factory_of_parts, "owt", 32, 0.9)
    trainer = Trainer(GPT(gpt_config), train_dataset, val_dataset, start_port=12355)
    model = trainer.fit(num_epochs=1, max_steps=120, strategy=strategy, num_nodes=NODES, device="", batch_size=16,
                        minibatch_size=None, shuffle=KIND != "ddp", val_size=64, val_interval=50,
                        correlation_interval=None, save_dir="./checkpoints", wandb_project=None, run_name=KIND,
                        log_x_axis="step")
    os.makedirs("checkpoints", exist_ok=True)
    torch.save(model.state_dict(), os.path.join("checkpoints", f"{KIND}_model.pt"))
print("loss", trainer.result.val_loss, trainer.result.steps)
"""
)

SCALING = {
    "new": GPT_HEAD
    + """
from exogym.aux.utils import get_device
from exogym.strategy.diloco import DiLoCoStrategy
from exogym.strategy.strategy import SimpleReduceStrategy
from exogym.trainer import Trainer

for run_index, K in enumerate([0, 1, NODES]):
    trainer = Trainer(GPT(gpt_config), train_dataset, val_dataset, start_port=12355 + run_index)
    Strat, H = (SimpleReduceStrategy, {}) if K == 0 else (DiLoCoStrategy, {"H": 30})
    strategy = Strat(optim_spec=OptimSpec(torch.optim.AdamW, lr=0.004), max_norm=1.0, **schedule, **H)
    trainer.fit(num_epochs=1, max_steps=60, strategy=strategy, num_nodes=max(K, 1), device=get_device(),
                batch_size=32 // max(K, 1), shuffle=True, val_size=512, val_interval=128,
                wandb_project="DiLoCo-Scaling", run_name=f"K{K}", log_x_axis="examples",
                kwargs={"dataset_name": "shakespeare"})
    print("loss", trainer.result.val_loss, trainer.result.steps)
""",
    "old": GPT_HEAD
    + """
from exogym.strategy.diloco import DiLoCoStrategy
from exogym.strategy.strategy import SimpleReduceStrategy
from exogym.trainer import LocalTrainer

trainer = LocalTrainer(GPT(gpt_config), train_dataset, val_dataset, start_port=12355)
for steps in (60, 1):
    inner = {"optim_spec": OptimSpec(torch.optim.AdamW, lr=0.004), **schedule}
    common = {"num_epochs": 1, "device": "cpu", "shuffle": False, "val_size": 256, "val_interval": 100,
              "wandb_project": "DiLoCo-Batchsize-Scaling"}
    trainer.fit(max_steps=steps, strategy=SimpleReduceStrategy(**inner, max_norm=1.0), num_nodes=1, batch_size=32,
                run_name=f"ddp-{steps}", **common)
    for K in [1, NODES]:
        trainer.fit(max_steps=steps // K, strategy=DiLoCoStrategy(**inner, H=30), num_nodes=K, batch_size=32 // K,
                    minibatch_size=16 // K, run_name=f"diloco-{K}-{steps}", **common)
        print("loss", trainer.result.val_loss if trainer.result else 0, trainer.result.steps if trainer.result else 0)
""",
}


def run(folder: Path, script: str, *arguments: object) -> list[tuple[float, int]]:
    """Run a script as its user does; return the losses and steps that it prints."""
    (folder / "nanogpt.py").write_text(NANOGPT, encoding="utf-8")
    (folder / "script.py").write_text(script, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(PROJECT / "gym"), "WANDB_MODE": "offline"}
    command = [sys.executable, "script.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = [line.split() for line in done.stdout.splitlines() if line.startswith("loss ")]
    return [(float(loss), int(steps)) for _, loss, steps in printed]


def losses(folder: Path, run_name: str) -> list[float]:
    """Read what upstream's example plots."""
    with (folder / "logs" / run_name / "validation.csv").open(encoding="utf-8") as file:
        return [float(row["global_loss"]) for row in csv.DictReader(file)]


@pytest.mark.slow
@pytest.mark.parametrize("revision", MNIST)
def test_mnist(tmp_path, revision):
    run(tmp_path, MNIST[revision], NODES)
    for name in ("ddp", "diloco", "sparta"):
        found = losses(tmp_path, f"mnist_{name}")
        assert found[-1] < 0.9 and found[-1] < found[0] / 2, (name, found)


# Alone, a script takes seconds; with more nodes a test is slow.
KINDS = ("ddp", "fedavg", "sparta", "diloco", "demo", "diloco_sparta")
TRAINED = [("old-demo", 1), *((f"{old}{kind}", NODES) for old in ("", "old-") for kind in KINDS)]


@pytest.mark.parametrize(
    ("kind", "nodes"), [pytest.param(*each, marks=[pytest.mark.slow] if each[1] > 1 else []) for each in TRAINED]
)
def test_nanogpt(tmp_path, kind, nodes):
    [(loss, steps)] = run(tmp_path, NANOGPT_TRAIN, nodes, kind)
    assert loss < 3.4 and steps == 120
    if not kind.startswith("old-"):
        assert (tmp_path / "checkpoints" / f"{kind}_model.pt").is_file()
        assert losses(tmp_path, kind)[-1] == pytest.approx(loss)


@pytest.mark.slow
@pytest.mark.parametrize("revision", SCALING)
def test_diloco_scaling(tmp_path, revision):
    pytest.importorskip("wandb")
    found = run(tmp_path, SCALING[revision], NODES)
    wanted = {"new": [60, 60, 60], "old": [60, 60 // NODES, 1, 0]}
    assert [steps for _, steps in found] == wanted[revision]
    assert max(loss for loss, steps in found if steps) < 3.6
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) >= 3
