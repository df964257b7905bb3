"""Everything that a user can be told, and the exit status that goes with it.

TunerError                  something the user can mend
├── ConfigError             config.ini, a flag, or a hosts file
├── DataError               a manifest or an audio file
├── ModelError              a checkpoint that does not load
├── HostError               one host: SSH, Python, disk, files
│   ├── HostKeyError        unknown or changed host key
│   └── AccessError         no key of the user's opens it
├── RunError                a run that ended early
└── MissingProgram          a system program that is not installed
"""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    OK = 0
    ERROR = 1  # a defect of ours: the traceback is shown
    USAGE = 2  # the command line
    CONFIG = 3
    DATA = 4
    HOST = 5
    RUN = 6
    INTERRUPTED = 130


class TunerError(Exception):
    """Says what failed, where, and what to do next; shown to the user without a traceback."""

    exit_status = ExitStatus.ERROR

    def __init__(self, message: str, *, remedy: str = ""):
        super().__init__(message)
        self.remedy = remedy

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n  {self.remedy}" if self.remedy else message

    @property
    def told(self) -> str:
        """The text as it is shown: its first line ends in a full stop. A remedy may end in a command to copy."""
        first, *more = str(self).split("\n", 1)
        return "\n".join([first if first.endswith((".", ":", "?", "!")) else f"{first}.", *more])


class ConfigError(TunerError):
    exit_status = ExitStatus.CONFIG


class DataError(TunerError):
    exit_status = ExitStatus.DATA


class ModelError(TunerError):
    exit_status = ExitStatus.DATA


class HostError(TunerError):
    """A problem with one host; `host` is its address."""

    exit_status = ExitStatus.HOST

    def __init__(self, host: str, message: str, *, remedy: str = ""):
        super().__init__(f"{host}: {message}", remedy=remedy)
        self.host = host


class HostKeyError(HostError):
    pass


class AccessError(HostError):
    pass


class RunError(TunerError):
    exit_status = ExitStatus.RUN


class MissingProgram(TunerError):
    exit_status = ExitStatus.CONFIG
