"""Lesson 4: what a long training needs. Checkpoints, resuming, loggers, schedules, early stopping, and a launcher.

PYTHONPATH=gym python gym/example/tutorial_production.py --out runs/digits
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path

from comparison import DigitModel, accuracy, load_digits

from exogym import ConsoleLogger, CSVLogger, DiLoCoStrategy, LaunchedTrainer, LocalTrainer
from exogym.launch import launch


def strategy_for_long_runs() -> DiLoCoStrategy:
    """Step 1: a schedule and a limit for gradients. The learning rate rises for 10 steps, then falls along a cosine."""
    return DiLoCoStrategy(H=10, lr=3e-3, lr_scheduler="cosine", warmup_steps=10, min_lr_ratio=0.1, max_norm=1.0)


class Several:
    """`fit` takes one logger, which may be any callable that takes an event. This one hands events on to several."""

    def __init__(self, *loggers):
        self.loggers = loggers

    def __call__(self, event: dict) -> None:
        for logger in self.loggers:
            logger(event)

    def close(self) -> None:
        for logger in self.loggers:
            logger.close()


class StopAfter:
    """Asks to stop once rank 0 has made so many steps: as a person would with Ctrl-C."""

    def __init__(self, steps: int):
        self.steps, self.is_due = steps, False

    def __call__(self, event: dict) -> None:
        if event["type"] == "step" and event["step"] >= self.steps:
            self.is_due = True

    def close(self) -> None:
        pass


def stop_and_resume(out: Path, nodes: int, epochs: int) -> None:
    train_data, val_data = load_digits()
    settings = {
        "strategy": strategy_for_long_runs(),
        "num_nodes": nodes,
        "num_epochs": epochs,
        "batch_size": 32,  # samples of a node in an optimizer step ...
        "gradient_accumulation": 2,  # ... computed in two forward passes, which takes half the memory
        "autocast": True,  # forward passes in bf16; the weights stay float32
        "device": "cpu",
        "save_dir": str(out / "checkpoints"),  # each rank keeps its own here
        "checkpoint_interval": 1,  # after every round
    }
    print("Step 2: train, with a line for every 20 steps and all figures in a CSV file, until somebody stops it.")
    somebody = StopAfter(steps=12)
    logger = Several(ConsoleLogger(log_interval=20), CSVLogger(out / "figures.csv", log_interval=20), somebody)
    trainer = LocalTrainer(DigitModel(), train_data, val_data)
    trainer.fit(logger=logger, should_stop=lambda: somebody.is_due, **settings)
    print(f"        It was stopped after {trainer.result.steps} steps, at weights that all ranks agreed on.")

    print("Step 3: go on. `resume` finds the newest checkpoint; the run ends as if it had not been stopped.")
    trainer = LocalTrainer(DigitModel(), train_data, val_data)
    logger = Several(ConsoleLogger(log_interval=20), CSVLogger(out / "figures.csv", append=True, log_interval=20))
    model = trainer.fit(logger=logger, resume=True, **settings)
    print(f"        {trainer.result.steps} steps in all, {accuracy(model, val_data):.1%} right.")
    with (out / "figures.csv").open(encoding="utf-8") as file:
        print(f"        figures.csv has {sum(1 for _ in csv.DictReader(file))} rows.")


def stop_early(epochs: int) -> None:
    print("Step 4: stop when validation says that it gets no better.")
    train_data, val_data = load_digits()
    trainer = LocalTrainer(DigitModel(), train_data, val_data)
    trainer.fit(
        strategy=strategy_for_long_runs(),
        num_epochs=epochs,
        batch_size=32,
        device="cpu",
        early_stopping=2,  # validations without a lower loss
        keep_best=True,
    )
    result = trainer.result
    kept = f"the model is that of step {result.best_step}, validation loss {result.val_loss:.3f}"
    print(f"        ended after {result.steps} steps; {kept}.")


def train_as_rank() -> tuple[int, float]:
    """Train as one process of a launch: LaunchedTrainer is one rank, and finds the others by itself."""
    train_data, val_data = load_digits()
    trainer = LaunchedTrainer(DigitModel(), train_data, val_data)
    trainer.fit(strategy=strategy_for_long_runs(), max_steps=20, batch_size=32, device="cpu")
    return trainer.result.digest, trainer.result.val_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for checkpoints and figures (a temporary one if not given)")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="two epochs, to see that it runs")
    options = parser.parse_args()
    epochs = 2 if options.quick else options.epochs
    print(f"Step 1: the strategy is {strategy_for_long_runs().config}.")
    with tempfile.TemporaryDirectory() as temporary:
        stop_and_resume(options.out or Path(temporary), options.nodes, epochs)
    stop_early(4 * epochs)

    print("Step 5: the same training, of processes that a launcher starts. From a terminal that is")
    print("        python -m exogym.launch train.py --nproc-per-node 2")
    print("        and with --nnodes, --node-rank and --master-addr the processes may be on several machines.")
    results = launch(train_as_rank, nproc_per_node=options.nodes)
    print(f"        {len(results)} processes ended with validation loss {results[0][1]:.3f}.")
    print(f"        All have the same weights: {len({digest for digest, _ in results}) == 1}.")


if __name__ == "__main__":
    main()
