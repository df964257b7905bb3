"""Several hosts on one Linux machine, for tests and benchmarks: needs root, and is never shipped to a host."""

from lab.errors import LabError, LabLacks
from lab.hosts import LabHost, LabProcess
from lab.lab import Lab, down

__all__ = ["Lab", "LabError", "LabHost", "LabLacks", "LabProcess", "down"]
