"""Federated averaging: every node has data of its own that never leave it, and each of them is one-sided.

PYTHONPATH=gym python gym/example/federated.py --nodes 4

Nodes are given digits by label: most images of a digit belong to one node. Compared are one node that trains alone on
what it has, all nodes that average their weights, and islands: only so many average with each other, others each time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from comparison import DigitModel, Outcome, accuracy, load_digits, show, train
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from exogym import FedAvgStrategy

OWN = 0.9  # of the images of a digit belong to one node; the others are spread over all


def numbers_of(labels: Tensor, rank: int, num_nodes: int) -> list[int]:
    """List the numbers of the images that a node has. Digit d belongs to node d modulo num_nodes."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tolist()
    kept = round(OWN * len(order))
    own = [n for n in order[:kept] if labels[n] % num_nodes == rank]
    return own + order[kept:][rank::num_nodes]


def factory_of(train_data: TensorDataset, val_data: TensorDataset) -> Callable[[int, int, bool], Dataset]:
    """Return a function that LocalTrainer takes in place of a data set: each node calls it for its own."""

    def factory(rank: int, num_nodes: int, train_dataset: bool) -> Dataset:
        whole = train_data if train_dataset else val_data
        return Subset(whole, numbers_of(whole.tensors[1], rank, num_nodes))

    return factory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--islands", type=int, default=2, metavar="SIZE", help="nodes that average with each other")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="2 epochs, to see that it runs")
    options = parser.parse_args()
    epochs = 2 if options.quick else options.epochs

    train_data, val_data = load_digits()
    factory = factory_of(train_data, val_data)
    for rank in range(options.nodes):
        labels = train_data.tensors[1][numbers_of(train_data.tensors[1], rank, options.nodes)]
        counts = torch.bincount(labels, minlength=10).tolist()
        print(f"node {rank}: {len(labels)} images; of the digits 0 to 9: {' '.join(map(str, counts))}")

    def run(name: str, data: Dataset | Callable, nodes: int, island_size: int | None = None) -> Outcome:
        strategy = FedAvgStrategy(inner_optim="sgd", lr=0.1, H=5, island_size=island_size)
        # Where a factory makes the validation sets, each node is validated on its own part, and the loss is of all.
        val = data if callable(data) else val_data
        settings = {"num_nodes": nodes, "num_epochs": epochs, "batch_size": 16, "device": "cpu"}
        return train(name, strategy, DigitModel(), data, val, **settings)

    alone = factory(0, options.nodes, True)
    outcomes = [
        run("node 0 alone", alone, 1),
        run("FedAvg", factory, options.nodes),
        run(f"FedAvg, islands of {options.islands}", factory, options.nodes, options.islands),
    ]
    show(outcomes, [accuracy(outcome.model, val_data) for outcome in outcomes])


if __name__ == "__main__":
    main()
