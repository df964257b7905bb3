"""What the examples share: a task, and a comparison of what strategies cost and give.

Handwritten digits that come with scikit-learn, and a small model for them: 1,797 images of 8x8 pixels,
https://archive.ics.uci.edu/dataset/80 (E. Alpaydin and C. Kaynak, 1998, CC BY 4.0).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer, Logger, Strategy
from exogym.logger import Record

TRAINING = 1437  # images; the other 360 are for validation


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return data for training and for validation: (pixels float32 [64] from 0 to 1, label int64) each."""
    found = datasets.load_digits()
    pixels, labels = torch.tensor(found.data).float() / 16, torch.tensor(found.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    first, rest = order[:TRAINING], order[TRAINING:]
    return TensorDataset(pixels[first], labels[first]), TensorDataset(pixels[rest], labels[rest])


class DigitModel(nn.Module):
    """Two layers. What exogym trains has a `forward` that takes a batch and returns its mean loss."""

    def __init__(self, width: int = 64):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        pixels, labels = batch  # [B, 64], [B]
        return nn.functional.cross_entropy(self.layers(pixels), labels)


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """Return a share from 0 to 1. The model has its classifier in `layers`."""
    pixels, labels = dataset.tensors
    right = [(model.layers(x).argmax(1) == y).sum() for x, y in zip(pixels.split(500), labels.split(500), strict=True)]
    return (sum(right) / len(labels)).item()


class LastFigures(Logger):
    """Keeps the record of a run's end: a logger of one's own has to define `write`, and nothing else."""

    end: Record | None = None

    def write(self, record: Record) -> None:
        if record.kind == "end":
            self.end = record


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """bytes_sent: by one node on average, in exchanges of the strategy: without the first weights and validation."""

    name: str
    model: nn.Module
    steps: int
    val_loss: float
    bytes_sent: float


def train(
    name: str, strategy: Strategy, model: nn.Module, train_dataset: Any, val_dataset: Any, **settings: Any
) -> Outcome:
    """`settings` are those of `LocalTrainer.fit`. The model itself is not changed."""
    trainer = LocalTrainer(copy.deepcopy(model), train_dataset, val_dataset)
    figures = LastFigures()
    trained = trainer.fit(strategy=strategy, logger=figures, **settings)
    return Outcome(
        name=name,
        model=trained,
        steps=trainer.result.steps,
        val_loss=trainer.result.val_loss,
        bytes_sent=figures.end.bytes_total / len(trainer.results),
    )


def show(outcomes: Sequence[Outcome], accuracies: Sequence[float] | None = None) -> None:
    """A line for each. `accuracies` are from 0 to 1."""
    print(f"{'':24} {'steps':>6} {'validation loss':>16} {'accuracy':>9} {'MB sent by a node':>18}")
    for n, outcome in enumerate(outcomes):
        right = f"{accuracies[n]:9.1%}" if accuracies else f"{'':9}"
        print(f"{outcome.name:24} {outcome.steps:6} {outcome.val_loss:16.3f} {right} {outcome.bytes_sent / 1e6:18.3f}")
