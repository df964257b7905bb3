"""Handwritten digits that come with scikit-learn, and a small model for them: what most examples here train on.

1,797 images of 8x8 pixels: https://archive.ics.uci.edu/dataset/80 (E. Alpaydin and C. Kaynak, 1998, CC BY 4.0).
"""

from __future__ import annotations

import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.utils.data import TensorDataset

TRAINING = 1437  # images; the other 360 are for validation


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """For training and for validation: (pixels float32 [64] from 0 to 1, label int64) each."""
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
    """From 0 to 1. The model has its classifier in `layers`."""
    pixels, labels = dataset.tensors
    return (model.layers(pixels).argmax(1) == labels).float().mean().item()
