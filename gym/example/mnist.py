"""A small convolutional network on MNIST, trained on N nodes with AllReduce and with DiLoCo.

PYTHONPATH=gym python gym/example/mnist.py --nodes 2
PYTHONPATH=gym python gym/example/mnist.py --data ~/data

MNIST is read from a folder with its four files, as torchvision leaves them in MNIST/raw; nothing is downloaded.
Where there is none, scikit-learn's handwritten digits are taken instead.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
from comparison import accuracy, load_digits, show, train
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from exogym import AllReduceStrategy, DiLoCoStrategy

USUAL = ("data", "~/data", "~/.cache/torchvision")  # torchvision has no folder of its own: people name one of these
UINT8 = 8  # the type of MNIST's values, in the third byte of each file


def read_idx(path: Path) -> Tensor:
    """A file of MNIST: two zeros, type, number of dimensions; the dimensions, big-endian; the values."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if raw[:3] != bytes([0, 0, UINT8]):
        raise SystemExit(f"{path} is not a file of MNIST")
    dimensions = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(dimensions).copy())


def read_mnist(folder: Path) -> tuple[TensorDataset, TensorDataset] | None:
    """Return data to train and validate with, if the files are here: (pixels [1, 28, 28] from 0 to 1, label) each."""

    def values(name: str) -> Tensor | None:
        files = [folder / below / (name + end) for below in ("", "MNIST/raw") for end in ("", ".gz")]
        return next((read_idx(file) for file in files if file.is_file()), None)

    parts = []
    for part in ("train", "t10k"):
        pixels, labels = values(f"{part}-images-idx3-ubyte"), values(f"{part}-labels-idx1-ubyte")
        if pixels is None or labels is None:
            return None
        parts.append(TensorDataset(pixels.unsqueeze(1).float() / 255, labels.long()))
    return parts[0], parts[1]


def load(folder: Path | None) -> tuple[TensorDataset, TensorDataset]:
    for place in [folder] if folder else [Path(name).expanduser() for name in USUAL]:
        if found := read_mnist(place):
            print(f"data: MNIST in {place}, {len(found[0]):,} images to train on")
            return found
    if folder:
        raise SystemExit(f"there is no MNIST in {folder}: it needs train-images-idx3-ubyte and the three other files")
    first, second = (TensorDataset(part.tensors[0].view(-1, 1, 8, 8), part.tensors[1]) for part in load_digits())
    print(f"data: scikit-learn's digits, {len(first):,} images to train on; for MNIST give --data FOLDER")
    return first, second


class ConvolutionalModel(nn.Module):
    """Images of any size from 8x8 on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4)),
            *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
        )

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        pixels, labels = batch  # [B, 1, H, W], [B]
        return nn.functional.cross_entropy(self.layers(pixels), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with MNIST's files")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="20 steps only, to see that it runs")
    options = parser.parse_args()
    train_data, val_data = load(options.data)
    strategies = {
        "AllReduce": AllReduceStrategy(lr=2e-3),
        "DiLoCo, H=10": DiLoCoStrategy(H=10, lr=2e-3),
    }
    outcomes = [
        train(
            name,
            strategy,
            ConvolutionalModel(),
            train_data,
            val_data,
            num_nodes=options.nodes,
            num_epochs=options.epochs,
            max_steps=20 if options.quick else None,
            batch_size=32,
            device="cpu",
        )
        for name, strategy in strategies.items()
    ]
    show(outcomes, [accuracy(outcome.model, val_data) for outcome in outcomes])


if __name__ == "__main__":
    main()
