"""Lesson 5: a model in stages, one for each process, as where no machine has the memory for all of it.

PYTHONPATH=gym python gym/example/tutorial_pipeline.py

Each process computes its own layers and sends what they give to the next one; gradients come back the same way.
"""

import argparse

import torch
from comparison import load_digits
from torch import nn

from exogym import AllReduceStrategy, LocalTrainer, PipelineTrainer, split
from exogym.strategy import PipelineStrategy


def layers(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def loss(output, batch):
    """Return what the last stage computes, from its output and the batch, which every process reads."""
    return nn.functional.cross_entropy(output, batch[1])


class Whole(nn.Module):
    """Computes the same layers in one process, to compare with."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, batch):
        return loss(self.parts(batch[0]), batch)


def main(quick: bool) -> None:
    train, test = load_digits()
    settings = {"batch_size": 64, "max_steps": 20 if quick else 200, "device": "cpu"}

    whole = Whole(layers(32 if quick else 256))
    alone = LocalTrainer(whole, train, test)
    alone.fit(AllReduceStrategy(lr=1e-3, max_norm=1.0), **settings)
    print(f"{'one process':<24}loss {alone.result.val_loss:.4f}")

    # Part 1: two stages of about as many weights. Where one machine is larger or faster: shares=(2, 1).
    # What is sent is rounded to bf16; with float32 the weights are those of one process but for the order of sums.
    for wire in ("float32", "bf16"):
        stages = split(layers(32 if quick else 256), loss, shares=(1, 1))
        trainer = PipelineTrainer(stages, train, test)
        trainer.fit(PipelineStrategy(lr=1e-3, max_norm=1.0, wire=wire), **settings)
        sent = sum(result.bytes_sent for result in trainer.results) / trainer.result.steps / 1e3
        print(f"{f'two stages, {wire}':<24}loss {trainer.result.val_loss:.4f}  {sent:.0f} kB sent a step")

    # Part 2: stages of your own. The first is called as stage(batch), others as stage(activation, batch); the last one
    # returns the loss, as a model does. minibatch_size says how many samples travel at once: while they are at one
    # stage, others are at the next. On several machines a script for `python -m exogym.launch` makes a
    # LaunchedPipelineTrainer, with a function for each stage, so that no process makes more than its own.
    #
    # A stage that is lost ends the run. With save_dir and checkpoint_interval each has kept its weights, and
    # fit(..., resume=True) goes on from the newest step that all of them have.


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, a few steps")
    main(parser.parse_args().quick)
