"""Lesson 2: every strategy on the same task, with what it sends and what it gives.

PYTHONPATH=gym python gym/example/tutorial_strategies.py
PYTHONPATH=gym python gym/example/tutorial_strategies.py --only DiLoCo SPARTA

All start from the same weights and see the same images. docs/strategies.md says when to choose which.
"""

import argparse

from comparison import DigitModel, accuracy, load_digits, show, train

from exogym.strategy import (
    AllReduceStrategy,
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    ParameterServerStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
)
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.sparta import SparseCommunicator

# All but DeMo make ordinary optimizer steps: `inner_optim`, by default AdamW, with the learning rate `lr`.
lr = 2e-3
lessons = [
    # Gradients are averaged at every step. It is the yardstick: the best result, and the most to send.
    ("AllReduce", lambda: AllReduceStrategy(lr=lr)),
    # Nodes train alone for H steps, and then take the mean of their changes.
    ("DiLoCo", lambda: DiLoCoStrategy(lr=lr, H=20, outer_momentum=0)),
    # The default is the outer step of DiLoCo's paper, for trainings from scratch of hundreds of rounds.
    ("DiLoCo with momentum", lambda: DiLoCoStrategy(lr=lr, H=20)),
    # The same arithmetic, but rank 0 alone makes the outer step: the others send to it and hear from it.
    ("parameter server", lambda: ParameterServerStrategy(lr=lr, H=20, outer_momentum=0)),
    # The mean of the weights instead of the changes; in islands nodes average with one other node at a time.
    ("FedAvg", lambda: FedAvgStrategy(lr=lr, H=20)),
    ("FedAvg in islands", lambda: FedAvgStrategy(lr=lr, H=20, island_size=2)),
    # After each step a small part of the weights is averaged, another one each time.
    ("SPARTA", lambda: SPARTAStrategy(lr=lr, p_sparta=0.005)),
    ("SPARTA, 8 bits", lambda: SPARTAStrategy(lr=lr, p_sparta=0.005, quantization_bits=8)),
    # Both: what SPARTA averages in between keeps nodes close, so that rounds may be longer.
    ("SPARTA and DiLoCo", lambda: SPARTADiLoCoStrategy(lr=lr, p_sparta=0.005, H=40, outer_momentum=0)),
    # Any composition: modules that communicate after the optimizer's step, each at its own interval.
    (
        "a composition",
        lambda: CommunicateOptimizeStrategy(
            lr=lr,
            communication_modules=[
                SparseCommunicator(sparsification_rate=0.01),
                AveragingCommunicator(interval=20, island_size=2),
            ],
        ),
    ),
    # DeMo sends the largest frequencies of a momentum that each node keeps, and all step along signs.
    ("DeMo", lambda: DeMoStrategy(lr=1e-3, compression_topk=8, compression_chunk=16)),
]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--nodes", type=int, default=4)
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--only", nargs="+", metavar="NAME", choices=[name for name, _ in lessons], help="not all of them")
parser.add_argument("--quick", action="store_true", help="two nodes and one epoch, to see that it runs")
options = parser.parse_args()
nodes, epochs = (2, 1) if options.quick else (options.nodes, options.epochs)

train_data, val_data = load_digits()
outcomes = []
for name, build in lessons:
    if options.only and name not in options.only:
        continue
    settings = {"num_nodes": nodes, "num_epochs": epochs, "batch_size": 16, "device": "cpu"}
    outcomes.append(train(name, build(), DigitModel(), train_data, val_data, **settings))
    print(f"{name} is done", flush=True)

show(outcomes, [accuracy(outcome.model, val_data) for outcome in outcomes])
print(
    """
How to read it: bytes are those that one node sends in all its exchanges. AllReduce sends 2 (N - 1) / N times 4 bytes
for each parameter and step. DiLoCo sends as much once a round, so H times less. SPARTA sends `p_sparta` of it at every
step. Accuracy suffers where nodes are apart for long, or where there are few steps in all, as here."""
)
