"""The task of benchmarks/strategies.py: handwritten digits, a small model, and one measured training of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from exogym import LocalTrainer, Strategy, TrainResult
from exogym.settings import FitSettings

NODES = 4
BATCH = 8  # images of one node in an optimizer step; 34 steps of all nodes are an epoch
SPLIT_SEED = 0
PARTS = {"train": 1077, "validation": 360, "test": 360}  # of scikit-learn's 1,797 images of 8x8 pixels

WIDTHS = (64, 128, 128, 10)
LAYERS = (64, 128, 64)  # without biases: every parameter is in a layer of 64x64 or more. Classes 10 to 63 stay empty
LARGE = (64, 960, 960, 10)  # a million parameters


class Digits(Dataset):
    """Pixels [n, 64] from 0 to 1, and labels [n]."""

    def __init__(self, pixels: Tensor, labels: Tensor):
        self.pixels, self.labels = pixels, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        return self.pixels[n], self.labels[n]


def load_digits() -> dict[str, Digits]:
    """By part: the same images in each, whatever the seed of a run."""
    from sklearn import datasets

    found = datasets.load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(SPLIT_SEED))
    pixels, labels = torch.from_numpy(found.data).float()[order] / 16, torch.from_numpy(found.target).long()[order]
    sizes = list(PARTS.values())
    parts = zip(PARTS, pixels.split(sizes), labels.split(sizes), strict=True)
    return {name: Digits(x.clone(), y.clone()) for name, x, y in parts}


class Net(nn.Module):
    """Linear layers of these widths with ReLU between them; `forward` returns the mean loss of a batch."""

    def __init__(self, widths: tuple[int, ...], *, bias: bool = True):
        super().__init__()
        layers = [nn.Linear(n, m, bias=bias) for n, m in pairwise(widths)]
        between = [part for layer in layers[:-1] for part in (layer, nn.ReLU())]
        self.layers = nn.Sequential(*between, layers[-1])

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        pixels, labels = batch
        return nn.functional.cross_entropy(self.layers(pixels), labels)


def new_net(name: str, seed: int) -> Net:
    """By name: "mlp" is the one of the table, "layers" has large layers alone, "large" a million parameters."""
    torch.manual_seed(seed)
    widths = {"mlp": WIDTHS, "layers": LAYERS, "large": LARGE}[name]
    return Net(widths, bias=name != "layers")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one training. Losses and accuracies (0 to 1) are those of the model that `fit` returned.

    accuracy: on the test digits, which nothing is chosen by; val_accuracy: on those that learning rates are chosen by.
    first: bytes that each rank sent before its first step; sent: those of the steps, and of what came after them.
    seconds: without the start of the processes.
    """

    train_loss: float
    val_loss: float
    val_accuracy: float
    accuracy: float
    first: list[int]
    sent: list[int]
    seconds: float

    @property
    def mean_sent(self) -> float:
        return sum(self.sent) / len(self.sent)


class MeasuredTrainer(LocalTrainer):
    """Each rank leaves in `folder` what it has sent."""

    folder = Path()

    def run_rank(
        self,
        rank: int,
        settings: FitSettings,
        *,
        events: Callable[[dict], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> TrainResult:
        first = None

        def heard(event: dict[str, Any]) -> None:
            nonlocal first
            if event["type"] == "step" and first is None:
                first = self.node.comm.bytes_sent - event["bytes"]
            if events:
                events(event)

        result = super().run_rank(rank, settings, events=heard, should_stop=should_stop)
        found = {"first": first, "sent": result.bytes_sent - first}
        (self.folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
        return result


def train(strategy: Strategy, *, net: str, steps: int, seed: int) -> Figures:
    """On NODES processes of this machine, without validation: that would send too. Raises ExogymError."""
    data = load_digits()
    with tempfile.TemporaryDirectory(prefix="digits-") as folder:
        trainer = MeasuredTrainer(new_net(net, seed), data["train"])
        trainer.folder = Path(folder)
        model = trainer.fit(
            strategy=strategy,
            num_nodes=NODES,
            num_epochs=steps,
            max_steps=steps,
            batch_size=BATCH,
            minibatch_size=BATCH,
            seed=seed,
            device="cpu",
        )
        ranks = [json.loads((trainer.folder / f"rank{rank}.json").read_text()) for rank in range(NODES)]
    (train_loss, _), (val_loss, val_accuracy), (_, accuracy) = (evaluate(model, data[part]) for part in PARTS)
    return Figures(
        train_loss=train_loss,
        val_loss=val_loss,
        val_accuracy=val_accuracy,
        accuracy=accuracy,
        first=[rank["first"] for rank in ranks],
        sent=[rank["sent"] for rank in ranks],
        seconds=round(trainer.result.seconds, 1),
    )


@torch.no_grad()
def evaluate(model: Net, data: Digits) -> tuple[float, float]:
    """(mean loss, accuracy from 0 to 1)"""
    logits = model.eval().layers(data.pixels)
    loss = nn.functional.cross_entropy(logits, data.labels).item()
    return loss, (logits.argmax(1) == data.labels).double().mean().item()
