"""Trains copies of one model with different strategies, and shows what each costs and what it gives."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from exogym import LocalTrainer, Logger, Strategy
from exogym.logger import Record


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
