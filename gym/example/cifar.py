"""Colour images of CIFAR-10's shape in ten classes, trained on N nodes with AllReduce and with SPARTA-DiLoCo.

PYTHONPATH=gym python gym/example/cifar.py --nodes 2
PYTHONPATH=gym python gym/example/cifar.py --data cifar-10-batches-bin

CIFAR-10 is read from a folder with its files of the binary version; nothing is downloaded. Where there is none, the
images are cut from the two photographs that come with scikit-learn: a class is a stripe of one of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from comparison import accuracy, show, train
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from exogym import AllReduceStrategy, SPARTADiLoCoStrategy

SIZE, CLASSES = 32, 10
STRIPES, STEP, EVERY = 5, 4, 4  # of each photograph; pixels from one image to the next; of so many rows one validates


def read_cifar(files: list[Path]) -> TensorDataset:
    """An image is a byte for its class, and 3 * 32 * 32 for its colours: red, then green, then blue."""
    rows = torch.from_numpy(np.concatenate([np.fromfile(file, np.uint8) for file in files]))
    rows = rows.view(-1, 1 + 3 * SIZE * SIZE)
    return TensorDataset(rows[:, 1:].view(-1, 3, SIZE, SIZE).float() / 255, rows[:, 0].long())


def cut_photographs() -> tuple[TensorDataset, TensorDataset]:
    """Return data for training and for validation: no pixel is in both."""
    from sklearn.datasets import load_sample_images

    parts: tuple[list[tuple[Tensor, int]], ...] = ([], [])
    for number, photograph in enumerate(load_sample_images().images):
        pixels = torch.from_numpy(photograph.copy()).permute(2, 0, 1).float() / 255  # [3, height, width]
        width = pixels.shape[2] // STRIPES
        for row in range(pixels.shape[1] // SIZE):
            for stripe in range(STRIPES):
                for left in range(stripe * width, (stripe + 1) * width - SIZE + 1, STEP):
                    image = pixels[:, row * SIZE : (row + 1) * SIZE, left : left + SIZE]
                    parts[row % EVERY == 0].append((image, number * STRIPES + stripe))
    images = [(torch.stack([image for image, _ in part]), torch.tensor([label for _, label in part])) for part in parts]
    return TensorDataset(*images[0]), TensorDataset(*images[1])


def load(folder: Path | None) -> tuple[TensorDataset, TensorDataset]:
    if folder is None:
        first, second = cut_photographs()
        print(f"data: two photographs, {len(first):,} images to train on; for CIFAR-10 give --data FOLDER")
        return first, second
    files = sorted(folder.glob("data_batch_*.bin"))
    if not files or not (folder / "test_batch.bin").is_file():
        raise SystemExit(f"there is no CIFAR-10 in {folder}: it needs data_batch_1.bin and so on, and test_batch.bin")
    first, second = read_cifar(files), read_cifar([folder / "test_batch.bin"])
    print(f"data: CIFAR-10 in {folder}, {len(first):,} images to train on")
    return first, second


class ConvolutionalModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)),
            *(nn.Flatten(), nn.Linear(32 * 4 * 4, CLASSES)),
        )

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The mean loss, and the accuracy, which loggers get with each validation."""
        pixels, labels = batch  # [B, 3, 32, 32], [B]
        logits = self.layers(pixels)
        right = (logits.argmax(1) == labels).float().mean()
        return {"loss": nn.functional.cross_entropy(logits, labels), "accuracy": right}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10's binary files")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="20 steps only, to see that it runs")
    options = parser.parse_args()
    train_data, val_data = load(options.data)
    strategies = {
        "AllReduce": AllReduceStrategy(lr=2e-3),
        "SPARTA-DiLoCo, H=10": SPARTADiLoCoStrategy(H=10, p_sparta=0.01, lr=2e-3),
    }
    settings = {"num_nodes": options.nodes, "num_epochs": options.epochs, "batch_size": 32, "device": "cpu"}
    if options.quick:
        settings["max_steps"] = 20
    outcomes = [
        train(name, strategy, ConvolutionalModel(), train_data, val_data, **settings)
        for name, strategy in strategies.items()
    ]
    show(outcomes, [accuracy(outcome.model, val_data) for outcome in outcomes])


if __name__ == "__main__":
    main()
