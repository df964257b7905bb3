"""Where a run's events go. Names load no torch; wandb and tensorboard are imported by who makes such a logger."""

from .console_logger import ConsoleLogger
from .event import Event, Events, NullLogger
from .folder_loggers import CSVLogger, TensorBoardLogger
from .logger import Logger
from .record import Record
from .summary import Summary
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
