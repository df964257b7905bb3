"""exogym's trainer where each rank is a machine."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore

from exogym.communication import Comm, ProcessGroupComm, SingleComm
from exogym.errors import SettingError
from exogym.trainer import DataSource, Fit, FitSettings, Trainer

from .hosts import Hosts, load_hosts
from .interfaces import route_to
from .spec import RunSpec

JOIN_S = 120.0  # for the slowest host to load its model


class NetworkTrainer(Trainer):
    """Fits a model of your own on all machines of a hosts file, as LocalTrainer does on one.

    Model and data sets are sent to the hosts as one file, checked by its SHA-256 before it is unpickled; what their
    classes import must be installed there. `hosts setup` prepares the hosts. Whisper profiles go another way: their
    ranks build model and data from the RunSpec alone (see run.py), and use this class for the connection.
    """

    def __init__(
        self,
        hosts_config: str | Path | Hosts,
        model: nn.Module,
        train_dataset: DataSource,
        val_dataset: DataSource | None = None,
    ):
        super().__init__(model, train_dataset, val_dataset)
        self.hosts = hosts_config if isinstance(hosts_config, Hosts) else load_hosts(hosts_config)
        self.spec: RunSpec | None = None

    @classmethod
    def for_rank(
        cls, spec: RunSpec, model: nn.Module, train_dataset: DataSource, val_dataset: DataSource | None = None
    ) -> Self:
        """The trainer of one worker."""
        trainer = cls.__new__(cls)
        Trainer.__init__(trainer, model, train_dataset, val_dataset)
        trainer.hosts, trainer.spec = None, spec
        return trainer

    def fit(self, **settings: Any) -> Fit:
        """See FitSettings; `num_nodes` is the number of hosts. Raises RunError, HostError, ConfigError."""
        from .bundle import fit_on_hosts

        if "num_nodes" in settings:
            raise SettingError("num_nodes is the number of hosts in the hosts file: leave it out")
        return fit_on_hosts(self, FitSettings(num_nodes=len(self.hosts.all), **settings))

    def _build_connection(self, rank: int) -> Comm:
        """Join the others at the launcher's store, over the interface that reaches it. Raises PeerLost."""
        meeting = self.spec.rendezvous
        if meeting is None:
            return SingleComm()
        # Left alone gloo resolves the host's own name, and may bind 127.0.0.1.
        os.environ["GLOO_SOCKET_IFNAME"] = route_to(meeting.address, interface=self.spec.interface or None).interface
        store = TCPStore(meeting.address, meeting.port, is_master=False, timeout=timedelta(seconds=JOIN_S))
        return ProcessGroupComm(
            rank=rank,
            world_size=self.spec.world_size,
            store=PrefixStore(meeting.prefix, store),
            timeout=meeting.timeout_s,
        )

    def agreed(self) -> Tensor | None:
        """The weights that all ranks last agreed on; None before the first time."""
        return self.node.strategy.agreed() if self.node else None
