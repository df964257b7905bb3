"""The base of strategies whose ranks exchange at every step, and so have the same weights all the time."""

from __future__ import annotations

from torch import Tensor

from exogym.strategy.all_reduce_settings import AllReduceConfig
from exogym.strategy.demo_settings import DeMoConfig
from exogym.strategy.strategy import Strategy


class EveryStepStrategy(Strategy):
    """All ranks move equal weights by what all of them have sent.

    Each makes the step on its own device, and devices of another make round differently. So ranks compare their
    weights every `check_interval` steps, before checkpoints and at the end, and take on rank 0's where they differ.
    """

    config: AllReduceConfig | DeMoConfig
    differs = False

    def _start(self, flat: Tensor) -> None:
        self._agreed_buffers = flat[self.parameters.num_parameters :].clone()

    def is_drift_check_due(self, *, at_least: bool) -> bool:
        interval = self.config.check_interval
        return at_least or bool(interval and self.steps % interval == 0)

    def load_weights(self, flat: Tensor) -> None:
        self.parameters.write(flat)
        self._agreed_buffers = self.parameters.read_buffers()

    def agreed_weights(self) -> Tensor:
        """Return the agreed weights [numel]. A forward pass that has not counted yet may have changed the buffers."""
        flat = self.parameters.read()
        flat[self.parameters.num_parameters :].copy_(self._agreed_buffers)
        return flat
