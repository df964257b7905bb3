"""Where a run's events go. Names load no torch; wandb and tensorboard are imported by who makes such a logger."""

from .event import Event, Events, NullLogger
from .logger import ConsoleLogger, CSVLogger, Logger, TensorBoardLogger
from .summary import Record, Summary
from .wandb_logger import WandbLogger

__all__ = [
    "CSVLogger",
    "ConsoleLogger",
    "Event",
    "Events",
    "Logger",
    "NullLogger",
    "Record",
    "Summary",
    "TensorBoardLogger",
    "WandbLogger",
]
