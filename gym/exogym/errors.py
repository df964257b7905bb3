"""Everything that exogym raises on purpose.

ExogymError
├── SettingError       a setting that is unknown, out of range, or contradicts another (also a ValueError)
├── PeerLost           another rank died, froze or cut the connection
├── Rejoined           this rank was away, and has been given the state of the others (for the training loop alone)
├── RanksDiverged      ranks that must hold the same thing do not
├── NotFinite          a loss or gradient became NaN or infinite
├── CheckpointError    a checkpoint that cannot be written, is damaged, or belongs to another run
└── NodeFailed         a local node's process ended badly
"""

from __future__ import annotations


class ExogymError(Exception):
    """What failed, where, and what to do next."""


class SettingError(ExogymError, ValueError):
    pass


class PeerLost(ExogymError):
    """A collective did not complete. The communicator cannot be used again: close it and form another."""


class Rejoined(ExogymError):
    """What was going on is void: go on from the state as it is now."""


class RanksDiverged(ExogymError):
    pass


class NotFinite(ExogymError):
    pass


class CheckpointError(ExogymError):
    pass


class NodeFailed(ExogymError):
    """Carries the traceback of the first node that failed."""
