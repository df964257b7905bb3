"""The old name of distributed.fit."""

from distributed.fit import NetworkTrainer

__all__ = ["NetworkTrainer"]
