"""How DiLoCo scales with the number of nodes, the steps in a round (H) and the batch size: a grid, a table, a CSV file.

PYTHONPATH=gym python gym/example/diloco_scaling_batchsize.py --csv scaling.csv

All trainings see the same images as often. So more nodes or larger batches mean fewer steps, which takes less time and
gives a worse model; a larger learning rate may make up for some of it. A longer round means less to send.
"""

from __future__ import annotations

import argparse
import csv
from itertools import product
from pathlib import Path

from comparison import DigitModel, Outcome, accuracy, load_digits, show, train

from exogym import DiLoCoStrategy

COLUMNS = ("nodes", "batch_size", "H", "steps", "rounds", "val_loss", "accuracy", "bytes_sent_by_a_node")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 32], help="of one node")
    parser.add_argument("--rounds", type=int, nargs="+", default=[5, 25], metavar="H", help="steps in a round")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--csv", type=Path, help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="two trainings of one epoch, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.nodes, options.batch_sizes, options.rounds, options.epochs = [1, 2], [32], [5], 1

    train_data, val_data = load_digits()
    outcomes: list[Outcome] = []
    rows = []
    for nodes, batch_size, rounds in product(options.nodes, options.batch_sizes, options.rounds):
        outcome = train(
            f"{nodes} x {batch_size} images, H={rounds}",
            DiLoCoStrategy(H=rounds, lr=options.lr),
            DigitModel(),
            train_data,
            val_data,
            num_nodes=nodes,
            num_epochs=options.epochs,
            batch_size=batch_size,
            device="cpu",
        )
        right = accuracy(outcome.model, val_data)
        outcomes.append(outcome)
        figures = (outcome.val_loss, right, outcome.bytes_sent)
        rows.append((nodes, batch_size, rounds, outcome.steps, -(-outcome.steps // rounds), *figures))
        print(f"{len(rows)}: {outcome.name} done", flush=True)
    show(outcomes, [row[COLUMNS.index("accuracy")] for row in rows])
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
        print(f"the figures are in {options.csv}")


if __name__ == "__main__":
    main()
