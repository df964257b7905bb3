"""Everything that exogym raises on purpose.

ExogymError
├── SettingError       a setting that is unknown, out of range, or contradicts another (also a ValueError)
│   └── UnknownSetting one that there is not (also a TypeError)
├── PeerLost           another rank died, froze or cut the connection
│   └── Stranger       somebody without the run's key was in its place
├── StageLost          a stage of a pipeline is gone, and with it a part of the model
├── Rejoined           this rank was away, and has been given the state of the others (for the training loop alone)
├── RanksDiverged      ranks that must hold the same thing do not
├── NotFinite          a loss or gradient became NaN or infinite
├── OutOfMemory        not even one sample fits into memory
├── CheckpointError    a checkpoint that cannot be written, is damaged, or belongs to another run
└── NodeFailed         a local node's process ended badly
"""

from __future__ import annotations


class ExogymError(Exception):
    """Says what failed, where, and what to do next."""


class SettingError(ExogymError, ValueError):
    pass


class UnknownSetting(SettingError, TypeError):
    pass


class PeerLost(ExogymError):
    """A collective did not complete. The communicator cannot be used again: close it and form another."""


class Stranger(PeerLost):
    pass


class StageLost(ExogymError):
    """Ends the run, which can be resumed."""


class Rejoined(ExogymError):
    """Voids what was going on: go on from the state as it is now."""


class RanksDiverged(ExogymError):
    pass


class NotFinite(ExogymError):
    pass


class OutOfMemory(ExogymError):
    """The device has too little memory for the model. Carries how much it would take, and what there is."""


class CheckpointError(ExogymError):
    pass


class NodeFailed(ExogymError):
    """Carries the traceback of the first node that failed."""
