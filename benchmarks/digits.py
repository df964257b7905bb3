"""The task of benchmarks/strategies.py: handwritten digits, a small model, and one measured training of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from exogym import Strategy

NODES = 4
BATCH = 8  # images of one node in an optimizer step; 34 steps of all nodes are an epoch
SPLIT_SEED = 0
PARTS = {"train": 1077, "validation": 360, "test": 360}  # of scikit-learn's 1,797 images of 8x8 pixels
WIDTHS = (64, 128, 128, 10)
LAYERS = (64, 128, 64)  # without biases: every parameter is in a layer of 64x64 or more. Classes 10 to 63 stay empty


def load_digits() -> dict[str, TensorDataset]:
    """Return pixels [n, 64] from 0 to 1 and labels [n] of each part: the same images, whatever the seed of a run."""
    from sklearn import datasets

    found = datasets.load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(SPLIT_SEED))
    pixels, labels = torch.from_numpy(found.data).float()[order] / 16, torch.from_numpy(found.target).long()[order]
    sizes = list(PARTS.values())
    parts = zip(PARTS, pixels.split(sizes), labels.split(sizes), strict=True)
    return {name: TensorDataset(x.clone(), y.clone()) for name, x, y in parts}


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
    """Make a net: "mlp" is the one of the table, "layers" has large layers alone."""
    torch.manual_seed(seed)
    return Net({"mlp": WIDTHS, "layers": LAYERS}[name], bias=name != "layers")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one training came to. Losses and accuracy (0 to 1) are those of the model that `fit` returned.

    accuracy: on the test digits, which nothing is chosen by. sent: bytes of each rank. seconds: without the start of
    the processes.
    """

    train_loss: float
    val_loss: float
    accuracy: float
    sent: list[int]
    seconds: float

    @property
    def mean_sent(self) -> float:
        return sum(self.sent) / len(self.sent)


def train(strategy: Strategy, *, net: str, steps: int, seed: int) -> Figures:
    """Train on NODES processes of this machine, without validation: that would send too. Raises ExogymError."""
    from exogym import LocalTrainer  # not above: upstream.py has another exogym beside these digits

    data = load_digits()
    trainer = LocalTrainer(new_net(net, seed), data["train"])
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
    (train_loss, _), (val_loss, _), (_, accuracy) = (evaluate(model, data[part]) for part in PARTS)
    return Figures(
        train_loss=train_loss,
        val_loss=val_loss,
        accuracy=accuracy,
        sent=[rank.bytes_sent for rank in trainer.results],
        seconds=round(trainer.result.seconds, 1),
    )


@torch.no_grad()
def evaluate(model: Net, data: TensorDataset) -> tuple[float, float]:
    """Return the mean loss, and the accuracy from 0 to 1."""
    pixels, labels = data.tensors
    logits = model.eval().layers(pixels)
    loss = nn.functional.cross_entropy(logits, labels).item()
    return loss, (logits.argmax(1) == labels).double().mean().item()
